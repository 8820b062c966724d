"""What a replica holds, as a forecast; and what a step costs, measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quadriga.checkpoint.exits import ExitParams
from quadriga.clock import ManualClock
from quadriga.core.forecast import LengthPrediction, LoadForecast
from quadriga.core.kv import TransferOffer
from quadriga.core.replica import DepthClass
from quadriga.core.request import SampledToken, SequenceState, layers_of
from quadriga.policies.ares.cluster import unpack
from quadriga.policies.ares.expected_depth import ExpectedDepth
from quadriga.policies.ares.forecast import (
    FIXED,
    MOST_TOKENS,
    MOVABLE,
    MOVES,
    NUM_COLUMNS,
    PAUSED,
    REMAINING,
    REMAINING_LOWER,
    REMAINING_UPPER,
    RUNS,
    SINCE_MOVE_S,
    TOKENS,
    check_forecast,
)
from quadriga.policies.ares.settings import horizon_s
from quadriga.scheduling.calibration import assumed_shape, measure_shape
from quadriga.scheduling.forecasts import StepShape, StepTimes, forecast, hold
from tests.fake_runner import FakeRunner
from tests.unit.scheduling.test_lengths import state

GRID = horizon_s(0.02)
SHAPE = StepShape(10e-3, 1e-3, 1e-5)
CLASS = DepthClass("m", 8)


def offer(name: str, num_tokens: int, prediction: LengthPrediction | None = None) -> TransferOffer:
    return TransferOffer(
        transfer_id=name,
        sequence_id=name,
        depth_class=CLASS,
        source="p",
        epoch=1,
        num_tokens=num_tokens,
        max_total_tokens=200,
        lease_s=5.0,
        prediction=prediction,
    )


def rows_of(made: LoadForecast) -> dict[str, np.ndarray]:
    rows = np.frombuffer(made.rows, dtype="<f4").reshape(-1, NUM_COLUMNS)
    return dict(zip(made.sequence_ids, rows, strict=True))


def known(name: str, mean: float, *, moves: int = 0, moved_unix_s: float = 0.0) -> SequenceState:
    made = state(name)
    made.prediction, made.predicted_at = LengthPrediction(mean, mean / 2, mean * 2), 5
    made.num_moves, made.moved_unix_s = moves, moved_unix_s
    return made


def made_of(**held: object) -> LoadForecast:
    return forecast(
        hold(**held),  # type: ignore[arg-type]
        SHAPE,
        grid_s=GRID,
        step_s=0.02,
        bytes_per_token=64.0,
        now_unix_s=1000.0,
    )


def test_a_sequence_without_a_prediction_is_taken_to_become_as_long_as_the_others() -> None:
    """One such sequence must not make the forecasts of its whole class worthless."""
    made = made_of(
        states=[known("a", 40), known("b", 60), state("unforeseen")], coming=(), num_running=3
    )
    assert made.has_predictions
    produced = len(state("unforeseen").output_ids)
    others = 50 + len(known("a", 40).output_ids)
    row = rows_of(made)["unforeseen"]
    assert row[REMAINING] == others - produced
    assert row[REMAINING_LOWER] == 0.0, "nothing is moved because of a guess"
    assert not made_of(states=[state("unforeseen")], coming=(), num_running=1).has_predictions
    assert made_of(states=[], coming=()).has_predictions


def test_only_what_is_here_and_stays_may_be_moved() -> None:
    names = ("runs", "leaves", "paused", "paused, leaves", "rests")
    states = [known(name, 20) for name in names]
    made = made_of(
        states=states,
        coming=[offer("comes", 30, LengthPrediction(40, 20, 60)), offer("runs", 7)],
        num_running=2,
        num_paused=2,
        leaving={"leaves", "paused, leaves"},
    )
    check_forecast(made)
    rows = rows_of(made)
    assert list(rows) == [*names, "comes"], "who has joined is there once"
    assert rows["runs"][MOST_TOKENS] == states[0].max_total_tokens
    movable = [RUNS, FIXED, PAUSED, FIXED, FIXED, FIXED]
    assert [row[MOVABLE] for row in rows.values()] == movable
    assert [row[TOKENS] for row in rows.values()] == [7, 7, 7, 7, 7, 30]
    assert rows["comes"][REMAINING] == 40
    assert made.has_predictions
    assert (made.per_sequence_s, made.per_token_s, made.bytes_per_token) == (1e-3, 1e-5, 64.0)


def test_moves_of_a_sequence_travel_into_its_row() -> None:
    rows = rows_of(
        made_of(
            states=[known("moved", 20, moves=2, moved_unix_s=990.0), known("never", 20)],
            coming=[],
            num_running=2,
        )
    )
    assert rows["moved"][MOVES] == 2
    assert rows["moved"][SINCE_MOVE_S] == pytest.approx(10.0)
    assert rows["never"][SINCE_MOVE_S] == np.inf


def test_who_is_on_the_way_unpredicted_will_be_as_long_as_the_others() -> None:
    """Not as long as it may become: a replica with newcomers would look like a full one."""
    made = made_of(
        states=[known("a", 20), known("b", 40)], coming=[offer("comes", 30)], num_running=2
    )
    assert rows_of(made)["comes"][REMAINING] == 35, "5 generated, 20 and 40 to come"
    assert rows_of(made)["comes"][REMAINING_UPPER] == 170
    alone = made_of(states=[], coming=[offer("comes", 30)], num_running=0)
    assert rows_of(alone)["comes"][REMAINING] == 170


def test_prompts_that_are_still_to_be_computed_are_held_too() -> None:
    made = made_of(states=[known("a", 20)], coming=[state("queued")], num_running=1)
    row = rows_of(made)["queued"]
    assert (row[TOKENS], row[REMAINING], row[MOVABLE]) == (7, 25, FIXED)
    alone = made_of(states=[], coming=[state("queued")])
    assert not alone.has_predictions, "others say how long it lasts"


def test_unpredicted_sequences_run_to_their_limit_and_the_forecast_says_so() -> None:
    made = made_of(states=[state("a")], coming=[], num_running=1)
    row = rows_of(made)["a"]
    assert not made.has_predictions
    assert row[REMAINING] == row[REMAINING_UPPER] == 95
    empty = made_of(states=[], coming=[], num_running=0)
    check_forecast(empty)
    assert empty.has_predictions, "an empty replica hides nobody's length"


def test_load_and_memory_fall_when_sequences_end() -> None:
    made = made_of(states=[known("a", 20), known("b", 90)], coming=[], num_running=2)
    load = np.frombuffer(made.load_s, dtype="<f4")
    assert load[0] == pytest.approx(2 * 1e-3 + 14 * 1e-5)
    assert load[1] == pytest.approx(2 * 1e-3 + (14 + 40) * 1e-5), "20 tokens ahead, both run"
    assert load[2] == pytest.approx(1e-3 + (7 + 32.8) * 1e-5), "33 tokens ahead, one does"
    assert load[-1] == 0.0


def test_the_measured_step_scales_the_shape() -> None:
    times = StepTimes(SHAPE)
    for _ in range(60):
        times.observe(2 * SHAPE.seconds(4, 100), 4, 100)
        times.observe(0.0, 4, 100)  # before the first step
        times.observe(1.0, 0, 0)  # nobody runs
    assert times.shape.base_s == pytest.approx(2 * SHAPE.base_s, rel=1e-3)
    assert times.shape.per_token_s == pytest.approx(2 * SHAPE.per_token_s, rel=1e-3)


class TimedRunner(FakeRunner):
    """Takes what a shape says, and looks at no token."""

    def __init__(self, clock: ManualClock, shape: StepShape) -> None:
        super().__init__(8, row_capacity_tokens=600)
        self._clock, self._shape = clock, shape

    def decode(self, rows: object) -> list[SampledToken]:
        states = [self.attached[row] for row in rows]  # type: ignore[attr-defined]
        self._clock.advance(self._shape.seconds(len(states), sum(s.num_tokens for s in states)))
        return [SampledToken(1, 8) for _ in states]


def test_the_shape_is_found_by_timing_and_rows_stay_free() -> None:
    clock = ManualClock()
    runner = TimedRunner(clock, SHAPE)
    found = measure_shape(runner, clock, max_rows=8)
    assert found.base_s == pytest.approx(SHAPE.base_s, rel=0.01)
    assert found.per_sequence_s == pytest.approx(SHAPE.per_sequence_s, rel=0.01)
    assert found.per_token_s == pytest.approx(SHAPE.per_token_s, rel=0.01)
    assert not runner.attached


def test_a_flat_shape_still_tells_loads_apart() -> None:
    clock = ManualClock()
    found = measure_shape(TimedRunner(clock, StepShape(0.01, 0.0, 0.0)), clock, max_rows=8)
    assert found.per_token_s > 0.0
    assumed = assumed_shape(1000)
    assert assumed.seconds(4, 500) == pytest.approx(1.5 * assumed.seconds(0, 0))


def test_replicas_of_one_class_unpack_together() -> None:
    from tests.unit.policies.ares_twin import Held, snapshot

    mine = snapshot("a", [Held("x", 10, 5, 5, 5)])
    mine.forecast = made_of(states=[known("k", 20)], coming=[], num_running=1)
    cluster = unpack([mine, snapshot("b", [])])
    assert cluster is not None
    assert cluster.sequence_ids == ["k"]


def test_those_on_their_way_count_by_their_own_layers_where_they_are_known() -> None:
    early, full = state("early"), state("full")
    early.exits, early.expected_layers = ExitParams(0.9, "bounded"), 2.0
    limited = replace(full, exits=ExitParams(1.0, "off", max_depth=4))
    assert [layers_of(s) for s in (early, full, limited)] == [2.0, np.inf, 4.0]
    there = replace(early, sequence_id="there", exit_layers=[8, 4, 4], output_ids=[5, 6, 7])
    offers = [
        replace(offer(str(n), 10), expected_layers=layers) for n, layers in enumerate((0.0, np.inf))
    ]
    held = hold([there], [*offers, early, limited], num_running=1, depths=ExpectedDepth(8))
    assert held.share[0] < 1.0
    assert held.share[1:] == [held.share[0], 1.0, 0.25, 0.5]
