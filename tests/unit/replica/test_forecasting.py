"""A decode replica's forecast: free while nobody wants it, fresh when somebody does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loadgen.model_costs.engine import engine_spec
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import ManualClock
from quadriga.config.loader import load_config
from quadriga.core.kv import TransferOffer
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.observability.metrics import MetricsHub, parse_exposition
from quadriga.replica.forecasting import Forecasting, load_lengths
from quadriga.replica.replica_metrics import ReplicaMetrics
from quadriga.scheduling.forecasts import StepTimes
from tests.sequences import make_decode_loop, make_sequence, make_slots

ROWS = 4


class Stand:
    """A decode loop over a bundled model, and its forecasting."""

    def __init__(self, **ares: Any) -> None:
        checkpoint = read_checkpoint("quadriga-s")
        spec = engine_spec(checkpoint, threads=1, num_rows=ROWS, row_capacity_tokens=256)
        self.clock = ManualClock()
        runner = NativeRunner.load(spec)
        self.offers: list[TransferOffer] = []
        self.leaving: set[str] = set()
        self.loop = make_decode_loop(
            runner, make_slots(ROWS, 256, spec.kv_capacity_tokens), self.clock
        )
        self.forecasting = Forecasting(
            runner,
            load_lengths(runner, spec),
            spec,
            load_config({"scheduler": {"ares": ares}}),
            self.clock,
            coming=lambda: self.offers,
            leaving=lambda: self.leaving,
        )

    def join(self, name: str) -> SequenceState:
        state = make_sequence(
            name, [5, 6, 7], SamplingParams(max_tokens=200, temperature=0.0), output_ids=[9]
        )
        self.loop.reserve(name, state.max_total_tokens, state.num_tokens)
        self.loop.join(state)
        return state

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.advance(0.02)
            emissions = self.loop.step()
            self.forecasting.stepped(self.loop, emissions)
            self.forecasting.look(self.loop)


def test_without_demand_no_forecast_is_made() -> None:
    stand = Stand()
    state = stand.join("a")
    stand.step(30)
    assert stand.forecasting.forecast() is None
    assert state.prediction is None
    assert stand.forecasting.seconds == 0.0


def test_on_demand_the_held_sequences_are_predicted_and_forecast() -> None:
    stand = Stand(predict_every_tokens=10)
    stand.forecasting.is_wanted = True
    states = [stand.join("a"), stand.join("b")]
    stand.leaving = {"b"}
    stand.step(15)
    assert {s.predicted_at for s in states} == {11}
    assert all(
        s.prediction is not None and s.prediction.lower <= s.prediction.upper for s in states
    )
    stand.step(15)
    forecast = stand.forecasting.forecast()
    assert forecast is not None
    assert forecast.sequence_ids == ("a", "b")
    assert forecast.has_predictions
    assert forecast is stand.forecasting.forecast(), "packed once for each look"
    metrics = ReplicaMetrics("d", "m")
    metrics.forecast(forecast, 1000, stand.forecasting)
    hub = MetricsHub()
    hub.push("d", metrics.registry.snapshot(), now_s=0.0)
    page = parse_exposition(hub.exposition(now_s=0.0).decode())
    assert page['quadriga_length_predictions_total{replica="d"}'] == 4
    assert page['quadriga_seconds_to_out_of_memory{replica="d"}'] > 0
    assert page['quadriga_forecast_kv_tokens{ahead_seconds="0",replica="d"}'] > 8
    stand.forecasting.is_wanted = False
    metrics.forecast(stand.forecasting.forecast(), 1000, stand.forecasting)
    hub.push("d", metrics.registry.snapshot(), now_s=0.0)
    page = parse_exposition(hub.exposition(now_s=0.0).decode())
    assert page['quadriga_length_predictions_total{replica="d"}'] == 4
    assert page['quadriga_seconds_to_out_of_memory{replica="d"}'] == math.inf
    assert 'quadriga_forecast_kv_tokens{ahead_seconds="0",replica="d"}' not in page


def test_steps_cost_what_their_passes_take_and_not_what_lies_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(StepTimes, "observe", lambda _, seconds, *__: seen.append(seconds))
    stand = Stand()
    stand.forecasting.is_wanted = True
    stand.join("a")
    stand.step(30)  # on a clock that stands still within a pass
    assert stand.loop.step_time_s > 0.0
    assert set(seen) == {0.0}


def test_a_replica_that_becomes_idle_forecasts_nothing_at_once() -> None:
    """With the sequences it had a moment ago it would look full, and get none of the next ones."""
    stand = Stand()
    stand.forecasting.is_wanted = True
    stand.join("a")
    stand.step(4)
    seen = stand.forecasting.forecast()
    assert seen is not None and seen.sequence_ids == ("a",)
    stand.loop.leave("a")
    stand.forecasting.look(stand.loop)
    seen = stand.forecasting.forecast()
    assert seen is not None and seen.sequence_ids == ()
    stand.step(100)
    assert stand.forecasting.forecast() is seen, "made once for all the time in which it is idle"
    stand.join("b")
    stand.step(4)
    seen = stand.forecasting.forecast()
    assert seen is not None and seen.sequence_ids == ("b",)


def test_a_new_sequence_is_in_the_forecast_soon() -> None:
    stand = Stand(predict_every_tokens=0)
    stand.forecasting.is_wanted = True
    stand.join("a")
    stand.step(4)
    stand.join("b")
    stand.step(3)
    forecast = stand.forecasting.forecast()
    assert forecast is not None
    assert forecast.sequence_ids == ("a", "b")
    assert not forecast.has_predictions, "asked never"
