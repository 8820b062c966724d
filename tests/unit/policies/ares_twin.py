"""Random decode replicas, and the plain twin of ARES's selection: every move tried, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.policies.ares.cluster import ClusterForecast, unpack
from quadriga.policies.ares.forecast import (
    FIXED,
    NUM_COLUMNS,
    PAUSED,
    RUNS,
    StepCosts,
    forecast_rows,
    pack,
)
from quadriga.policies.ares.settings import AresSettings, TransferCosts, horizon_s

CLASS = DepthClass("m", 8)
GRID = horizon_s(0.02)
AHEAD = (0.0, *(20.0 * 1.64**i for i in range(16)))
PER_SEQUENCE_S, PER_TOKEN_S, BASE_S = 1e-5, 1e-7, 0.01


@dataclass(frozen=True, slots=True)
class Held:
    """One sequence on a replica, in plain numbers."""

    sequence_id: str
    tokens: float
    remaining: float
    lower: float
    upper: float
    moves: int = 0
    since_move_s: float = float("inf")
    movable: float = RUNS
    share: float = 1.0
    least_layers: int = 0
    most_layers: int = 0
    most_tokens: int = 0


def snapshot(
    name: str,
    held: Sequence[Held],
    *,
    step_s: float = 0.02,
    capacity: int = 100_000,
    slots: int = 16,
    draining: bool = False,
    has_predictions: bool = True,
    slower: float = 1.0,
    depth: int = CLASS.depth,
    front_share: float = 1.0,
) -> ReplicaSnapshot:
    """A replica's packed snapshot, as its worker would make it.

    Args:
        slower: By so much longer than they are it measures its steps' parts.
    """
    rows = forecast_rows(
        tokens=[h.tokens for h in held],
        remaining=[h.remaining for h in held],
        lower=[h.lower for h in held],
        upper=[h.upper for h in held],
        moves=[h.moves for h in held],
        since_move_s=[h.since_move_s for h in held],
        movable=[h.movable for h in held],
        share=[h.share for h in held],
        least_layers=[h.least_layers for h in held],
        most_layers=[h.most_layers for h in held],
        most_tokens=[h.most_tokens for h in held],
    )
    tokens = int(sum(h.tokens for h in held))
    num_paused = sum(h.movable == PAUSED for h in held)
    return ReplicaSnapshot(
        info=ReplicaInfo(
            name, Role.DECODE, replace(CLASS, depth=depth), "n", name, slots, capacity
        ),
        taken_unix_s=0.0,
        num_running=len(held) - num_paused,
        num_waiting=num_paused,
        num_paused=num_paused,
        used_tokens=tokens,
        reserved_tokens=tokens,
        step_time_s=step_s,
        draining=draining,
        forecast=pack(
            rows,
            [h.sequence_id for h in held],
            grid_s=GRID,
            step_s=step_s,
            base_s=BASE_S,
            costs=StepCosts(slower * PER_SEQUENCE_S, slower * PER_TOKEN_S),
            has_predictions=has_predictions,
            front_share=front_share,
        ),
    )


def unpacked(snapshots: Sequence[ReplicaSnapshot]) -> ClusterForecast:
    """What a tick sees of replicas that can be compared."""
    cluster = unpack(snapshots)
    assert cluster is not None
    return cluster


def random_cluster(rng: np.random.Generator) -> list[ReplicaSnapshot]:
    """2 to 6 uneven replicas with 0 to 6 sequences each; some small, some full, some draining;
    and in a third of the clusters one or two that had to pause some."""
    snapshots = []
    has_paused = rng.random(6) < (0.3 if rng.random() < 0.33 else 0.0)
    for index in range(int(rng.integers(2, 7))):
        size = rng.choice([300, 3000, 9000])
        held = []
        for j in range(int(rng.integers(0, 7))):
            remaining = float(rng.integers(1, 30_000) if rng.random() < 0.8 else rng.integers(1, 9))
            held.append(
                Held(
                    f"s{index}-{j}",
                    float(rng.integers(10, size)),
                    remaining,
                    float(int(remaining * rng.choice([0.1, 0.5, 1.0]))),
                    float(int(remaining * rng.choice([1.0, 1.5, 3.0]))),
                    moves=int(rng.integers(0, 4)) if rng.random() < 0.2 else 0,
                    since_move_s=float(rng.integers(0, 10)) if rng.random() < 0.2 else np.inf,
                    movable=_movable(rng, bool(has_paused[index])),
                    share=float(np.float32(rng.choice([1.0, 1.0, 0.25, 0.5]))),
                )
            )
        snapshots.append(
            snapshot(
                f"d{index}",
                held,
                step_s=float(rng.uniform(0.01, 0.04)),
                capacity=int(rng.choice([20_000, 60_000, 200_000])),
                slots=int(rng.choice([4, 6, 16])),
                draining=bool(rng.random() < 0.1),
                slower=float(rng.uniform(0.5, 2.0)),
            )
        )
    return snapshots


def _movable(rng: np.random.Generator, has_paused: bool) -> float:
    if rng.random() < 0.1:
        return FIXED
    return PAUSED if has_paused and rng.random() < 0.4 else RUNS


def tied_cluster(rng: np.random.Generator) -> list[ReplicaSnapshot]:
    """Replicas with the same few sequences over and over: most gains are equal."""
    one = Held("", 1024.0, 4096.0, 4096.0, 4096.0)
    two = Held("", 2048.0, 4096.0, 2048.0, 8192.0)
    names = iter(rng.permutation(100).tolist())
    snapshots = []
    for index in range(int(rng.integers(3, 7))):
        count = int(rng.choice([0, 1, 6, 6]))
        held = [
            Held(f"s{next(names):02}", h.tokens, h.remaining, h.lower, h.upper)
            for h in ([one, two] * 3)[:count]
        ]
        snapshots.append(snapshot(f"d{index}", held))
    return snapshots


@dataclass(slots=True)
class _Replica:
    snap: ReplicaSnapshot
    load: np.ndarray  # float64 [17]
    tokens: np.ndarray  # float64 [17]
    rows: np.ndarray  # float64 [num_rows, 7]
    x: np.ndarray  # float64 [num_rows, 17]
    used: bool = False


def brute_force(
    snapshots: Sequence[ReplicaSnapshot],
    settings: AresSettings,
    costs: TransferCosts,
    *,
    load_only: bool = False,
    busy: frozenset[str] = frozenset(),
) -> list[tuple[str, str, str, float]]:
    """Moves of one tick as (sequence, source, destination, gain): each candidate is made, the
    variance of the whole cluster taken anew, and every condition written out."""
    replicas = []
    forecasts = [s.forecast for s in snapshots if s.forecast is not None]
    sequence_s = float(np.median([f.per_sequence_s for f in forecasts]))
    token_s = float(np.median([f.per_token_s for f in forecasts]))
    for snap in sorted(snapshots, key=lambda s: s.info.name):
        f = snap.forecast
        assert f is not None
        running, context, held = (
            np.frombuffer(b, "<f4").astype(float) for b in (f.running, f.context, f.tokens)
        )
        rows = np.frombuffer(f.rows, "<f4").reshape(-1, NUM_COLUMNS).astype(float)
        x = [
            [
                row[7] * (sequence_s + token_s * (row[0] + ahead))
                if i == 0 or ahead <= row[1]
                else 0.0
                for i, ahead in enumerate(AHEAD)
            ]
            for row in rows
        ]
        single = np.array(x, dtype=np.float32).reshape(-1, 17).astype(float)
        replicas.append(
            _Replica(snap, sequence_s * running + token_s * context, held, rows, single)
        )
    width = [b - a for a, b in pairwise(AHEAD)]
    raw = [0.0, *(w * settings.decay**i for i, w in enumerate(width))]
    points = np.array([1.0] + [0.0] * 16) if load_only else np.array(raw) / sum(raw)
    n = len(replicas)
    start = float(np.var([r.load for r in replicas], axis=0) @ points) or 1.0
    w = [float(r.load @ points) for r in replicas]
    mean_w = sum(w) / n
    mean_step = sum(r.snap.step_time_s for r in replicas) / n

    seen_s = 0.0 if load_only else settings.rescue_within_s

    def full_in_s(r: _Replica) -> float:
        if r.snap.num_paused:
            return 0.0
        limit = settings.rescue_limit * r.snap.info.kv_capacity_tokens
        seen = zip(r.tokens, GRID, strict=True)
        return min((at_s for t, at_s in seen if t > limit and at_s <= seen_s), default=np.inf)

    full_s = [full_in_s(r) for r in replicas]
    rescue = [s < np.inf for s in full_s]
    able = [
        r.snap.info.name not in busy
        and not r.snap.draining
        and not r.snap.num_paused
        and r.snap.num_running < r.snap.info.num_slots
        for r in replicas
    ]
    over = [
        i
        for i, r in enumerate(replicas)
        if (w[i] > (1 + settings.theta) * mean_w or rescue[i]) and r.snap.info.name not in busy
    ]
    under = [i for i in range(n) if able[i] and w[i] < (1 - settings.theta) * mean_w]
    if not under and any(able):
        under = [min((i for i in range(n) if able[i]), key=lambda i: (w[i], i))]

    moves: list[tuple[str, str, str, float]] = []
    limit = max(1, round(settings.moves_share * n))
    while len(moves) < limit:
        best: tuple[tuple[float, float, float, float, str, str], int, int, int, float] | None = None
        before = float(np.var([r.load for r in replicas], axis=0) @ points)
        for s in over:
            for k, row in enumerate(replicas[s].rows):
                tokens, remaining, lower, upper, num_moves, since_s, movable, *_ = row
                cost_s, is_rescue = costs.seconds(tokens), rescue[s] or movable == PAUSED
                if movable == FIXED or num_moves >= settings.max_moves:
                    continue
                if since_s < settings.cooldown_s:
                    continue
                if not (load_only or movable == PAUSED) and not (
                    remaining > settings.remaining_factor * cost_s / mean_step
                ):
                    continue
                for t in [i for i in range(n) if able[i]] if is_rescue else under:
                    source, target = replicas[s], replicas[t]
                    if s == t or source.used or target.used:
                        continue
                    x = source.x[k]
                    loads = [r.load.copy() for r in replicas]
                    loads[s] -= x
                    loads[t] += x
                    after = float(np.var(loads, axis=0) @ points)
                    gain = round((before - after) / start, 12)
                    if not is_rescue:
                        if gain <= 0 or gain < settings.min_gain * min(1.0, 3 / n):
                            continue
                        diff = w[s] - w[t]
                        turned = (w[t] + x @ points) - (w[s] - x @ points)
                        if not turned <= 0.5 * diff:
                            continue
                    if not _fits(target, tokens, upper, settings, load_only):
                        continue
                    if not load_only and not is_rescue:
                        if _saved_s(source, target, x, lower) < settings.cost_factor * cost_s:
                            continue
                    assert source.snap.forecast is not None
                    name = source.snap.forecast.sequence_ids[k]
                    turn = full_s[s] if movable == RUNS else -1.0
                    key = (turn, -gain, tokens, -remaining, name, target.snap.info.name)
                    if best is None or key < best[0]:
                        best = (key, s, t, k, gain)
        if best is None:
            break
        key, s, t, k, gain = best
        moves.append((key[4], replicas[s].snap.info.name, key[5], gain))
        x = replicas[s].x[k]
        replicas[s].load, replicas[t].load = replicas[s].load - x, replicas[t].load + x
        replicas[s].used = replicas[t].used = True
    return moves


def _fits(
    target: _Replica, tokens: float, upper: float, settings: AresSettings, load_only: bool
) -> bool:
    capacity = target.snap.info.kv_capacity_tokens
    ahead = [s / target.snap.step_time_s for s in GRID]
    peaks = []
    for i, gained in enumerate(ahead):
        still_here = i == 0 or ahead[i - 1] < upper
        peaks.append(target.tokens[i] + (tokens + min(gained, upper) if still_here else 0.0))
    horizon = 0.0 if load_only else settings.memory_horizon_s
    peaks = [p for p, at_s in zip(peaks, GRID, strict=True) if at_s <= horizon]
    return max(peaks) <= settings.memory_limit * capacity


def _saved_s(source: _Replica, target: _Replica, x: np.ndarray, lower: float) -> float:
    saved = 0.0
    for i in range(1, 17):
        if AHEAD[i] > lower:
            continue
        s, t = source.load[i], target.load[i]
        drop = max(s, t) - max(s - x[i], t + x[i])
        saved += (AHEAD[i] - AHEAD[i - 1]) * drop
    return saved
