"""Forecasts of a segment's time: exact where calibrated, straight between, and never stuck."""

from __future__ import annotations

import pytest

from quadriga.policies.drex import SegmentCosts


def calibrated(max_rows: int = 16) -> SegmentCosts:
    """Two segments: t_0(b) = 1 + b ms, t_1(b) = 3 + b² / 8 ms; heads 0.5 and 0; slopes 1, 2 us."""
    costs = SegmentCosts(2, max_rows)
    for b in costs.knots:
        costs.set(0, b, (1 + b) * 1e-3)
        costs.set(1, b, (3 + b * b / 8) * 1e-3)
        costs.set(0, b, 0.5e-3, head=True)
        costs.set(1, b, 0.0, head=True)
    costs.set_slope(0, 1e-6)
    costs.set_slope(1, 2e-6)
    return costs


def test_knots_double_up_to_the_largest_batch() -> None:
    assert SegmentCosts(1, 1).knots == (1,)
    assert SegmentCosts(1, 16).knots == (1, 2, 4, 8, 16)
    assert SegmentCosts(1, 21).knots == (1, 2, 4, 8, 16, 21)


@pytest.mark.parametrize("b", [1, 2, 4, 8, 16])
def test_calibrated_values_are_exact_at_knots(b: int) -> None:
    costs = calibrated()
    assert costs.forecast_s(0, 1, b, 0, tests=False) == pytest.approx((1 + b) * 1e-3)
    assert costs.forecast_s(0, 1, b, 0, tests=True) == pytest.approx((1.5 + b) * 1e-3)
    assert costs.forecast_s(1, 2, b, 0, tests=False) == pytest.approx((3 + b * b / 8) * 1e-3)


def test_between_knots_it_is_straight_and_beyond_it_goes_on() -> None:
    costs = calibrated()
    assert costs.forecast_s(0, 1, 11, 0, tests=False) == pytest.approx(12e-3)
    # Between 8 (11 ms) and 16 (35 ms), a quarter of the way.
    assert costs.forecast_s(1, 2, 10, 0, tests=False) == pytest.approx(17e-3)
    assert costs.forecast_s(1, 2, 2.5, 0, tests=False) == pytest.approx(3.875e-3)
    assert costs.forecast_s(0, 1, 20, 0, tests=False) == pytest.approx(21e-3)
    assert costs.forecast_s(0, 1, 0.3, 0, tests=False) == pytest.approx(2e-3)  # no less than one


def test_a_range_is_the_sum_of_its_segments_context_and_one_head() -> None:
    costs = calibrated()
    whole = costs.forecast_s(0, 2, 4, 1000, tests=False)
    assert whole == pytest.approx(5e-3 + 5e-3 + 1000 * 3e-6)
    assert costs.forecast_s(0, 1, 4, 1000, tests=True) == pytest.approx(5.5e-3 + 1e-3)


def test_setting_off_a_knot_is_an_error_and_times_stay_positive() -> None:
    costs = SegmentCosts(2, 8)
    with pytest.raises(ValueError, match="3 is not in list"):
        costs.set(0, 3, 1.0)
    costs.set(0, 4, -1.0)
    costs.set_slope(0, -1.0)
    assert 0 < costs.forecast_s(0, 1, 4, 10**6, tests=False) < 1e-6


@pytest.mark.parametrize("factor", [0.3, 2.0, 7.0])
def test_observations_converge_to_a_changed_machine(factor: float) -> None:
    costs = calibrated()
    costs.set_slope(0, 0.0)
    costs.set_slope(1, 0.0)
    truth = calibrated()
    sizes = [1, 3, 16, 5, 9, 12, 2]
    for i in range(700):
        b = sizes[i % len(sizes)]
        for first, stop, tests in ((0, 1, True), (1, 2, False)):
            seconds = factor * truth.forecast_s(first, stop, b, 0, tests=tests)
            costs.observe(first, stop, b, 0, seconds, tests=tests)
    for b in sizes:
        for first, stop, tests in ((0, 1, True), (1, 2, False), (0, 2, False)):
            wanted = factor * truth.forecast_s(first, stop, b, 0, tests=tests)
            found = costs.forecast_s(first, stop, b, 0, tests=tests)
            assert found == pytest.approx(wanted, rel=0.05)


def test_a_true_forecast_is_left_alone_and_an_outlier_moves_it_little() -> None:
    costs = calibrated()
    before = costs.forecast_s(0, 1, 6, 100, tests=True)
    costs.observe(0, 1, 6, 100, before, tests=True)
    assert costs.forecast_s(0, 1, 6, 100, tests=True) == pytest.approx(before)
    costs.observe(0, 1, 6, 100, 1000 * before, tests=True)
    after = costs.forecast_s(0, 1, 6, 100, tests=True)
    assert before < after < 1.5 * before


def test_what_was_not_run_is_not_learned() -> None:
    costs = calibrated()
    untouched = costs.forecast_s(0, 1, 16, 0, tests=True), costs.forecast_s(1, 2, 2, 0, tests=False)
    for _ in range(50):
        costs.observe(0, 1, 2, 0, 1.0, tests=True)
    now = costs.forecast_s(0, 1, 16, 0, tests=True), costs.forecast_s(1, 2, 2, 0, tests=False)
    assert now == untouched


def test_filling_in_skipped_kv_is_learned_apart_from_the_pass() -> None:
    costs = SegmentCosts(2, 8)
    for count in costs.knots:
        costs.set(0, count, 1e-3)
        costs.set(1, count, 2e-3)
    costs.fill_s = 1e-4
    for i in range(400):
        filled = (0, 30, 5, 60)[i % 4]
        costs.observe(1, 2, 4, 0, 2e-3 + filled * 3e-4, tests=False, filled=filled)
    assert costs.fill_s == pytest.approx(3e-4, rel=0.15)
    assert costs.forecast_s(1, 2, 4, 0, tests=False) == pytest.approx(2e-3, rel=0.15)
