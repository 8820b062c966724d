"""The simulator under overload, and with vLLM's behaviour where memory is full."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loadgen.load.lengths import WORKLOADS
from loadgen.paper.ares.points import fitting_rate
from loadgen.simulation.loads import (
    SimLoad,
    make_simulation,
    standard_slo,
    summary_of,
    synthetic_load,
)
from quadriga.config.engine import PrefillConfig
from quadriga.core.forecast import LengthPrediction
from quadriga.policies.ares.overload import MAX_HOLD_SHARE
from quadriga.policies.ares.settings import AresSettings
from quadriga.policies.slot_reservation import promised_tokens
from quadriga.sim.config import SimConfig
from quadriga.sim.decode.vllm import VllmDecodeReplica
from quadriga.sim.placing import Placing
from quadriga.sim.prediction import NoisyPredictor
from quadriga.sim.profiles import RTX_4090D
from quadriga.sim.records import PAUSE, RECOMPUTE, VLLM, VLLM_CACHED, Happened, MemoryRules
from quadriga.sim.results import SimulatedRun
from tests.unit.sim.test_simulator import load, simulate


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


class OneByOne(Placing):
    """Each replica is asked by itself, and every sequence that waits."""

    def most_room(self, now_s: float) -> float:
        return np.inf

    def _room(self, reserved: NDArray[np.float64]) -> NDArray[np.float64]:
        board, found = self._board, []
        for i, tokens in enumerate(reserved.tolist()):
            takes = board.is_alive[i] and not board.is_draining[i]
            takes = takes and board.num_held[i] < self._config.profile.num_slots
            room = self._config.admitted_tokens - tokens
            if self._config.memory.reservation == "used":
                takes = takes and not board.num_paused[i]
                room = room if board.num_held[i] else np.inf
            found.append(room if takes else -np.inf)
        return np.array(found)

    def _wanted(
        self, tokens: int, longest: int, known: LengthPrediction | None, *, by_forecast: bool
    ) -> NDArray[np.float64]:
        board = self._board
        return np.array(
            [
                promised_tokens(
                    tokens,
                    longest,
                    upper_tokens=int(upper),
                    num_held=int(held),
                    prediction=known,
                    by_forecast=by_forecast,
                )
                for upper, held in zip(board.upper_tokens, board.num_held, strict=True)
            ],
            dtype=np.float64,
        )


@pytest.mark.parametrize("rules", [PAUSE, RECOMPUTE])
@pytest.mark.parametrize("policy", ["least_work", "shedding", "ares", "oracle"])
def test_looking_at_all_replicas_at_once_equals_asking_each(
    policy: str, rules: MemoryRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_waited = 0
    for seed in range(3):
        options: dict[str, Any] = {
            "memory": rules,
            "seed": seed,
            "report_every_s": 0.5 * (seed == 2),
            "prefill": PrefillConfig(max_rows=2),
        }
        requests = load(seed, 150, 20.0)
        fast = simulate(policy, requests, **options)
        with monkeypatch.context() as patch:
            patch.setattr("quadriga.sim.cluster.Placing", OneByOne)
            plain = simulate(policy, requests, **options)
        for name in ("first_token_s", "finished_s", "room_wait_s"):
            np.testing.assert_array_equal(getattr(fast, name), getattr(plain, name))
        assert fast.failures == plain.failures
        assert fast.migrations == plain.migrations
        num_waited += int((fast.room_wait_s > 0.0).sum())
    assert num_waited > 10


SMALL_DEVICE = replace(RTX_4090D, kv_capacity_tokens=60_000)
SMALL_CLUSTER = SimConfig(SMALL_DEVICE, num_decode=3, num_prefill=1, memory=PAUSE)
DURATION_S = 1500.0


def load_at(rate: float) -> SimLoad:
    return synthetic_load("sharegpt", rate=rate, duration_s=DURATION_S, seed=1)


@cache
def run_at(rate: float, policy: str, *, overload: bool = True) -> tuple[SimulatedRun, float]:
    """A run of ShareGPT-like lengths on 3 decode replicas that pause, and its share of good."""
    requests, settings = load_at(rate), AresSettings(overload=overload)
    run = make_simulation(policy, requests, SMALL_CLUSTER, settings=settings).run()
    slo = standard_slo(SMALL_CLUSTER)
    return run, summary_of(run, requests, slo, from_s=200.0, to_s=DURATION_S).good_share


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


@pytest.mark.parametrize(
    ("lengths", "to_s"),
    [("translation", 1200.0), pytest.param("reasoning", 2000.0, marks=pytest.mark.slow)],
)
def test_near_saturation_the_objective_keeps_what_a_static_placement_has(
    lengths: str, to_s: float
) -> None:
    """At .95 times the rate that fills the memory it sets in now and then; of three loads."""
    config = SimConfig(RTX_4090D, num_decode=3, num_prefill=1, memory=PAUSE)
    rate = 0.95 * fitting_rate(config, *WORKLOADS[lengths].draw(20_000, seed=0), share=1.0)
    good: dict[str, list[float]] = {"ares": [], "least_requests": []}
    for seed in (1, 2, 3):
        requests = synthetic_load(lengths, rate=rate, duration_s=to_s, seed=seed)
        for policy, found in good.items():
            run = make_simulation(policy, requests, replace(config, seed=seed)).run()
            window = {"from_s": 600.0, "to_s": to_s}
            found.append(summary_of(run, requests, standard_slo(config), **window).good_share)
    static = np.mean(good["least_requests"])
    assert static < 0.95, "not all are good whatever is done"
    assert np.mean(good["ares"]) >= 0.98 * static


@pytest.mark.parametrize("rate", [0.18, 0.3])
def test_no_request_waits_longer_than_a_bound_and_none_is_refused_once_it_has_begun(
    rate: float,
) -> None:
    """A wait ends after four times the predicted run and little more than the longest answer takes
    alone: paused ones come back before it. Other loads are up to six minutes beyond."""
    requests, (run, _) = load_at(rate), run_at(rate, "ares")
    predictor = NoisyPredictor(requests.output_tokens, seed=SMALL_CLUSTER.seed)
    one = np.ones(len(requests))
    said = predictor.predict(np.arange(len(requests)), one, requests.output_tokens - 1.0).mean
    step_s = SMALL_DEVICE.step.step_s(1, SMALL_DEVICE.kv_capacity_tokens)
    most_s = MAX_HOLD_SHARE * said * step_s + 1.1 * SMALL_DEVICE.max_tokens * step_s
    assert (run.room_wait_s <= most_s).all()
    assert run.room_wait_s.max() > 600.0, "long ones do wait"
    begun = ~np.isnan(run.first_token_s)
    assert (~np.isnan(run.finished_s) == begun).all(), "who has a first token has all of them"
    refused = np.array(sorted(run.failures), dtype=np.int64)
    assert set(run.failures.values()) <= {"overloaded"} and not begun[refused].any()
    assert bool(len(refused)) is (rate == 0.3)
