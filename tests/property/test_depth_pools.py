"""Whether shallow and deep sequences run apart: every split is tried, one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.policies.ares.cluster import unpack
from quadriga.policies.ares.depth_pools import (
    ENTER_GAIN,
    LEAVE_GAIN,
    MARGIN,
    MOST_GAP,
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


@settings(max_examples=150, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=4), st.sampled_from([0.25, 0.5]), st.booleans())
def test_the_plan_is_the_best_of_all_splits_and_its_figure_is_the_models(
    replicas: list[list[tuple[float, int]]], front_share: float, was_on: bool
) -> None:
    snapshots = [
        snapshot(
            f"d{i}",
            [
                Held(f"{i}-{j}", tokens, 100, 100, 100, share=share)
                for j, (share, tokens) in enumerate(rows)
            ],
            front_share=front_share,
            capacity=200_000,
        )
        for i, rows in enumerate(replicas)
    ]
    cluster = unpack(snapshots)
    assert cluster is not None
    names = frozenset(cluster.names)
    last = DepthPools(frozenset({"d1"}), 0.5, 0.1, 1.0, 0.9, 0.0, names) if was_on else None
    plan = plan_pools(cluster, SETTINGS, last, 60.0)
    rows = [(float(r[7]), float(r[0])) for r in cluster.rows]
    if len(rows) < 2 * len(replicas):
        assert plan is None
        return
    assert plan is not None
    model = StepModel(front_share, BASE_S, PER_SEQUENCE_S, PER_TOKEN_S)
    mixed_s = plain_token_s(model, rows, len(replicas))
    assert plan.mixed_s == pytest.approx(mixed_s / len(rows), rel=1e-5)
    splits = every_split(model, rows, len(replicas), 16.0, SETTINGS.memory_limit * 200_000)
    if not splits:
        assert not plan.is_on
        return
    assert plan.split_s == pytest.approx(min(splits) / len(rows), rel=1e-5)
    assert plan.gain == pytest.approx(1 - min(splits) / mixed_s, abs=1e-5)
    bar = LEAVE_GAIN if was_on else ENTER_GAIN
    if abs(plan.gain - bar) > 1e-4:
        assert plan.is_on == (plan.gain > bar)
    if plan.is_on:
        assert plan.shallow < names
        assert not was_on or "d1" in plan.shallow, "a shallow replica stays shallow"


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
    part = [replica for m in moves for replica in (m.source, m.destination)]
    assert len(part) == len(set(part))
    for move in moves:
        share = float(cluster.rows[move.row, 7])
        goes_deep = cluster.names[move.destination] not in shallow
        assert move.row in candidates
        assert (cluster.names[move.source] in shallow) == goes_deep
        assert (share - cut if goes_deep else cut - share) > MARGIN
        assert move.destination != full
    # Whoever would still gain has no replica left that could give or take it.
    free = set(range(len(cluster))) - set(part)
    for row in candidates:
        source, share = int(cluster.owner[row]), float(cluster.rows[row, 7])
        is_shallow = cluster.names[source] in shallow
        off = share - cut if is_shallow else cut - share
        if source in free and off > MARGIN and cluster.rows[row, REMAINING] > 0:
            assert not any(
                (cluster.names[d] in shallow) != is_shallow and cluster.free_slots[d] > 0
                for d in free
            )


def _array(values: list[int]):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.array(values, dtype=np.int64)
