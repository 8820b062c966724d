"""The simulator against one that makes every step, and against what must always hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quadriga.config import PrefillConfig
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.pacing import PaceProfile
from quadriga.policies.ares import AresSettings
from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.forecast import MOVABLE, PAUSED
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import Failure, SimConfig
from quadriga.sim.policies import POLICY_NAMES, make_policy
from quadriga.sim.profiles import RTX_4090D, CostProfile
from quadriga.sim.records import PAUSE, RECOMPUTE, MemoryRules
from quadriga.sim.results import Run, Slo, latencies, summarise
from quadriga.types import MigrationOrder
from tests.unit.sim.stepwise import StepwiseReplica

SMALL = CostProfile(
    step=PaceProfile("small", 10e-3, 0.1e-3, 2e-6, "made up"),
    prefill_base_s=5e-3,
    prefill_per_token_s=1e-4,
    prefill_per_pair_s=1e-8,
    prefill_budget_tokens=512,
    kv_bytes_per_token=1000,
    kv_capacity_tokens=2000,
    num_slots=16,
    max_tokens=1200,
    bandwidth_bytes_per_s=1e7,
    round_trip_s=2e-3,
    host_bandwidth_bytes_per_s=5e6,
)
SETTINGS = AresSettings(cooldown_s=1.0, max_moves=3)
Load = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]


def load(seed: int, num_requests: int = 60, rate: float = 5.0) -> Load:
    """Short prompts; outputs with a heavy tail, cut at the cap."""
    rng = np.random.default_rng(seed)
    outputs = np.clip(rng.pareto(0.9, num_requests) * 40 + 1, 1, 1000).astype(np.int64)
    inputs = rng.integers(1, 120, num_requests)
    return np.cumsum(rng.exponential(1 / rate, num_requests)), inputs, outputs


def simulate(policy: str, requests: Load, *, num_decode: int = 3, **options: Any) -> Run:
    make = options.pop("make_replica", None)
    extra = {} if make is None else {"make_replica": make}
    for name in ("on_decision", "on_tick", "predictor"):
        if name in options:
            extra[name] = options.pop(name)
    config = SimConfig(options.pop("profile", SMALL), num_decode, 1, **options)
    return Simulation(config, make_policy(policy, SETTINGS), *requests, **extra).run()


def check_conserved(run: Run, requests: Load) -> None:
    """Every request ends once, with all its tokens, in order of time; or fails with a reason."""
    arrivals, _, outputs = requests
    for index in range(len(arrivals)):
        if index in run.failures:
            assert run.failures[index]
            assert np.isnan(run.finished_s[index])
        else:
            assert run.produced[index] == outputs[index]
            assert arrivals[index] < run.first_token_s[index] <= run.finished_s[index]


@pytest.mark.parametrize("rules", [RECOMPUTE, PAUSE])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_it_equals_the_simulator_that_makes_every_step(policy: str, rules: MemoryRules) -> None:
    num_full = num_moved = 0
    for seed in range(3):
        requests = load(seed)
        options: dict[str, Any] = {"memory": rules, "seed": seed}
        if seed % 3 == 2:
            options["failures"] = (Failure(8.0, 1, 4.0),)
        if seed % 2:
            options["precopy"] = False
        fast = simulate(policy, requests, **options)
        plain = simulate(policy, requests, make_replica=StepwiseReplica, **options)
        check_conserved(fast, requests)
        np.testing.assert_allclose(fast.finished_s, plain.finished_s, rtol=0, atol=1e-6)
        np.testing.assert_allclose(fast.first_token_s, plain.first_token_s, rtol=0, atol=1e-6)
        assert fast.num_full == plain.num_full
        assert [replace(m, started_s=0, stall_s=0) for m in fast.migrations] == [
            replace(m, started_s=0, stall_s=0) for m in plain.migrations
        ]
        assert fast.failures == plain.failures
        assert fast.rebuilt.tolist() == plain.rebuilt.tolist()
        num_full, num_moved = num_full + fast.num_full, num_moved + len(fast.migrations)
    assert num_full > 0 or num_moved > 0
    assert (num_moved > 0) == (policy in ("reschedule", "ares", "oracle"))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(POLICY_NAMES),
    rate=st.sampled_from([0.5, 3.0, 20.0]),
    num_decode=st.integers(1, 5),
    rules=st.sampled_from([RECOMPUTE, PAUSE]),
    failures=st.lists(
        st.builds(Failure, st.floats(0.0, 30.0), st.just(0), st.floats(0.1, 20.0)), max_size=2
    ),
    bandwidth=st.sampled_from([1e5, 1e7, 1e10]),
    precopy=st.booleans(),
)
# A paused one waits for one that is on its way: nothing happens until that arrives.
@example(
    seed=0, policy="ares", rate=20.0, num_decode=1, rules=RECOMPUTE, failures=[], bandwidth=1e5,
    precopy=False,
)  # fmt: skip
@example(
    seed=0, policy="ares", rate=20.0, num_decode=1, rules=PAUSE, failures=[], bandwidth=1e5,
    precopy=False,
)  # fmt: skip
def test_no_request_is_lost_and_no_memory_overflows(
    seed: int,
    policy: str,
    rate: float,
    num_decode: int,
    rules: MemoryRules,
    failures: list[Failure],
    bandwidth: float,
    precopy: bool,
) -> None:
    requests = load(seed, 25, rate)
    replicas: list[Watched] = []

    def make(*arguments: Any) -> Watched:
        replicas.append(Watched(*arguments))
        return replicas[-1]

    run = simulate(
        policy,
        requests,
        num_decode=num_decode,
        memory=rules,
        failures=tuple(failures),
        bandwidth_bytes_per_s=bandwidth,
        precopy=precopy,
        make_replica=make,
        seed=seed,
    )
    check_conserved(run, requests)
    assert not run.failures
    for replica in replicas:
        assert replica.most <= rules.high * SMALL.kv_capacity_tokens
        assert not replica.running
        assert not replica.promised
        assert replica.held_tokens == 0


class Watched(StepwiseReplica):
    """Notes the most KV tokens ever held by the running."""

    most = 0

    def _step(self) -> None:
        self.most = max(self.most, self.tokens)
        super()._step()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_seed_says_everything(policy: str) -> None:
    requests = load(3)
    runs = [simulate(policy, requests, seed=7) for _ in range(2)]
    assert runs[0].finished_s.tolist() == runs[1].finished_s.tolist()
    assert runs[0].migrations == runs[1].migrations
    assert runs[0].samples == runs[1].samples


def test_predictions_prevent_what_the_present_does_not_show() -> None:
    """Over several loads: fewer full memories with foresight than with current load."""
    full = dict.fromkeys(("current_load", "oracle"), 0)
    for seed in range(8):
        requests = load(seed, 80, 2.0)
        for policy in full:
            full[policy] += simulate(policy, requests, seed=seed).num_full
    assert full["current_load"] > 0
    assert full["oracle"] < 0.5 * full["current_load"]


@pytest.mark.parametrize("precopy", [True, False])
def test_paused_sequences_go_where_there_is_room_and_recomputed_ones_stay(precopy: bool) -> None:
    """What was preempted without its KV is nothing that could be moved."""

    def moved(rules: MemoryRules) -> int:
        ordered: set[int] = set()

        def decided(
            now_s: float, cluster: ClusterForecast, costs: object, busy: object, blind: object,
            orders: list[MigrationOrder],
        ) -> None:  # fmt: skip
            paused = cluster.rows[:, MOVABLE] == PAUSED
            assert paused.sum() <= cluster.num_paused.sum()
            standing = {cluster.sequence_ids[i] for i in np.flatnonzero(paused)}
            ordered.update(int(o.sequence_id) for o in orders if o.sequence_id in standing)

        requests = load(4)
        run = simulate("reschedule", requests, memory=rules, precopy=precopy, on_decision=decided)
        check_conserved(run, requests)
        assert run.num_full > 0
        return len(ordered & {m.request for m in run.migrations})

    assert moved(PAUSE) > 0
    assert moved(RECOMPUTE) == 0


def test_one_request_takes_the_time_its_steps_take() -> None:
    requests = (np.array([1.0]), np.array([10]), np.array([5]))
    run = simulate("current_load", requests, num_decode=1)
    first_s = 1.0 + SMALL.prefill_s([10])
    assert run.first_token_s[0] == pytest.approx(first_s)
    arrived_s = first_s + 11 * 1000 / 1e7 + 2e-3
    steps_s = sum(SMALL.step.step_s(1, n) for n in (11, 12, 13, 14))
    assert run.finished_s[0] == pytest.approx(arrived_s + steps_s)
    ttft, tpot = latencies(run, requests[0], requests[2])
    assert ttft[0] == pytest.approx(first_s - 1.0)
    assert tpot[0] == pytest.approx((arrived_s + steps_s - first_s) / 4)


def test_precopy_shortens_the_stall() -> None:
    requests = load(1, 80, 3.0)
    stalls = {}
    for precopy in (True, False):
        run = simulate("reschedule", requests, precopy=precopy, bandwidth_bytes_per_s=5e5)
        assert run.migrations
        stalls[precopy] = max(m.stall_s for m in run.migrations)
    assert stalls[True] < 0.5 * stalls[False]


def test_what_does_not_fit_is_refused_with_a_reason() -> None:
    requests = (np.array([0.0, 0.1]), np.array([1900, 10]), np.array([200, 10]))
    run = simulate("current_load", requests)
    assert run.failures == {0: "context_too_long"} or list(run.failures) == [0]
    assert run.produced[1] == 10


def test_a_full_queue_refuses() -> None:
    requests = (np.zeros(30), np.full(30, 50), np.full(30, 3))
    config = PrefillConfig(max_queued_sequences=4, max_queued_tokens=1_000)
    run = simulate("current_load", requests, prefill=config)
    assert 0 < len(run.failures) < 30
    assert set(run.failures.values()) == {"overloaded"}
    check_conserved(run, requests)


def test_time_that_is_up_leaves_unfinished_requests() -> None:
    run = simulate("current_load", load(1), limit_s=5.0)
    assert set(run.failures.values()) == {"unfinished"}
    assert run.end_s == 5.0


def test_the_dead_hold_nothing_and_their_sequences_go_on() -> None:
    requests = load(5, 40, 5.0)
    run = simulate("ares", requests, failures=tuple(Failure(3.0, i, 2.0) for i in range(3)))
    check_conserved(run, requests)
    assert not run.failures
    assert run.rebuilt.sum() > 0


def test_ending_twice_is_noticed() -> None:
    run = Run(1)
    run.close(0, 1.0, None)
    with pytest.raises(InvariantViolation):
        run.close(0, 2.0, None)


def test_the_summary_counts_by_the_slo() -> None:
    run = Run(4)
    arrivals, outputs = np.array([0.0, 1.0, 2.0, 3.0]), np.array([11, 11, 1, 11])
    run.first_token_s[:] = [0.5, 8.0, 2.5, np.nan]
    run.finished_s[:] = [1.5, 9.0, 2.5, np.nan]
    run.end(10.0)
    s = summarise(run, arrivals, outputs, Slo(5.0, 0.11), to_s=4.0)
    assert s.goodput == pytest.approx(2 / 3)  # the second was late, the last never came
    assert s.throughput == pytest.approx(3 / 3)
    assert s.num_failed == 1
    assert s.tpot_p99_s == pytest.approx(0.1)


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        SimConfig(SMALL, 0, 1)
    with pytest.raises(ConfigError, match="failures"):
        SimConfig(SMALL, 1, 1, failures=(Failure(1.0, 4, 1.0),))
    with pytest.raises(ConfigError, match="policy"):
        make_policy("best")


def test_the_paper_step_is_met() -> None:
    """ARES §5.3: 18.23 ms at half of the KV memory."""
    assert RTX_4090D.half_memory_step_s == pytest.approx(18.23e-3, rel=0.01)
