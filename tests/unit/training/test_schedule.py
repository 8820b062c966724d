"""The learning rate lands in time, whatever the pace."""

from __future__ import annotations

import pytest

from quadriga.training.recipe.schedule import Budget, length_scale, ramp


def test_steps_budget_warms_up_holds_and_decays() -> None:
    budget = Budget(first_step=0, steps=100, started_s=0.0, deadline_s=None, decay_share=0.4)
    rates = [budget.multiplier(step, 0.0, warmup_steps=10) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:60] == [1.0] * 50
    assert rates[80] == pytest.approx(0.51)
    assert rates[100] == pytest.approx(0.02)
    assert not budget.decaying(59, 0.0)
    assert budget.decaying(61, 0.0)


def test_a_deadline_is_kept_when_steps_are_slow() -> None:
    budget = Budget(first_step=0, steps=1000, started_s=50.0, deadline_s=150.0, decay_share=0.5)
    assert budget.multiplier(100, 100.0, warmup_steps=1) == 1.0
    assert budget.multiplier(101, 125.0, warmup_steps=1) == pytest.approx(0.51)
    assert budget.progress(102, 151.0) == 1.0


def test_a_later_budget_starts_where_the_model_is() -> None:
    budget = Budget(first_step=500, steps=600, started_s=0.0, deadline_s=None, decay_share=0.5)
    assert budget.progress(500, 0.0) == 0.0
    assert budget.multiplier(500, 0.0, warmup_steps=40) == 1.0


def test_curriculum_and_ramp() -> None:
    curriculum = ((0, 0.2), (100, 0.5), (300, 1.0))
    assert [length_scale(curriculum, seen) for seen in (0, 99, 100, 300)] == [0.2, 0.2, 0.5, 1.0]
    assert [ramp((0.1, 0.3), 100, seen) for seen in (0, 50, 900)] == pytest.approx([0.1, 0.2, 0.3])
