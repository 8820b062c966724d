"""Replicas that come and go in a simulation: the cluster's own scaling policy, modelled starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.policies.scaling import (
    AddReplicas,
    GiveUpReplica,
    RetireReplica,
    ScalingOrder,
    ScalingPolicy,
)
from quadriga.policies.scaling_need import ClassLoad
from quadriga.sim.board import Board
from quadriga.sim.config import DEPTH_CLASS, SimScaling
from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.moving import Moving
from quadriga.sim.placing import Placing
from quadriga.sim.recorder import snapshots_of

_MOVES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Scaled:
    """What the scaler did, and how many replicas serve then."""

    at_s: float
    order: ScalingOrder
    serving: int


class Autoscaler:
    """Carries the policy's orders out on a board of replicas.

    Args:
        waiting: Asked for (sequences without a decode replica, tokens of their KV).
        changed: Notify the cluster that a replica's state changed.
        at: Have the cluster call something at a time.

    Attributes:
        log: Every order.
    """

    def __init__(
        self,
        scaling: SimScaling,
        capacity_tokens: int,
        board: Board,
        replicas: list[SimulatedDecodeReplica],
        placing: Placing,
        moving: Moving,
        *,
        waiting: Callable[[], tuple[int, int]],
        changed: Callable[[int], None],
        at: Callable[..., None],
    ) -> None:
        self.log: list[Scaled] = []
        self._scaling, self._capacity = scaling, capacity_tokens
        self._board, self._replicas, self._placing, self._moving = board, replicas, placing, moving
        self._waiting, self._changed, self._at = waiting, changed, at
        self._policy = ScalingPolicy(scaling.config)
        self._index = {name: i for i, name in enumerate(board.names)}
        self._ready_s: dict[str, float] = {}
        self._pending_s: dict[str, float] = {}
        self._abandoned: set[int] = set()
        board.is_alive[scaling.start_replicas :] = False

    def tick(self, now_s: float) -> None:
        """Ask the policy, begin what it orders, and go on draining."""
        for order in self._policy.decide([self._load(now_s)], now_s=now_s):
            self._begin(now_s, order)
            serving = self._board.is_alive & ~self._board.is_draining
            self.log.append(Scaled(now_s, order, int(serving.sum())))
        for index in np.flatnonzero(self._board.is_draining).tolist():
            self._drain(now_s, index)

    def _load(self, now_s: float) -> ClassLoad:
        board = self._board
        cluster = board.forecast(
            now_s, self._placing.grid_s, self._capacity, self._placing.predictor
        )
        snapshots = snapshots_of(
            cluster, board.profile.num_slots, now_s, base_s=board.profile.step.base_s
        )
        for snapshot in snapshots:
            index = self._index[snapshot.info.name]
            snapshot.num_running = int(board.num_held[index]) - snapshot.num_paused
            snapshot.draining = bool(board.is_draining[index])
        waiting, tokens = self._waiting()
        return ClassLoad(
            DEPTH_CLASS, snapshots, dict(self._ready_s), dict(self._pending_s), waiting, tokens
        )

    def _begin(self, now_s: float, order: ScalingOrder) -> None:
        match order:
            case AddReplicas():
                taken = {self._index[n] for n in self._pending_s} | self._abandoned
                free = (i for i in np.flatnonzero(~self._board.is_alive) if i not in taken)
                for index, _ in zip(free, range(order.count), strict=False):
                    self._pending_s[self._board.names[index]] = now_s
                    if index not in self._scaling.stuck:
                        self._at(now_s + self._scaling.start_s, self._started, int(index), now_s)
            case GiveUpReplica():
                del self._pending_s[order.replica]
                if self._index[order.replica] in self._scaling.stuck:
                    self._abandoned.add(self._index[order.replica])
            case RetireReplica():
                self._board.is_draining[self._index[order.replica]] = True
                self._placing.forecast = None

    def _started(self, now_s: float, index: int, asked_s: float) -> None:
        name = self._board.names[index]
        if self._pending_s.get(name) != asked_s:
            return  # given up meanwhile
        del self._pending_s[name]
        self._ready_s[name] = now_s
        self._board.is_alive[index] = True
        self._placing.forecast = None
        self._changed(index)

    def _drain(self, now_s: float, index: int) -> None:
        """Move some more of what it holds; an empty replica ends."""
        board, replica = self._board, self._replicas[index]
        if not replica.num_held:
            board.is_draining[index] = board.is_alive[index] = False
            self._ready_s.pop(board.names[index], None)
            self._placing.forecast = None
            self._changed(index)
            return
        new_steps = board.new_steps(now_s)
        used = board.used_tokens(new_steps)
        is_here = (board.owner == index) & (board.is_running | board.is_paused)
        for request in np.flatnonzero(is_here).tolist():
            if self._moving.num_leaving(index) >= _MOVES_AT_ONCE:
                return
            if self._moving.is_moving(request):
                continue
            tokens = int(board.tokens_of(np.array([request]), new_steps)[0])
            fits = board.is_alive & ~board.is_draining & (used + tokens <= self._capacity)
            fits &= board.num_held < board.profile.num_slots
            if not fits.any():
                return
            target = int(np.argmin(np.where(fits, used, np.inf)))
            used[target] += tokens
            self._moving.start(now_s, self._order(request, index, target, tokens))

    def _order(self, request: int, source: int, target: int, tokens: int) -> MigrationOrder:
        names = self._board.names
        return MigrationOrder(
            sequence_id=str(request),
            depth_class=DEPTH_CLASS,
            source=names[source],
            destination=names[target],
            cause=MigrationCause.DRAIN,
            gain=0.0,
            num_tokens=tokens,
            remaining_tokens=0.0,
        )
