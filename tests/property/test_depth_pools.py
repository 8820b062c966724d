"""Whether shallow and deep sequences run apart: every split is tried, one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.policies.ares.cluster import ClusterForecast, unpack
from quadriga.policies.ares.depth_pools import (
    CHANGE_GAIN,
    ENTER_GAIN,
    LEAVE_GAIN,
    MARGIN,
    MIN_ROWS,
    MOST_GAP,
    SPILL,
    DepthPools,
    StepModel,
    crossings,
    plan_pools,
)
from quadriga.policies.ares.forecast import REMAINING
from quadriga.policies.ares.settings import AresSettings
from tests.unit.policies.ares_twin import BASE_S, PER_SEQUENCE_S, PER_TOKEN_S, Held, snapshot

SETTINGS = AresSettings()
Row = tuple[float, float]
"""The share of the layers that its tokens run, and its KV tokens."""


def plain_token_s(model: StepModel, rows: Sequence[Row], num_replicas: int) -> float:
    """The model of the module's docstring, written out."""
    f = model.front_share
    adds = [
        (model.per_sequence_s + model.per_token_s * tokens) / num_replicas for _, tokens in rows
    ]
    leaves = [1.0 - min(max((share - f) / (1.0 - f), 0.0), 1.0) for share, _ in rows]
    full_s = model.base_s + sum(adds)
    best = len(rows) * full_s
    for k in range(1, 100):
        if k > 1 and f * (k - 1) > MOST_GAP:
            break
        front_s = sum(
            f * (model.base_s + sum(u**j * x for u, x in zip(leaves, adds, strict=True)))
            for j in range(k)
        )
        no_deep = math.prod(u ** (k / num_replicas) for u in leaves)
        deep_s = model.base_s * (1 - no_deep)
        deep_s += sum((1 - u**k) * x for u, x in zip(leaves, adds, strict=True))
        round_s = front_s + (1 - f) * deep_s
        if k > 1 and round_s > MOST_GAP * full_s:
            break
        came = [sum(u**j for j in range(1, k + 1)) + 1 - u**k for u in leaves]
        best = min(best, round_s * sum(1 / tokens for tokens in came))
    return best


def every_split(
    model: StepModel, rows: Sequence[Row], num_replicas: int, slots: float, room: float
) -> list[float]:
    """A token's time, summed, for each number of shallow replicas and each cut that has room."""
    rows, found = sorted(rows), []
    for size in range(1, num_replicas):
        for at in range(1, len(rows)):
            if rows[at - 1][0] == rows[at][0]:
                continue
            sides = ((rows[:at], size), (rows[at:], num_replicas - size))
            if any(
                len(part) > slots * of or sum(n for _, n in part) > room * of for part, of in sides
            ):
                continue
            found.append(sum(plain_token_s(model, part, of) for part, of in sides))
    return found


SHARES = st.sampled_from([0.25, 0.26, 0.3, 0.45, 0.7, 0.95, 1.0])
ROWS = st.lists(st.tuples(SHARES, st.integers(1, 3000)), min_size=1, max_size=14)


MODEL_COSTS = (BASE_S, PER_SEQUENCE_S, PER_TOKEN_S)
SLOTS, CAPACITY = 16.0, 200_000


def cluster_of(replicas: Sequence[Sequence[tuple[float, int]]], front: float) -> ClusterForecast:
    """Replicas d0, d1, … that hold sequences of such shares and tokens."""
    found = unpack(
        [
            snapshot(
                f"d{i}",
                [
                    Held(f"{i}-{j}", tokens, 100, 100, 100, share=share)
                    for j, (share, tokens) in enumerate(rows)
                ],
                front_share=front,
                capacity=CAPACITY,
            )
            for i, rows in enumerate(replicas)
        ]
    )
    assert found is not None
    return found


def rows_of(cluster: ClusterForecast) -> list[Row]:
    return [(float(r[7]), float(r[0])) for r in cluster.rows]


@settings(max_examples=100, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=4), st.sampled_from([0.25, 0.5]))
def test_the_first_look_finds_the_best_of_all_splits_and_makes_none(
    replicas: list[list[tuple[float, int]]], front_share: float
) -> None:
    cluster = cluster_of(replicas, front_share)
    plan, rows, n = plan_pools(cluster, SETTINGS, None, 60.0), rows_of(cluster), len(replicas)
    if len(rows) < MIN_ROWS * n:
        assert plan is None
        return
    assert plan is not None
    assert not plan.is_on
    model = StepModel(front_share, *MODEL_COSTS)
    mixed_s = plain_token_s(model, rows, n)
    assert plan.mixed_s == pytest.approx(mixed_s / len(rows), rel=1e-5)
    splits = every_split(model, rows, n, SLOTS, SETTINGS.memory_limit * CAPACITY)
    assert bool(plan.found[0]) is bool(splits)
    if splits:
        assert plan.gain == pytest.approx(1 - min(splits) / mixed_s, abs=1e-5)
        assert split_s(model, rows, n, plan.found) == pytest.approx(min(splits), rel=1e-5)


def split_s(
    model: StepModel, rows: Sequence[Row], num_replicas: int, split: tuple[int, float]
) -> float:
    """A token's time, summed, by one split; infinite where a side lacks room."""
    size, cut = split
    sides = (
        ([row for row in rows if row[0] <= cut], size),
        ([row for row in rows if row[0] > cut], num_replicas - size),
    )
    limit = SETTINGS.memory_limit * CAPACITY
    if any(len(s) > SLOTS * of or sum(t for _, t in s) > limit * of for s, of in sides):
        return math.inf
    return sum(plain_token_s(model, side, of) for side, of in sides)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 4).flatmap(
        lambda n: st.tuples(*[st.lists(ROWS, min_size=n, max_size=n) for _ in range(2)])
    ),
    st.sampled_from([0.25, 0.5]),
    st.booleans(),
)
def test_a_split_is_made_and_kept_where_it_pays_for_the_sequences_of_the_next_look(
    looks: tuple[list[list[tuple[float, int]]], ...], front_share: float, was_on: bool
) -> None:
    before, now = (cluster_of(replicas, front_share) for replicas in looks)
    last = plan_pools(before, SETTINGS, None, 0.0)
    if last is None or not last.found[0]:
        return
    splits, names, n = [last.found], sorted(last.members), len(now)
    if was_on:
        last = replace(last, shallow=frozenset(names[:1]), cut=0.5)
        splits.insert(0, (1, 0.5))
    plan, rows = plan_pools(now, SETTINGS, last, 60.0), rows_of(now)
    if plan is None:
        assert len(rows) < MIN_ROWS * n
        return
    model = StepModel(front_share, *MODEL_COSTS)
    mixed_s = plain_token_s(model, rows, n)
    gains = [1 - split_s(model, rows, n, split) / mixed_s for split in splits]
    changes = was_on and gains[1] > gains[0] + CHANGE_GAIN
    chosen = splits[-1] if changes else splits[0]
    gain = gains[splits.index(chosen)]
    bar = LEAVE_GAIN if was_on else ENTER_GAIN
    close = [abs(gain - bar), abs(gains[-1] - gains[0] - CHANGE_GAIN)]
    if any(math.isfinite(c) and c < 1e-4 for c in close):
        return
    assert plan.is_on == (gain > bar)
    if math.isfinite(gain):
        assert plan.gain == pytest.approx(gain, abs=1e-5)
    if plan.is_on:
        assert (len(plan.shallow), plan.cut) == chosen
        assert not was_on or names[0] in plan.shallow, "a shallow replica stays shallow"


@settings(max_examples=100, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=4), st.floats(0.3, 0.9), st.data())
def test_sequences_cross_to_their_own_side_and_each_replica_takes_part_once(
    replicas: list[list[tuple[float, int]]], cut: float, data: st.DataObject
) -> None:
    snapshots = [
        snapshot(
            f"d{i}",
            [
                Held(f"{i}-{j}", tokens, 100 + j, 100, 100, share=share)
                for j, (share, tokens) in enumerate(rows)
            ],
            front_share=0.25,
        )
        for i, rows in enumerate(replicas)
    ]
    full = data.draw(st.integers(0, len(replicas) - 1))
    snapshots[full] = replace(snapshots[full], draining=True)
    cluster = unpack(snapshots)
    assert cluster is not None
    shallow = frozenset(cluster.names[: data.draw(st.integers(1, len(replicas) - 1))])
    pools = DepthPools(shallow, cut, 0.1, 1.0, 0.9, 0.0, frozenset(cluster.names))
    candidates = [i for i in range(len(cluster.rows)) if i % 3]
    moves = crossings(cluster, pools, SETTINGS, _array(candidates))
    work = (cluster.load_s @ SETTINGS.weights).tolist()
    part = [replica for m in moves for replica in (m.source, m.destination)]
    assert len(part) == len(set(part))
    for move in moves:
        assert work[move.destination] <= SPILL * work[move.source]
        share = float(cluster.rows[move.row, 7])
        goes_deep = cluster.names[move.destination] not in shallow
        assert move.row in candidates
        assert (cluster.names[move.source] in shallow) == goes_deep
        assert (share - cut if goes_deep else cut - share) > MARGIN
        assert move.destination != full
    # Whoever would still gain has no replica left that could give or take it, or all that could
    # have far more to do.
    free = set(range(len(cluster))) - set(part)
    for row in candidates:
        source, share = int(cluster.owner[row]), float(cluster.rows[row, 7])
        is_shallow = cluster.names[source] in shallow
        off = share - cut if is_shallow else cut - share
        if source in free and off > MARGIN and cluster.rows[row, REMAINING] > 0:
            assert not any(
                (cluster.names[d] in shallow) != is_shallow
                and cluster.free_slots[d] > 0
                and work[d] <= SPILL * work[source]
                for d in free
            )


def _array(values: list[int]):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.array(values, dtype=np.int64)
