"""A moving sequence rests when the destination's next step can be caught."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.scheduling.transfer.sequence_export import (
    MARGIN_SHARE,
    MAX_HOLD_SHARE,
    MAX_HOLDS,
    MAX_WAIT_SHARE,
    StepPhase,
    cutover_delay_s,
)


def test_well_before_the_border_it_rests_at_once() -> None:
    assert cutover_delay_s(StepPhase(12.0, 15.0), age_s=1.0, lead_s=4.0) == 0.0


def test_just_before_the_border_the_source_lets_it_pass() -> None:
    """By the margin behind it, 1.5 here, but never by more at once than others may feel."""
    assert cutover_delay_s(StepPhase(2.0, 15.0), age_s=1.5, lead_s=4.0) == min(
        2.0, MAX_HOLD_SHARE * 15.0
    )
    assert cutover_delay_s(StepPhase(3.0, 15.0), age_s=1.0, lead_s=4.0) == MAX_HOLD_SHARE * 15.0


def test_long_before_the_border_the_source_comes_closer() -> None:
    """15 ms a step, 4 to get there, 1.5 to be sure, and 6 that it may wait: 11.5 is the most."""
    assert cutover_delay_s(StepPhase(11.5, 15.0), age_s=0.0, lead_s=4.0) == 0.0
    assert cutover_delay_s(StepPhase(12.5, 15.0), age_s=0.0, lead_s=4.0) == pytest.approx(1.0)
    assert cutover_delay_s(StepPhase(14.9, 15.0), age_s=0.0, lead_s=4.0) == MAX_HOLD_SHARE * 15.0


def test_nothing_is_held_back_for_an_idle_replica_or_short_steps() -> None:
    assert cutover_delay_s(StepPhase(0.0, 0.0), age_s=0.0, lead_s=4.0) == 0.0
    assert cutover_delay_s(StepPhase(0.0, 4.5), age_s=0.0, lead_s=4.0) == 0.0


@given(border_s=st.floats(0.0, 1.0), step_s=st.floats(0.015, 0.05), lead_s=st.floats(0.001, 0.006))
def test_a_few_holds_bring_two_clocks_of_equal_steps_apart(
    border_s: float, step_s: float, lead_s: float
) -> None:
    """The source's and the destination's steps take the same time: without holds, forever so."""
    now_s = 0.0
    for _ in range(MAX_HOLDS + 1):
        left_s = (border_s - now_s) % step_s
        held_s = cutover_delay_s(StepPhase(left_s, step_s), age_s=0.0, lead_s=lead_s)
        if held_s == 0.0:
            break
        now_s += step_s + held_s
    border = now_s + (border_s - now_s) % step_s
    assert border >= now_s + lead_s - 1e-9, "the commit is there in time"
    assert border + step_s - now_s <= 2 * step_s + 1e-9, "two steps at the most"
    wait_s = border - now_s - lead_s
    is_free = lead_s + 2 * MARGIN_SHARE * step_s >= step_s
    assert is_free or wait_s <= (MAX_WAIT_SHARE + MARGIN_SHARE + 0.1) * step_s + 1e-9
