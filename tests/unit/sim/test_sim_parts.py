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
from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.policies import make_policy
from quadriga.sim.prediction import ErrorModel, NoisyPredictor, OraclePredictor
from quadriga.sim.profiles import PROFILES, find_profile
from quadriga.sim.recorder import Recorder
from quadriga.sim.records import RECOMPUTE, Sequence
from quadriga.sim.results import gap_spread
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
    errors = ErrorModel(start_weight=1.0, sigma=0.0)
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
        on_decision=lambda now, cluster, costs, busy, load_only, *_: seen.append(load_only),
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
        replica = SimulatedDecodeReplica("a", SMALL, RECOMPUTE, lambda gaps: None)
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
    gap = gap_spread(run.gaps)
    assert gap.count == sum(g.weight for g in run.gaps)
    assert SMALL.step.base_s <= gap.p50_s < gap.p99_s <= gap.max_s
    assert SMALL.step.base_s < gap.mean_s < gap.max_s
    assert np.isnan(gap_spread([]).p50_s)


@pytest.mark.parametrize(
    ("name", "int8_tera", "fp16_tera", "giga_bytes_per_s", "memory_gb"),
    [
        ("rtx4090d-7b", 588.3, 147.1, 1008, 24),
        ("h800-7b", 1978.9, 989.4, 3350, 80),
        ("a100-7b", 624, 312, 2039, 80),
    ],
)
def test_devices_have_their_vendors_dense_figures(
    name: str, int8_tera: float, fp16_tera: float, giga_bytes_per_s: float, memory_gb: float
) -> None:
    """Worked back from the profiles' times: W8A8 weights of 6.53 G, 28 layers of 3,584, and a
    head of 0.545 G in 16 bits; 35 % of the 8-bit rate, 40 % of the 16-bit one, 76.8 % of the
    bandwidth; 90 % of the memory, less weights, embedding and 1.5 GB."""
    profile = find_profile(name)
    assert 2 * 6.53e9 / 0.35 / profile.prefill_per_token_s == pytest.approx(
        1e12 * int8_tera, rel=0.002
    )
    pair_ops = 4 * 3584 * 28 / 2
    assert pair_ops / 0.4 / profile.prefill_per_pair_s == pytest.approx(1e12 * fp16_tera, rel=0.002)
    for per_s in (7.62e9 / profile.step.base_s, 57_344 / profile.step.per_token_s):
        assert per_s / 0.768 == pytest.approx(1e9 * giga_bytes_per_s, rel=0.002)
    held = (profile.kv_capacity_tokens * 57_344 + 10.21e9) / 0.9
    assert held / 2**30 == pytest.approx(memory_gb, rel=0.002)


def test_profiles_are_complete_and_found() -> None:
    for name, profile in PROFILES.items():
        assert find_profile(name) is profile
        assert profile.name == name
        assert profile.step.source
        assert profile.kv_capacity_tokens > profile.max_tokens
        assert profile.prefill_s([100, 100]) < 2 * profile.prefill_s([100])
    with pytest.raises(ConfigError, match="rtx4090d-7b"):
        find_profile("abacus")
