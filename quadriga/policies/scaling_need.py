"""How many replicas the sequences of a depth class fill: by memory, by number, by time.

Source: ours, over ARES's forecast vectors (ARES §5.2, worker side).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quadriga.config.scheduling import ScalingConfig
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.policies.ares.forecast import REMAINING, SHARE, TOKENS, numbers, rows_of


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """One depth class as it is.

    Attributes:
        snapshots: Of its living decode replicas, those that drain included.
        ready_s: Replica → when it began to serve, on the policy's clock; missing is long ago.
        pending_s: Replica → when it was asked for; not there yet. Those in `ready_s` as well have
            a process, and are not given up.
        waiting: Sequences that look for a decode replica or are still to be prefilled.
        waiting_tokens: Of KV that these have or will have after prefill.
        serves: False for a class that is given up: it may shrink to nothing.
    """

    depth_class: DepthClass
    snapshots: Sequence[ReplicaSnapshot]
    ready_s: Mapping[str, float] = field(default_factory=dict)
    pending_s: Mapping[str, float] = field(default_factory=dict)
    waiting: int = 0
    waiting_tokens: int = 0
    serves: bool = True


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas wanted, by each measure, before bounds.

    Attributes:
        memory, slots: Replicas that their KV and their number fill.
        step: Replicas that keep the time per token; 0 where it is not asked for or not known.
    """

    memory: float
    slots: float
    step: float

    @property
    def greatest(self) -> float:
        return max(self.memory, self.slots, self.step)

    def __str__(self) -> str:
        parts = [f"memory {self.memory:.2f}", f"slots {self.slots:.2f}"]
        if self.step:
            parts.append(f"time per token {self.step:.2f}")
        return ", ".join(parts)


def count_need(load: ClassLoad, config: ScalingConfig, *, now_s: float) -> Need:
    """Replicas that the sequences of a class fill up to the utilisation that is allowed."""
    share = config.utilisation
    if not load.snapshots:
        return Need(0.0, 1.0 if load.waiting else 0.0, 0.0)
    seen = [_look(s, config.horizon_s) for s in load.snapshots]
    infos = [s.info for s in load.snapshots]
    capacity = sum(i.kv_capacity_tokens for i in infos) / len(infos)
    slots = sum(i.num_slots for i in infos) / len(infos)
    held = sum(s.num_running + s.num_waiting for s in load.snapshots)
    count = held + load.waiting
    tokens = _peak([s.tokens for s in seen])
    # Those that wait will grow as those that run do.
    growth = tokens / max(1.0, sum(s.tokens[0] for s in seen)) if held else 1.0
    tokens += load.waiting_tokens * max(1.0, growth)
    return Need(
        memory=tokens / (share * capacity),
        slots=count / (share * slots),
        step=_step_need(load, seen, count, config, now_s),
    )


def _step_need(
    load: ClassLoad, seen: Sequence[_DemandSeen], count: int, config: ScalingConfig, now_s: float
) -> float:
    """Replicas that keep a step within the time allowed: base + load / n.

    Cold replicas' times are not believed; their sequences are taken to weigh what those on
    warm ones do.
    """
    if config.tpot_s is None:
        return 0.0
    old_s = now_s - config.cold_start_s
    warm = [
        look
        for snapshot, look in zip(load.snapshots, seen, strict=True)
        if look.base_s > 0.0 and load.ready_s.get(snapshot.info.name, -math.inf) <= old_s
    ]
    warm_count = sum(look.count for look in warm)
    if not warm or not warm_count:
        return 0.0
    total_s = _peak([look.load_s for look in warm]) * count / warm_count
    base_s = sorted(look.base_s for look in warm)[len(warm) // 2]
    room_s = config.utilisation * config.tpot_s - base_s
    # Where not even an empty step is fast enough, more replicas do not help.
    return total_s / room_s if room_s > 0.0 else 0.0


def remaining_work(snapshot: ReplicaSnapshot) -> float:
    """Tokens that a replica's sequences are predicted to generate still, each counted by the share
    of the layers that it is expected to run.

    Without predictions a sequence is taken to have as much before it as it has behind it.
    """
    forecast = snapshot.forecast
    if forecast is None:
        return float(snapshot.used_tokens)
    rows = rows_of(forecast)
    column = REMAINING if forecast.has_predictions else TOKENS
    return float((rows[:, column] * rows[:, SHARE]).sum())


@dataclass(frozen=True, slots=True)
class _DemandSeen:
    """A snapshot's forecast up to the horizon.

    Attributes:
        tokens, load_s: [points].
        base_s: 0 where there is no forecast.
    """

    tokens: tuple[float, ...]
    load_s: tuple[float, ...]
    base_s: float
    count: int


def _look(snapshot: ReplicaSnapshot, horizon_s: float) -> _DemandSeen:
    count = snapshot.num_running + snapshot.num_waiting
    forecast = snapshot.forecast
    if forecast is None:
        return _DemandSeen((float(snapshot.used_tokens),), (0.0,), 0.0, count)
    points = sum(at_s <= horizon_s for at_s in forecast.grid_s) if forecast.has_predictions else 1
    points = max(1, points)
    tokens, load_s = numbers(forecast.tokens)[:points], numbers(forecast.load_s)[:points]
    return _DemandSeen(tuple(tokens.tolist()), tuple(load_s.tolist()), forecast.base_s, count)


def _peak(series: Sequence[Sequence[float]]) -> float:
    """The greatest sum over replicas at one point; a shorter series holds its last value."""
    length = max((len(s) for s in series), default=0)
    sums = (sum(s[min(i, len(s) - 1)] for s in series) for i in range(length))
    return max(sums, default=0.0)
