"""The simulator against one that makes every step, and against what must always hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quadriga.config.engine import PrefillConfig
from quadriga.config.pacing import PaceProfile, find_profile
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.forecast import MOVABLE, PAUSED
from quadriga.policies.ares.settings import AresSettings
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import Failure, SimConfig, SimExits
from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.decode.vllm import VllmDecodeReplica
from quadriga.sim.policies import POLICY_NAMES, make_policy
from quadriga.sim.profiles import RTX_4090D, CostProfile, Delays
from quadriga.sim.records import PAUSE, RECOMPUTE, VLLM, Happened, MemoryRules, Sequence
from quadriga.sim.results import SimulatedRun, Slo, latencies, summarise
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


def simulate(policy: str, requests: Load, *, num_decode: int = 3, **options: Any) -> SimulatedRun:
    make = options.pop("make_replica", None)
    extra = {} if make is None else {"make_replica": make}
    for name in ("on_decision", "on_tick", "predictor", "stop"):
        if name in options:
            extra[name] = options.pop(name)
    config = SimConfig(options.pop("profile", SMALL), num_decode, 1, **options)
    return Simulation(config, make_policy(policy, SETTINGS), *requests, **extra).run()


def token_times_ms(policy: str, seed: int, rate: float, exits: SimExits | None) -> Any:
    """Of each request's tokens, on three replicas of which most of a step is its weights; most
    answers are short, and a few hold most of the KV."""
    profile = replace(SMALL, step=find_profile("ares-qwen7b-4090d-short*4"), num_slots=32)
    rng = np.random.default_rng(seed)
    outputs = np.clip(rng.lognormal(3.4, 1.5, 240), 4, 640).astype(np.int64)
    requests = np.cumsum(rng.exponential(1 / rate, 240)), rng.integers(5, 20, 240), outputs
    config = SimConfig(profile, 3, 1, seed=seed, memory=PAUSE, tick_s=0.25, exits=exits)
    run = Simulation(config, make_policy(policy), *requests).run()
    return 1e3 * (run.finished_s - run.first_token_s) / (outputs - 1)


@pytest.mark.parametrize(
    ("exits", "rate", "least"),
    [(None, 1.5, 0.985), (SimExits(front_share=0.25, stays=0.1), 4.0, 0.96)],
)
def test_at_light_load_forecasts_cost_hardly_anybody_anything(
    exits: SimExits | None, rate: float, least: float
) -> None:
    """Against placement by least work, which moves nothing."""
    medians, means = [], []
    for seed in range(4):
        without, with_ares = (
            token_times_ms(policy, seed, rate, exits) for policy in ("least_work", "ares")
        )
        medians.append(np.median(without) / np.median(with_ares))
        means.append(without.mean() / with_ares.mean())
    assert min(np.mean(medians), np.mean(means)) > least


def check_conserved(run: SimulatedRun, requests: Load) -> None:
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
            options["exits"] = SimExits(0.4, stays=0.2, spread=0.15, full_share=0.3)
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
    assert (num_moved > 0) == (policy in ("reschedule", "ares", "ares-mixed", "oracle"))


def test_budgets_are_spent_where_memory_is_short_and_make_answers_end_earlier() -> None:
    """No request beyond its own; what replicas sum up stays what their sequences weigh."""

    class Watched(SimulatedDecodeReplica):
        def run_to_event(self, now_s: float) -> Happened:
            happened = super().run_to_event(now_s)
            running = self.running.values()
            lowered = [s.usual_stays - s.stays for s in running]
            assert all(
                0.0 <= n <= s.quality_budget + 1e-9 for n, s in zip(lowered, running, strict=True)
            )
            assert self._lowers == pytest.approx(sum(lowered), abs=1e-9)
            assert self.work == pytest.approx(sum(self._share(s) for s in running), abs=1e-9)
            return happened

    def run(budget: float, capacity: int = 2000) -> list[SimulatedRun]:
        exits = SimExits(0.3, stays=0.6, spread=0.1, quality_budget=budget, full_share=0.2)
        profile = replace(SMALL, kv_capacity_tokens=capacity)
        made = [
            simulate(
                "ares", load(seed, 120, 9.0), exits=exits, profile=profile, make_replica=Watched
            )
            for seed in range(3)
        ]
        for one, seed in zip(made, range(3), strict=True):
            check_conserved(one, load(seed, 120, 9.0))
            assert one.num_lowered <= budget * one.produced.sum()
        return made

    without, with_budget = run(0.0), run(0.3)
    assert all(one.num_lowered == 0.0 for one in without)
    assert sum(one.num_lowered for one in with_budget) > 0.0
    took = [sum((o.finished_s - o.first_token_s).sum() for o in r) for r in (with_budget, without)]
    assert took[0] < 0.98 * took[1]
    assert all(one.num_lowered == 0.0 for one in run(0.3, capacity=200_000))
    with pytest.raises(ConfigError, match="quality_budget"):
        SimExits(0.3, quality_budget=1.5)
    with pytest.raises(ConfigError, match="quality_budget: not where"):
        SimConfig(SMALL, 1, 1, memory=RECOMPUTE, exits=SimExits(0.3, quality_budget=0.5))


def joined_preempted_and_returned() -> Load:
    """Fourteen sequences grow while two more are on their way to the same step: a long one, then
    a short one. Both are too much when they arrive; the short one, preempted first, fits again.
    """
    arrivals = [0.0] * 14 + [0.7, 0.701, 0.702]
    inputs = [50] * 14 + [100, 800, 30]
    outputs = [600] * 14 + [1, 40, 40]
    return np.array(arrivals), np.array(inputs), np.array(outputs)


def test_a_sequence_may_join_be_preempted_and_return_within_one_event() -> None:
    seen: set[tuple[bool, bool]] = set()
    runs = []
    requests = joined_preempted_and_returned()
    for plain in (SimulatedDecodeReplica, StepwiseReplica):

        class Watched(plain):  # type: ignore[misc, valid-type]
            def run_to_event(self, now_s: float) -> Happened:
                happened: Happened = super().run_to_event(now_s)
                preempted = {s.index for s in happened.preempted}
                seen.update((i in preempted, i in self.running) for i in happened.joined)
                return happened

        run = simulate(
            "current_load",
            requests,
            num_decode=1,
            profile=replace(SMALL, prefill_budget_tokens=2048),
            delays=Delays(handoff_s=(0.5,)),
            memory=RECOMPUTE,
            make_replica=Watched,
        )
        assert (True, True) in seen, "the load no longer makes what this test is about"
        seen.clear()
        check_conserved(run, requests)
        assert not run.failures
        runs.append(run)
    np.testing.assert_allclose(runs[0].finished_s, runs[1].finished_s, rtol=0, atol=1e-6)
    assert runs[0].preempted.tolist() == runs[1].preempted.tolist()


ONE_WAITS: dict[str, Any] = {
    "seed": 0,
    "policy": "ares",
    "rate": 20.0,
    "num_decode": 1,
    "failures": [],
    "bandwidth": 1e5,
    "precopy": False,
}
"""A paused one waits for one that is on its way: nothing happens until that arrives."""


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
@example(rules=RECOMPUTE, **ONE_WAITS)
@example(rules=PAUSE, **ONE_WAITS)
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
    refused = {"overloaded"} if policy in ("ares", "oracle") else set()
    assert set(run.failures.values()) <= refused
    for replica in replicas:
        assert replica.most <= SMALL.kv_capacity_tokens
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

        def decided(now_s: float, cluster: ClusterForecast, *more: Any) -> None:
            paused = cluster.rows[:, MOVABLE] == PAUSED
            assert paused.sum() <= cluster.num_paused.sum()
            standing = {cluster.sequence_ids[i] for i in np.flatnonzero(paused)}
            ordered.update(int(o.sequence_id) for o in more[3] if o.sequence_id in standing)

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
    s = summarise(run, requests[0], requests[2], Slo(5.0, 1.0))
    [(reason, message)] = run.examples.items()
    assert run.failures == {0: reason} and s.failures == {reason: 1}
    assert "3100 tokens; the largest replica holds 2000" in message
    assert run.produced[1] == 10


def test_a_full_queue_refuses() -> None:
    requests = (np.zeros(30), np.full(30, 50), np.full(30, 3))
    config = PrefillConfig(max_queued_sequences=4, max_queued_tokens=1_000)
    run = simulate("current_load", requests, prefill=config)
    assert 0 < len(run.failures) < 30
    assert set(run.failures.values()) == {"overloaded"}
    check_conserved(run, requests)


def test_the_dead_hold_nothing_and_their_sequences_go_on() -> None:
    requests = load(5, 40, 5.0)
    run = simulate("ares", requests, failures=tuple(Failure(3.0, i, 2.0) for i in range(3)))
    check_conserved(run, requests)
    assert not run.failures
    assert run.rebuilt.sum() > 0


def test_a_replica_is_away_until_the_last_of_its_failures_is_over() -> None:
    requests = load(1, 10, 5.0)
    failures = (Failure(1.0, 0, 5.0), Failure(3.0, 0, 10.0), Failure(4.0, 0, 1.0))
    run = simulate("current_load", requests, num_decode=1, failures=failures)
    check_conserved(run, requests)
    assert not [s.at_s for s in run.samples if 1.0 < s.at_s < 13.0] and run.end_s > 13.0


def test_a_death_while_a_chunk_is_computed_makes_no_steps_that_were_never_made() -> None:
    """The third is preempted, and computed again beside the first once the second has ended."""
    replica = VllmDecodeReplica("d", SMALL, VLLM, lambda gaps: None)
    for index, (tokens, final) in enumerate([(900, 1800), (600, 640), (450, 1500)]):
        replica.join(Sequence(index, tokens, final, 1, 0.0), ready_s=0.0)
    while not replica.held_up_s:
        replica.run_to_event(replica.next_event_s())
    assert list(replica.running) == [0]
    had = replica.running[0].base + replica.steps
    died_s = replica.anchor_s + 0.9 * (replica.next_event_s() - replica.anchor_s)
    assert died_s > replica.anchor_s + 2 * replica.first_step_s, "the step is a long one"
    lost = replica.kill(died_s)
    assert {s.index: s.tokens for s in lost} == {0: had, 2: 466}


def test_ending_twice_is_noticed() -> None:
    run = SimulatedRun(1)
    run.close(0, 1.0, None)
    with pytest.raises(InvariantViolation):
        run.close(0, 2.0, None)


def summary_run() -> tuple[SimulatedRun, NDArray[np.float64], NDArray[np.int64]]:
    """Four requests a second apart: in time, late, of one token, and never finished."""
    run = SimulatedRun(4)
    arrivals, outputs = np.array([0.0, 1.0, 2.0, 3.0]), np.array([11, 11, 1, 11])
    run.first_token_s[:] = [0.5, 8.0, 2.5, np.nan]
    run.finished_s[:] = [1.5, 9.0, 2.5, np.nan]
    run.end(10.0)
    return run, arrivals, outputs


def test_the_summary_counts_by_the_slo() -> None:
    s = summarise(*summary_run(), Slo(5.0, 0.11))
    assert s.good_share == pytest.approx(2 / 4)  # the second was late, the last never came
    assert s.failures == {"unfinished": 1}
    assert s.num_failed == 1
    assert s.ttft.max_s == pytest.approx(7.0)
    assert s.tpot.p99_s == pytest.approx(0.1)


def test_what_ends_after_the_last_arrival_is_no_throughput_of_the_arrival_window() -> None:
    """Two of three ended while requests arrived; the third six seconds later."""
    s = summarise(*summary_run(), Slo(5.0, 0.11))
    assert s.rate == pytest.approx(4 / 3)
    assert (s.window.span_s, s.makespan.span_s) == (3.0, 9.0)
    assert s.window.finished == s.window.good == pytest.approx(2 / 3)
    assert s.makespan.finished == pytest.approx(3 / 9)
    assert s.makespan.good == pytest.approx(2 / 9)
    assert s.window.tokens == pytest.approx((11 + 1) / 3)
    assert s.makespan.tokens == pytest.approx((11 + 11 + 1) / 9)


def test_tokens_count_in_the_window_in_which_they_are_made() -> None:
    """Of the first request half of the ten later tokens come inside a window of one second."""
    s = summarise(*summary_run(), Slo(5.0, 0.11), to_s=1.0)
    assert s.num_requests == 1
    assert s.window.tokens == pytest.approx((1 + 5) / 1.0)
    assert s.window.finished == 0.0
    assert s.makespan.finished == pytest.approx(1 / 1.5)


def test_a_load_without_a_span_has_no_rate_in_it() -> None:
    """One row, or all rows at once: the window has no length; the makespan has."""
    requests = (np.array([0.0]), np.array([10]), np.array([5]))
    s = summarise(simulate("current_load", requests), requests[0], requests[2], Slo(5.0, 1.0))
    assert np.isnan([s.rate, s.window.finished, s.window.good, s.window.tokens]).all()
    assert s.makespan.finished == pytest.approx(1 / s.makespan.span_s)
    assert 5 < s.makespan.finished < 25
    assert s.good_share == 1.0
    assert not np.isnan([s.most_used, s.mean_used]).any()
    assert np.isnan(s.variance_ms2), "no two replicas ever ran at once"


def test_no_throughput_is_above_what_arrives_in_an_overload() -> None:
    """The load is several times what the cluster can do; the queue drains long after it."""
    requests = load(3, 120, 80.0)
    run = simulate("current_load", requests, num_decode=2)
    s = summarise(run, requests[0], requests[2], Slo(1.0, 0.05))
    assert s.makespan.span_s > 3 * s.window.span_s
    assert s.window.finished < s.rate / 2
    assert s.window.good <= s.window.finished
    assert s.makespan.good <= s.makespan.finished < s.rate / 3


def test_memory_in_use_is_never_above_the_memory_there_is() -> None:
    """What waits for memory is told apart; after the last arrival things are counted, too."""
    for rules in (RECOMPUTE, PAUSE):
        requests = load(0, 60, 20.0)
        run = simulate("current_load", requests, num_decode=2, memory=rules)
        s = summarise(run, requests[0], requests[2], Slo(5.0, 1.0))
        assert run.num_full > 0
        assert 0.4 < s.mean_used < s.most_used <= 1.0 + SMALL.num_slots / SMALL.kv_capacity_tokens
        assert s.most_wanted > 1.0
        assert max(sample.at_s for sample in run.samples) > requests[0][-1] + 5.0
        late = summarise(run, requests[0], requests[2], Slo(5.0, 1.0), from_s=requests[0][-1])
        assert late.most_used > 0.5


def test_waits_for_prefill_and_for_decode_room_are_told() -> None:
    requests = (np.zeros(40), np.full(40, 100), np.full(40, 150))
    run = simulate("current_load", requests, num_decode=1)
    check_conserved(run, requests)
    s = summarise(run, requests[0], requests[2], Slo(5.0, 1.0))
    passes = [b - a for a, b in run.prefill_busy]
    assert sum(passes) == pytest.approx(40 * SMALL.prefill_s([100]) - 33 * 5e-3, rel=0.2)
    assert s.prefill_wait.count == 40
    # Nothing delays a request between its arrival and its first token but queue and pass.
    ttft = run.first_token_s - requests[0]
    assert (run.prefill_wait_s <= ttft).all()
    assert (ttft - run.prefill_wait_s <= max(passes) + 1e-9).all()
    assert s.room_wait.count == (run.room_wait_s > 0).sum() > 20
    assert s.room_wait.max_s > 1.0
    first = run.room_wait_s == 0
    decoding = run.finished_s - run.first_token_s
    assert decoding[~first].min() > decoding[first].min()
    assert run.prefill_blocked, "rows hold what waits for room, so prefill stands still"
    assert all(b > a for a, b in run.prefill_blocked)


def test_an_empty_cluster_costs_nothing_however_long_it_is_empty() -> None:
    """Three years between two requests: as many ticks as when there is a second between them."""

    def ticks(gap_s: float, policy: str, report_every_s: float) -> tuple[SimulatedRun, int]:
        requests = (np.array([0.0, gap_s]), np.array([10, 10]), np.array([50, 50]))
        seen: list[float] = []
        run = simulate(
            policy,
            requests,
            on_tick=lambda now_s, num_open: seen.append(now_s),
            report_every_s=report_every_s,
        )
        check_conserved(run, requests)
        return run, len(seen)

    for policy in ("current_load", "ares"):
        for report_every_s in (0.0, 1.0):
            far, num_far = ticks(1e8, policy, report_every_s)
            near, num_near = ticks(10.0, policy, report_every_s)
            assert num_far == num_near < 10
            np.testing.assert_allclose(far.finished_s - [0.0, 1e8], near.finished_s - [0.0, 10.0])


@pytest.mark.parametrize("policy", ["current_load", "ares"])
def test_ticks_go_on_after_a_pause_where_they_would_have_been(policy: str) -> None:
    """Bursts with empty stretches between them, against a cluster that never empties."""
    rng = np.random.default_rng(4)
    arrivals = np.sort(np.concatenate([b * 40.0 + rng.uniform(0, 3, 20) for b in range(4)]))
    requests = (arrivals, rng.integers(5, 100, 80), rng.integers(5, 300, 80))
    ticks: list[float] = []
    run = simulate(policy, requests, on_tick=lambda now_s, num_open: ticks.append(now_s))
    check_conserved(run, requests)
    assert all(at_s == int(at_s) for at_s in ticks)
    assert len(ticks) < 0.8 * run.end_s
    for first in arrivals[::20]:
        assert np.ceil(first) in ticks


def test_all_replicas_away_for_years_is_no_endless_run() -> None:
    requests = load(1, 10, 5.0)
    run = simulate("ares", requests, num_decode=1, failures=(Failure(1.0, 0, 1e8),))
    check_conserved(run, requests)
    assert run.end_s > 1e8
    assert len(run.samples) < 200


def test_a_run_that_breaks_off_keeps_what_it_had() -> None:
    requests = load(1)

    def fail(now_s: float, num_open: int) -> None:
        if now_s >= 5.0:
            raise KeyError("as a fault of the simulator would")

    config = SimConfig(SMALL, 3, 1)
    simulation = Simulation(config, make_policy("current_load"), *requests, on_tick=fail)
    with pytest.raises(KeyError):
        simulation.run()
    run = simulation.result
    assert run.end_s == 5.0
    assert 0 < np.isfinite(run.finished_s).sum() < len(requests[0])
    assert set(run.failures.values()) == {"unfinished"}
    assert summarise(run, requests[0], requests[2], Slo(5.0, 1.0)).window.finished > 0


def test_a_run_can_be_ended_early() -> None:
    requests = load(1)
    run = simulate("current_load", requests, stop=lambda now_s, run: now_s >= 3.0)
    assert run.end_s == 3.0
    assert "unfinished" in run.failures.values()


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
