"""How many decode replicas each depth class needs, by what its sequences will still want.

The need is counted from the sequences, never from how busy the replicas are: adding a replica
does not change it, so the loop cannot chase its own tail. It grows at once. It shrinks only to the
most that was needed during the last minutes, and only past a margin, so that a load at the edge of
a replica does not swing. A replica that still starts counts as there until it is overdue; nothing
waits for it.

Source: ours, over ARES's forecast vectors (ARES §5.2, worker side).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quadriga.config.scheduling import ScalingConfig
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.policies.scaling_need import ClassLoad, Need, count_need, remaining_work

_UNKNOWN = 1e6
"""Replicas; more than there ever are."""
_MOST_PATIENCE = 8
_FILL_LIMIT = 0.9
"""Share of their KV memory that the others may be forecast to fill when one retires."""


@dataclass(frozen=True, slots=True)
class AddReplicas:
    """Start so many replicas of a class."""

    depth_class: DepthClass
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class RetireReplica:
    """Take nothing new on this replica, migrate what it holds, then end it."""

    replica: str
    depth_class: DepthClass
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUpReplica:
    """Stop waiting for a replica that was asked for; it is not counted on any more."""

    replica: str
    depth_class: DepthClass
    reason: str


ScalingOrder = AddReplicas | RetireReplica | GiveUpReplica


@dataclass(slots=True)
class _Memory:
    """What one class needed lately.

    Attributes:
        since_s: When it was seen first.
        needs: (when, how much), falling: of each moment, only what no later need exceeds.
        patience: Factor on the time before it shrinks.
        shrank_s, is_blamed: When it last shrank, and whether that was seen to be a mistake.
    """

    since_s: float
    needs: deque[tuple[float, float]] = field(default_factory=deque)
    patience: int = 1
    shrank_s: float = -math.inf
    is_blamed: bool = False

    def lasting_need(self, need: float, now_s: float, down_after_s: float) -> float:
        """The most needed of late; beyond all bounds before the class was seen for that long."""
        while self.needs and self.needs[-1][1] <= need:
            self.needs.pop()
        self.needs.append((now_s, need))
        oldest_s = now_s - self.patience * down_after_s
        while self.needs[0][0] < oldest_s:
            self.needs.popleft()
        return self.needs[0][1] if self.since_s <= oldest_s else _UNKNOWN

    def grew(self, now_s: float, down_after_s: float) -> None:
        """Growing soon after shrinking was a mistake: be slower next time, up to a limit."""
        passed_s = now_s - self.shrank_s
        if passed_s <= 2 * self.patience * down_after_s:
            if not self.is_blamed:
                self.patience = min(2 * self.patience, _MOST_PATIENCE)
            self.is_blamed = True
        elif passed_s > 2 * _MOST_PATIENCE * down_after_s:
            self.patience = 1


class ScalingPolicy:
    """Decides for every class, with bounds and without oscillation. Pure: time comes in."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._memories: dict[DepthClass, _Memory] = {}

    def decide(self, classes: Sequence[ClassLoad], *, now_s: float) -> list[ScalingOrder]:
        """Return what shall be started, retired or given up, in this order of classes."""
        known = {load.depth_class for load in classes}
        for gone in set(self._memories) - known:
            del self._memories[gone]
        return [order for load in classes for order in self._decide(load, now_s)]

    def _decide(self, load: ClassLoad, now_s: float) -> list[ScalingOrder]:
        config = self._config
        need = count_need(load, config, now_s=now_s)
        least = config.min_replicas if load.serves else 0
        wanted = min(max(_whole(need.greatest), least), config.max_replicas)
        memory = self._memories.setdefault(load.depth_class, _Memory(now_s))
        lasting_need = memory.lasting_need(need.greatest, now_s, config.down_after_s)
        lasting = max(_whole(lasting_need / (1.0 - config.down_margin)), least)
        lasting = min(lasting, config.max_replicas)
        orders: list[ScalingOrder] = []
        coming = []
        for name, since_s in sorted(load.pending_s.items()):
            waited_s = now_s - since_s
            if waited_s < config.pending_timeout_s:
                coming.append(name)
                continue
            reason = f"not there after {waited_s:.0f} s; another one is asked for if needed"
            orders.append(GiveUpReplica(name, load.depth_class, reason))
        ready = [s for s in load.snapshots if not s.draining]
        have = len(ready) + len(coming)
        if wanted > have:
            reason = f"{wanted} replicas wanted ({need}), {len(ready)} serve, {len(coming)} start"
            orders.append(AddReplicas(load.depth_class, wanted - have, reason))
            memory.grew(now_s, config.down_after_s)
        elif lasting < have:
            orders += self._shrink(load, ready, coming, lasting, need)
            if orders:
                memory.shrank_s, memory.is_blamed = now_s, False
        return orders

    def _shrink(
        self,
        load: ClassLoad,
        ready: Sequence[ReplicaSnapshot],
        coming: Sequence[str],
        lasting: int,
        need: Need,
    ) -> list[ScalingOrder]:
        """One replica less: one that still starts, else the one with the least work left."""
        why = f"{lasting} replicas were enough for {self._config.down_after_s:.0f} s (now {need})"
        if lasting == self._config.max_replicas:
            why = f"max_replicas is {lasting} (now {need})"
        given_up = [name for name in coming if name not in load.ready_s]
        if given_up:
            newest = max(given_up, key=lambda n: (load.pending_s[n], n))
            return [GiveUpReplica(newest, load.depth_class, f"{why}; it has not started yet")]
        if len(ready) < len(load.snapshots) or len(ready) <= lasting:
            return []  # one at a time: another one drains; or those that serve are too few
        least = min(ready, key=lambda s: (remaining_work(s), s.info.name))
        others = [s for s in ready if s is not least]
        if not _has_room(least, others):
            return []
        work = remaining_work(least)
        reason = f"{why}; it has the least work left, {work:.0f} tokens"
        return [RetireReplica(least.info.name, load.depth_class, reason)]


def _whole(need: float) -> int:
    return math.ceil(need - 1e-9)


def _has_room(leaving: ReplicaSnapshot, others: Sequence[ReplicaSnapshot]) -> bool:
    """Whether the others hold what a replica has now, with slots and memory to spare."""
    slots = sum(s.info.num_slots - s.num_running - s.num_waiting for s in others)
    if leaving.num_running + leaving.num_waiting > slots:
        return False
    capacity = sum(s.info.kv_capacity_tokens for s in others)
    used = leaving.used_tokens + sum(s.used_tokens for s in others)
    return used <= _FILL_LIMIT * capacity
