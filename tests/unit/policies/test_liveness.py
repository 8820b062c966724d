"""Telling a hung process from a stalled machine, and from an observer that is sick itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quadriga.policies.liveness import (
    STALL_PATIENCE,
    HeartbeatMonitor,
    Liveness,
    event_loop_stall_s,
    is_stalled,
    patience_s,
    silence_limit_s,
)

LIMIT_S = 8.0


@pytest.mark.parametrize(
    ("silences_s", "stalled"),
    [
        ([], False),
        ([100.0], False),  # the only one: nothing to compare with
        ([0.1, 100.0], False),
        ([0.1, 0.1, 100.0], False),
        ([5.0, 100.0], True),
        ([0.1, 5.0, 100.0], True),
        ([0.1, 0.2, 5.0, 100.0], True),  # exactly half
        ([0.1, 0.2, 0.3, 5.0, 100.0], False),
        ([4.0, 4.0, 4.0], False),  # half of the limit is not yet silence
        ([4.1, 4.1, 4.1], True),
    ],
)
def test_half_of_them_silent_is_a_stall(silences_s: Sequence[float], stalled: bool) -> None:
    assert is_stalled(silences_s, limit_s=LIMIT_S) is stalled
    assert patience_s(silences_s, limit_s=LIMIT_S) == LIMIT_S * (STALL_PATIENCE if stalled else 1)


def test_the_limit_follows_the_heartbeat() -> None:
    assert silence_limit_s(0.1) == 8.0
    assert silence_limit_s(2.0) == 20.0


@pytest.mark.parametrize(("now_s", "late_s"), [(12.0, 0.0), (13.0, 0.0), (13.5, 0.5), (99.0, 86.0)])
def test_what_takes_longer_than_allowed_is_a_standstill(now_s: float, late_s: float) -> None:
    assert event_loop_stall_s(10.0, now_s, 3.0) == late_s


def verdicts(*rounds: tuple[float, bool, bool], stood_still_s: float = 0.0) -> list[Liveness]:
    """Of rounds (when, the controller answered, anybody did) since second 0."""
    hearing = HeartbeatMonitor(0.0)
    return [
        hearing.judge(controller, anybody, now_s=now_s, stood_still_s=stood_still_s)
        for now_s, controller, anybody in rounds
    ]


NONE, RESTART, END = Liveness.NONE, Liveness.RESTART_CONTROLLER, Liveness.END_ITSELF


def test_the_controller_is_restarted_once_in_a_silence() -> None:
    silent = [(now_s, False, True) for now_s in (10.0, 20.0, 20.1, 30.0, 40.1, 40.2)]
    assert verdicts(*silent) == [NONE, NONE, RESTART, NONE, NONE, RESTART]
    assert verdicts((19.0, True, True), (39.0, False, True), (39.1, False, True)) == [
        NONE,
        NONE,
        RESTART,
    ]


def test_who_hears_nobody_ends_and_blames_no_one() -> None:
    assert verdicts((15.0, False, False), (15.1, False, False)) == [NONE, END]
    assert verdicts((10.0, False, True), (25.0, False, False), (25.1, False, False)) == [
        NONE,
        NONE,
        END,
    ]


def test_a_standstill_is_nobodys_silence() -> None:
    late = [(500.0, False, True), (1000.0, False, False)]
    assert verdicts(*late, stood_still_s=480.0) == [NONE, END]
    assert verdicts(*late, stood_still_s=490.0) == [NONE, NONE]
