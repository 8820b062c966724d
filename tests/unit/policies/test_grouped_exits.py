"""The baselines keep a batch a batch: all leave, or all go on."""

from __future__ import annotations

import math

import pytest

from quadriga.policies.baselines.exits import (
    EagerExits,
    GroupedExits,
    LazyExits,
    MajorityExits,
    NoExits,
)
from quadriga.policies.drex import SegmentCosts
from quadriga.policies.rebatching import BatchDecision, ExitGroup, Range, Waiting

NOBODY = Waiting()
SOME = Waiting(3, 30, 1.0)


def group(confidences: list[float], thresholds: list[float]) -> ExitGroup:
    passed = [c >= t for c, t in zip(confidences, thresholds, strict=True)]
    remaining = Waiting(passed.count(False), 10, math.inf)
    return ExitGroup(Range(0, 1), confidences, thresholds, passed, 10, NOBODY, remaining)


ALL, ONE, TWO, NONE = [0.9, 0.9, 0.9], [0.9, 0.1, 0.1], [0.9, 0.9, 0.1], [0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("kind", "leave", "stay"),
    [
        (EagerExits, [ALL, TWO, ONE], [NONE]),
        (LazyExits, [ALL], [TWO, ONE, NONE]),
        (MajorityExits, [ALL, TWO], [ONE, NONE]),
        (NoExits, [], [ALL, TWO, ONE, NONE]),
    ],
)
def test_who_leaves(
    kind: type[GroupedExits], leave: list[list[float]], stay: list[list[float]]
) -> None:
    policy = kind(SegmentCosts(2, 8))
    for confidences in leave:
        assert policy.judge(group(confidences, [0.5] * 3), 0.0) is BatchDecision.LEAVE
    for confidences in stay:
        assert policy.judge(group(confidences, [0.5] * 3), 0.0) is BatchDecision.STAY


def test_majority_compares_medians() -> None:
    policy = MajorityExits(SegmentCosts(2, 8))
    assert policy.judge(group([0.9, 0.6, 0.1], [0.5, 0.5, 0.99]), 0.0) is BatchDecision.LEAVE
    assert policy.judge(group([0.9, 0.6, 0.1], [0.7, 0.7, 0.0]), 0.0) is BatchDecision.STAY
    assert policy.judge(group([0.5, 0.4], [0.5, 0.4]), 0.0) is BatchDecision.LEAVE


@pytest.mark.parametrize("kind", [EagerExits, LazyExits, MajorityExits])
def test_a_group_under_way_comes_before_the_front(kind: type[GroupedExits]) -> None:
    policy = kind(SegmentCosts(3, 8))
    assert policy.choose(SOME, [NOBODY, NOBODY], 0.0) == Range(0, 1)
    assert policy.choose(SOME, [SOME, NOBODY], 0.0) == Range(1, 2)
    assert policy.choose(SOME, [NOBODY, SOME], 0.0) == Range(2, 3, tests=False)


def test_a_model_without_exits_is_run_whole() -> None:
    assert EagerExits(SegmentCosts(1, 8)).choose(SOME, [], 0.0) == Range(0, 1, tests=False)
    assert NoExits(SegmentCosts(1, 8)).choose(SOME, [], 0.0) == Range(0, 1, tests=False)


def test_no_exits_runs_everything_and_whoever_was_held_up() -> None:
    """Another row's depth limit can end a pass at an exit; who wanted to go deeper goes on."""
    policy = NoExits(SegmentCosts(3, 8))
    assert policy.choose(SOME, [NOBODY, NOBODY], 0.0) == Range(0, 3, tests=False)
    assert policy.choose(SOME, [SOME, NOBODY], 0.0) == Range(1, 3, tests=False)
    assert policy.choose(NOBODY, [NOBODY, SOME], 0.0) == Range(2, 3, tests=False)


def test_they_learn_what_passes_take() -> None:
    policy = LazyExits(SegmentCosts(2, 8))
    before = policy.target_gap_s(4)
    assert before == pytest.approx(1.5 * 2e-3)
    for _ in range(100):
        policy.observe(Range(0, 1), 4, 40, 9e-3, 2)
        policy.observe(Range(1, 2, tests=False), 4, 40, 5e-3, None)
    assert policy.target_gap_s(4) > 2 * before
