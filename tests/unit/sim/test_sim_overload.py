"""The simulator under overload, and with vLLM's behaviour where memory is full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadgen.simulation.loads import make_simulation, standard_slo, summary_of, synthetic_load
from quadriga.policies.ares.settings import AresSettings
from quadriga.sim.config import SimConfig
from quadriga.sim.decode.vllm import VllmDecodeReplica
from quadriga.sim.profiles import RTX_4090D
from quadriga.sim.records import PAUSE, RECOMPUTE, VLLM, VLLM_CACHED, Happened, MemoryRules
from quadriga.sim.results import SimulatedRun
from tests.unit.sim.test_simulator import check_conserved, load, simulate


class OneStepAtATime(VllmDecodeReplica):
    """Each step is an event of its own: nothing is summed, and everything is looked at again."""

    def _event_steps(self) -> int:
        return min(1, super()._event_steps())


@pytest.mark.parametrize("rules", [VLLM, VLLM_CACHED])
@pytest.mark.parametrize("policy", ["current_load", "reschedule", "ares"])
def test_stretches_of_steps_equal_the_steps_one_by_one(policy: str, rules: MemoryRules) -> None:
    num_full = 0
    for seed in range(3):
        requests = load(seed, 100, 30.0)
        stretched = simulate(policy, requests, memory=rules, seed=seed)
        single = simulate(policy, requests, memory=rules, seed=seed, make_replica=OneStepAtATime)
        check_conserved(stretched, requests)
        np.testing.assert_allclose(stretched.finished_s, single.finished_s, rtol=1e-9)
        assert stretched.num_full == single.num_full
        num_full += stretched.num_full
    assert num_full > 20


@pytest.mark.parametrize("rules", [VLLM, VLLM_CACHED])
def test_vllm_preempts_the_newest_and_lets_nobody_in_at_that_step(rules: MemoryRules) -> None:
    num_preempted = 0

    class Watched(VllmDecodeReplica):
        def _schedule(self, happened: Happened) -> None:
            nonlocal num_preempted
            before, joined = list(self.running), len(happened.joined)
            super()._schedule(happened)
            out = [s.index for s in happened.preempted]
            assert out == before[len(before) - len(out) :][::-1], "the newest first"
            assert not out or len(happened.joined) == joined
            assert self.tokens + self._filled + len(self.running) <= self._capacity
            num_preempted += len(out)

    simulate("current_load", load(3, 100, 30.0), memory=rules, make_replica=Watched)
    assert num_preempted > 20


@pytest.mark.filterwarnings("error")
def test_nobody_is_thought_to_be_longer_than_it_becomes() -> None:
    """Also while a chunk is computed: a step takes longer then than the profile says."""
    for rules in (VLLM, VLLM_CACHED):
        run = simulate("ares", load(3, 100, 30.0), memory=rules, tick_s=0.01)
        assert run.num_full > 10


def test_cached_prefixes_save_some_of_what_vllm_computes_again() -> None:
    computed = {}
    for rules in (VLLM, VLLM_CACHED):
        made: list[VllmDecodeReplica] = []

        def make(*args: Any) -> VllmDecodeReplica:
            made.append(VllmDecodeReplica(*args))  # noqa: B023
            return made[-1]  # noqa: B023

        run = simulate("current_load", load(3, 100, 30.0), memory=rules, make_replica=make)
        computed[rules] = sum(r.num_recomputed for r in made) / run.num_full
    assert 0.0 < computed[VLLM_CACHED] < 0.95 * computed[VLLM]


def test_without_hysteresis_a_full_memory_preempts_more_often() -> None:
    counts = {
        rules: sum(
            simulate("current_load", load(s, 100, 30.0), memory=rules).num_full for s in range(3)
        )
        for rules in (RECOMPUTE, VLLM)
    }
    assert counts[VLLM] > 1.2 * counts[RECOMPUTE]


SMALL_DEVICE = replace(RTX_4090D, kv_capacity_tokens=60_000)


def run_at(
    rate: float, policy: str, *, overload: bool = True, duration_s: float = 1500.0
) -> tuple[SimulatedRun, float]:
    """A run of ShareGPT-like lengths on 3 decode replicas that pause, and its share of good."""
    config = SimConfig(SMALL_DEVICE, num_decode=3, num_prefill=1, memory=PAUSE)
    requests = synthetic_load("sharegpt", rate=rate, duration_s=duration_s, seed=1)
    settings = AresSettings(overload=overload)
    run = make_simulation(policy, requests, config, settings=settings).run()
    summary = summary_of(run, requests, standard_slo(config), from_s=200.0, to_s=duration_s)
    return run, summary.good_share


def test_under_overload_most_requests_are_good_that_were_not_and_nobody_is_forgotten() -> None:
    run, with_objective = run_at(0.18, "ares")
    assert set(run.failures.values()) <= {"overloaded"}, "at most refused at once"
    _, without = run_at(0.18, "ares", overload=False)
    _, static = run_at(0.18, "least_work")
    assert with_objective > 2.0 * static
    assert with_objective > 1.2 * without
    ended = ~np.isnan(run.finished_s)
    assert ended.sum() + len(run.failures) == len(ended), "long ones are late, and end"
    assert len(run.failures) < 0.2 * len(ended)


def test_shedding_refuses_instead_of_letting_everybody_wait() -> None:
    run, shedding = run_at(0.18, "shedding")
    _, static = run_at(0.18, "least_work")
    assert run.failures
    assert shedding > static


def test_below_saturation_the_objective_changes_next_to_nothing() -> None:
    _, with_objective = run_at(0.02, "ares")
    _, static = run_at(0.02, "least_work")
    assert with_objective >= 0.98 * static
