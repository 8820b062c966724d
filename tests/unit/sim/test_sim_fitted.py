"""What a simulation takes from a measured cluster: delays, rules of memory, placement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.routing import PlaceRequest
from quadriga.errors import ConfigError
from quadriga.policies.ares.settings import (
    FIRST_BANDWIDTH_BYTES_PER_S,
    ROUND_TRIP_S,
    AresSettings,
    TransferCosts,
)
from quadriga.policies.load import has_room
from quadriga.policies.slot_reservation import ADMIT_SHARE, RETURN_SHARE
from quadriga.sim.board import Board
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import DEPTH_CLASS, SimConfig
from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.placing import Placing
from quadriga.sim.policies import make_policy
from quadriga.sim.profiles import Delays, drawn
from quadriga.sim.records import PAUSE, RECOMPUTE, MemoryRules, Sequence
from quadriga.sim.results import SimulatedRun
from tests.unit.sim.test_simulator import SETTINGS, SMALL, check_conserved, load

ROOMY = replace(SMALL, kv_capacity_tokens=10**6, num_slots=256)


def simulate(delays: Delays, seed: int = 0) -> SimulatedRun:
    config = SimConfig(ROOMY, 3, 1, seed=seed, delays=delays)
    return Simulation(config, make_policy("round_robin"), *load(0, 60, 0.5)).run()


def test_a_constant_delay_before_prefill_shifts_every_first_token() -> None:
    bare, late = simulate(Delays()), simulate(Delays(ingress_s=(0.25,)))
    np.testing.assert_allclose(late.first_token_s - bare.first_token_s, 0.25, atol=1e-9)


def test_a_hand_off_takes_what_was_measured_and_not_what_the_link_would() -> None:
    slow = simulate(Delays(handoff_s=(0.5,)))
    fast = simulate(Delays(handoff_s=(0.0,)))
    outputs = load(0, 60, 0.5)[2]
    np.testing.assert_allclose(slow.first_token_s, fast.first_token_s)
    later = (slow.finished_s - fast.finished_s)[outputs > 1]
    assert np.median(later) == pytest.approx(0.5, abs=0.02)


def test_delays_are_drawn_from_their_quantiles_and_by_the_seed() -> None:
    values = drawn((0.0, 1.0, 4.0), 20_000, np.random.default_rng(0))
    assert np.median(values) == pytest.approx(1.0, abs=0.05)
    assert values.mean() == pytest.approx(0.5 * 0.5 + 0.5 * 2.5, abs=0.05)
    delays = Delays(ingress_s=(0.0, 0.1, 0.5))
    first, again, other = simulate(delays), simulate(delays), simulate(delays, seed=1)
    np.testing.assert_array_equal(first.first_token_s, again.first_token_s)
    assert (first.first_token_s != other.first_token_s).any()
    check_conserved(first, load(0, 60, 0.5))


def test_steps_take_what_their_machine_makes_of_them() -> None:
    """A factor for all steps is a slower device; a spread of factors is one in the tail alone."""
    requests = load(0, 60, 0.5)
    slow = simulate(Delays(step_factor=(1.5,)))
    check_conserved(slow, requests)
    step = replace(ROOMY.step, base_s=15e-3, per_sequence_s=0.15e-3, per_token_s=3e-6)
    config = SimConfig(replace(ROOMY, step=step), 3, 1)
    same = Simulation(config, make_policy("round_robin"), *requests).run()
    long = requests[2] > 300  # the first draw comes with the first event
    tpot = [(r.finished_s - r.first_token_s)[long] for r in (slow, same)]
    np.testing.assert_allclose(tpot[0], tpot[1], rtol=0.03)
    bare, spread = simulate(Delays()), simulate(Delays(step_factor=(0.5, 1.0, 1.5)))
    check_conserved(spread, requests)
    some = requests[2] > 10
    took = [(r.finished_s - r.first_token_s)[some] for r in (spread, bare)]
    ratio = took[0] / took[1]
    assert np.median(ratio) == pytest.approx(1.0, abs=0.15)
    assert np.percentile(ratio, 95) > 1.15
    assert np.percentile(ratio, 5) < 0.85


@pytest.mark.parametrize("quantiles", [(), (-0.1, 0.2), (0.2, 0.1)])
def test_delays_that_are_no_quantiles_are_refused(quantiles: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        Delays(ingress_s=quantiles)


@pytest.mark.parametrize("rules", [RECOMPUTE, PAUSE])
def test_room_is_what_the_cluster_calls_room(rules: MemoryRules) -> None:
    """Against `policies.load.has_room`, for replicas in random states."""
    rng = np.random.default_rng(0)
    config = SimConfig(SMALL, 8, 1, memory=rules)
    names = [f"d{i}" for i in range(8)]
    tokens = np.ones(4, dtype=np.int64)
    answers = set()
    for _ in range(50):
        board = Board(names, SMALL, tokens, tokens)
        policy = make_policy("current_load", reservation=rules.reservation)
        placing = Placing(config, policy, board, tokens, None)
        held = rng.integers(0, SMALL.num_slots, 8)
        used = np.where(held > 0, rng.integers(1, SMALL.kv_capacity_tokens, 8), 0)
        board.num_paused = rng.integers(0, 2, 8) * (held > 0)
        board.num_held = held
        size = int(rng.integers(1, 900))
        request = PlaceRequest("s", DEPTH_CLASS, size, size + 1)
        found = size + 1 <= placing._room(used.astype(float))
        for i, name in enumerate(names):
            snapshot = replace(
                placing._blank(name),
                num_running=int(held[i]),
                used_tokens=int(used[i]),
                reserved_tokens=int(used[i]),
                num_paused=int(board.num_paused[i]),
            )
            if rules is RECOMPUTE and board.num_paused[i]:
                continue  # the cluster has no such state: who promises the longest pauses nobody
            assert bool(found[i]) == has_room(snapshot, request)
            answers.add(bool(found[i]))
    assert answers == {True, False}


def test_placement_by_old_reports_is_less_even() -> None:
    """What was placed since is known, what has grown or ended since is not."""

    def variance(report_every_s: float) -> float:
        found = []
        for seed in range(5):
            requests = load(seed, 80, 2.0)
            config = SimConfig(ROOMY, 3, 1, seed=seed, report_every_s=report_every_s)
            run = Simulation(config, make_policy("current_load"), *requests).run()
            check_conserved(run, requests)
            found.append(np.mean([s.variance_ms2 for s in run.samples if s.num_running]))
        return float(np.mean(found))

    now, old = variance(0.0), variance(5.0)
    assert variance(0.02) == pytest.approx(now, rel=0.02)
    assert old > 1.3 * now
    with pytest.raises(ConfigError, match="report_every_s"):
        SimConfig(ROOMY, 3, 1, report_every_s=-1.0)


def test_who_pauses_lets_newcomers_in_below_the_mark_only() -> None:
    crowded: list[float] = []

    class Watched(SimulatedDecodeReplica):
        def join(self, sequence: Sequence, *, ready_s: float) -> None:
            known = self.promised.get(sequence.index)
            if known is None and sequence.index not in self.paused and self.num_held:
                crowded.append(self.held_tokens + sequence.tokens + 1)
            super().join(sequence, ready_s=ready_s)

    requests = load(3, 80, 8.0)
    config = SimConfig(SMALL, 3, 1, memory=PAUSE)
    policy = make_policy("current_load", reservation=PAUSE.reservation)
    run = Simulation(config, policy, *requests, make_replica=Watched).run()
    check_conserved(run, requests)
    assert run.num_full > 0, "the load fills the memory"
    assert max(crowded) <= ADMIT_SHARE * SMALL.kv_capacity_tokens


def test_the_memory_limit_of_a_taker_follows_how_memory_is_promised() -> None:
    settings = AresSettings(memory_limit=0.85)
    limits = []
    for rules in (RECOMPUTE, PAUSE):
        policy = make_policy("ares", settings, reservation=rules.reservation)
        assert policy.rescheduler is not None
        limits.append(policy.rescheduler.settings.memory_limit)
    assert limits == [0.85, RETURN_SHARE]


def test_moves_by_forecast_need_no_placement_by_forecast() -> None:
    requests = load(2, 80)
    seen: list[object] = []
    policy = replace(make_policy("oracle", SETTINGS), places_ahead=False)
    simulation = Simulation(SimConfig(SMALL, 4, 1), policy, *requests)
    simulation._on_decision = lambda *_: seen.append(simulation._placing.forecast)
    run = simulation.run()
    assert run.migrations
    assert set(seen) == {None}


def test_a_replica_takes_part_in_moves_until_the_last_of_them_has_ended() -> None:
    """As one that drains does: it gives away several sequences at once."""
    simulation = Simulation(SimConfig(SMALL, 3, 1), make_policy("current_load"), *load(0))
    moving, names = simulation._moving, simulation._board.names
    for index, to in enumerate(names[1:]):
        route = names[0], to, MigrationCause.DRAIN
        moving.start(0.0, MigrationOrder(str(index), DEPTH_CLASS, *route, 0.0, 10, 0.0))
    assert moving.busy == set(names)
    moving.give_up(0)
    assert moving.busy == {names[0], names[2]}
    moving.give_up(1)
    assert not moving.busy and not any(r.promised for r in simulation._decode)


def test_a_slow_copy_is_followed_by_shorter_ones_before_the_sequence_rests() -> None:
    """A millisecond a token: what is generated during the first copy would take some steps."""
    config = SimConfig(SMALL, 4, 1, memory=RECOMPUTE, bandwidth_bytes_per_s=1e6, learns_link=True)
    run = Simulation(config, make_policy("oracle", SETTINGS), *load(2, 80)).run()
    assert max(m.num_tokens for m in run.migrations) > 400
    longest_s = SMALL.round_trip_s + 1e-3 + SMALL.step.step_s(SMALL.num_slots, 2000)
    assert max(m.stall_s for m in run.migrations) < longest_s


def test_what_a_move_costs_is_learned_as_on_the_cluster() -> None:
    config = SimConfig(SMALL, 4, 1, learns_link=True, bandwidth_bytes_per_s=2e6)

    def believed(config: SimConfig) -> tuple[list[TransferCosts], SimulatedRun]:
        seen: list[TransferCosts] = []
        decided = {"on_decision": lambda now, cluster, costs, *_: seen.append(costs)}
        policy = make_policy("oracle", SETTINGS)
        return seen, Simulation(config, policy, *load(2, 160), **decided).run()

    learned, run = believed(config)
    assert sum(m.num_tokens * SMALL.kv_bytes_per_token > 65_536 for m in run.migrations) > 3
    assert learned[0].bandwidth_bytes_per_s == pytest.approx(FIRST_BANDWIDTH_BYTES_PER_S)
    assert learned[-1].bandwidth_bytes_per_s < 0.6 * FIRST_BANDWIDTH_BYTES_PER_S
    assert learned[0].round_trip_s == pytest.approx(ROUND_TRIP_S)
    assert set(believed(replace(config, learns_link=False))[0]) == {config.link}
