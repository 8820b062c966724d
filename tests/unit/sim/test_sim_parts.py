"""Predictors, profiles, the board's closed forms, and recordings of simulated runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quadriga.errors import ConfigError
from quadriga.policies.ares.recording import read_ticks, replay
from quadriga.sim.board import Board
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import SimConfig
from quadriga.sim.decode import DecodeReplica
from quadriga.sim.policies import make_policy
from quadriga.sim.prediction import ErrorModel, NoisyPredictor, OraclePredictor
from quadriga.sim.profiles import PROFILES, find_profile
from quadriga.sim.recorder import Recorder
from quadriga.sim.records import RECOMPUTE, Sequence
from quadriga.sim.results import gap_percentile
from tests.unit.sim.test_simulator import SETTINGS, SMALL, load


def test_the_mistaken_predictor_learns_as_tokens_are_generated() -> None:
    outputs = np.full(4000, 31_000)
    outputs[::2] = np.random.default_rng(0).integers(20, 3000, 2000)
    predictor = NoisyPredictor(outputs, seed=0)
    long = np.flatnonzero(outputs == 31_000)
    errors = []
    for produced in (0.0, 2000.0, 8000.0, 20_000.0):
        remaining = np.full(len(long), 31_000.0 - produced)
        said = predictor.predict(long, np.full(len(long), produced), remaining)
        assert np.all(said.lower <= said.mean)
        assert np.all(said.mean <= said.upper)
        errors.append(np.abs(said.mean - remaining).mean())
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1.2 * errors[2]


def test_its_range_holds_eighty_percent() -> None:
    outputs = np.random.default_rng(1).lognormal(7.0, 1.2, 20_000).astype(np.int64) + 1
    predictor = NoisyPredictor(outputs, seed=0)
    requests = np.arange(len(outputs))
    said = predictor.predict(requests, np.zeros(len(outputs)), outputs.astype(float))
    inside = (said.lower <= outputs) & (outputs <= said.upper)
    assert 0.7 < inside.mean() < 0.9


def test_no_error_is_an_oracle() -> None:
    outputs = np.array([10, 200, 3000])
    remaining = outputs.astype(float)
    errors = ErrorModel().scaled(0.0)
    noisy = NoisyPredictor(outputs, seed=0, errors=errors)
    said = noisy.predict(np.arange(3), np.zeros(3), remaining)
    np.testing.assert_allclose(said.mean, remaining)
    truth = OraclePredictor().predict(np.arange(3), np.zeros(3), remaining)
    assert truth.upper.tolist() == remaining.tolist()


def test_predictions_that_stop_holding_are_not_followed() -> None:
    """A head that says a hundredth of the truth: after some endings the present decides."""
    requests = load(2, 200, 5.0)
    seen: list[bool] = []
    Simulation(
        SimConfig(SMALL, 3, 1),
        make_policy("ares", SETTINGS),
        *requests,
        predictor=NoisyPredictor(requests[2], seed=0, bias=0.01),
        on_decision=lambda now, cluster, costs, busy, load_only, orders: seen.append(load_only),
    ).run()
    assert not seen[0]
    assert seen[-1]


@pytest.mark.parametrize("policy", ["reschedule", "ares", "oracle"])
def test_a_recorded_run_is_decided_the_same_again(tmp_path: Path, policy: str) -> None:
    """Through packed snapshots, as the cluster's scheduler gets them."""
    config = SimConfig(SMALL, 4, 1)
    recorder = Recorder(tmp_path / "ticks.jsonl", config, policy, SETTINGS)
    run = Simulation(
        config, make_policy(policy, SETTINGS), *load(4, 80), on_decision=recorder.decided
    ).run()
    recorder.close()
    ticks = list(read_ticks(tmp_path / "ticks.jsonl"))
    assert len(ticks) == len(run.samples)
    assert sum(len(t.orders) for t in ticks) >= len(run.migrations) > 0
    assert not replay(ticks)


def test_the_board_knows_every_replica_at_any_moment() -> None:
    """Against the replicas themselves, made to stop at that moment."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        inputs, outputs = rng.integers(1, 200, 6), rng.integers(50, 900, 6)
        replica = DecodeReplica("a", SMALL, RECOMPUTE, lambda gaps: None)
        board = Board(["a"], SMALL, inputs, outputs)
        for i in range(6):
            tokens = int(inputs[i]) + 1
            sequence = Sequence(i, tokens, int(inputs[i] + outputs[i]), int(inputs[i]), 0.0)
            replica.join(sequence, ready_s=0.0)
        replica.run_to_event(0.0)
        board.note(0, replica)
        now_s = float(rng.uniform(0.0, replica.next_event_s()))
        steps = int(board.new_steps(now_s)[0])
        assert steps == replica._steps_until(now_s)
        lost = replica.kill(now_s)
        assert board.used_tokens(np.array([steps]))[0] == sum(s.tokens for s in lost)


def test_gaps_are_weighted_by_tokens() -> None:
    """One gap a token after the first, and one for the way from prefill to the batch."""
    requests = load(1)
    roomy = replace(SMALL, kv_capacity_tokens=10**6)
    run = Simulation(SimConfig(roomy, 2, 1), make_policy("current_load"), *requests).run()
    outputs = requests[2]
    assert sum(g.weight for g in run.gaps) == (outputs - 1).sum() + (outputs > 1).sum()
    assert gap_percentile(run.gaps, 1) >= SMALL.step.base_s
    assert gap_percentile(run.gaps, 50) < gap_percentile(run.gaps, 99)
    assert np.isnan(gap_percentile([], 50))


def test_profiles_are_complete_and_found() -> None:
    for name, profile in PROFILES.items():
        assert find_profile(name) is profile
        assert profile.name == name
        assert profile.step.source
        assert profile.kv_capacity_tokens > profile.max_tokens
        assert profile.prefill_s([100, 100]) < 2 * profile.prefill_s([100])
    with pytest.raises(ConfigError, match="rtx4090d-7b"):
        find_profile("abacus")
