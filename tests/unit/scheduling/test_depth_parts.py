"""What follows a change of depth: promises of KV, the prefill queue, costs, plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quadriga.checkpoint.exits import ExitCounters, ExitParams
from quadriga.clock import ManualClock
from quadriga.config.pacing import find_profile
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import (
    ConfigError,
    DeadlineExceeded,
    InvariantViolation,
    KVCacheExhausted,
    Overloaded,
    Unavailable,
)
from quadriga.interfaces import PrefillChunk
from quadriga.policies.baselines.exits import LazyExits
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.paced_runner import PacedRunner
from quadriga.scheduling.prefill_loop import PrefillLoop
from quadriga.scheduling.prefill_queue import MAX_WAITING_FOR_LAYERS
from quadriga.scheduling.sequence import RunningSequence, SequenceStatus
from tests.fake_depth_runner import FakeDepthRunner
from tests.fake_runner import FakeRunner
from tests.sequences import make_prefill_loop, make_sequence, make_slots


def make_state(name: str, *, prompt: int = 8, outputs: int = 0) -> SequenceState:
    return make_sequence(
        name,
        [5] * prompt,
        SamplingParams(max_tokens=4),
        exits=ExitParams(0.5, "bounded"),
        output_ids=[7] * outputs,
        exit_layers=[8] * outputs,
    )


def test_more_tokens_hold_more_sequences_and_fewer_wait_to_be_given_back() -> None:
    slots = make_slots(8, 64, 64)
    slots.reserve("a", 64)
    with pytest.raises(KVCacheExhausted):
        slots.reserve("b", 64)
    slots.resize(192)
    slots.reserve("b", 64)
    slots.reserve("c", 64)
    slots.resize(64)
    with pytest.raises(KVCacheExhausted):
        slots.reserve("d", 1)
    slots.release("a")
    with pytest.raises(KVCacheExhausted):
        slots.reserve("d", 1)
    slots.release("b")
    slots.check()


class Events:
    """Records the layers that are complete."""

    def __init__(self) -> None:
        self.kv: list[tuple[str, int, int]] = []

    def on_kv(
        self, sequence: RunningSequence, chunk: PrefillChunk, first_layer: int, num_layers: int
    ) -> None:
        self.kv.append((sequence.state.sequence_id, first_layer, num_layers))


def prefill_loop(
    runner: FakeDepthRunner,
    events: Events,
    clock: ManualClock,
    *,
    rows: int,
    chunk_tokens: int = 99,
    **more: Any,
) -> PrefillLoop:
    usual = {"layer_groups": 1, "on_kv": events.on_kv}
    return make_prefill_loop(
        runner, make_slots(rows, 64, 64 * rows), clock, chunk_tokens, **usual | more
    )


def test_prefill_changes_depth_between_prompts() -> None:
    runner, clock, events = FakeDepthRunner(2, 5), ManualClock(), Events()
    loop = prefill_loop(runner, events, clock, rows=2, chunk_tokens=4, layer_groups=2)
    loop.submit(RunningSequence(make_state("a")))
    loop.step()  # half of its prompt
    loop.submit(RunningSequence(make_state("b")))
    loop.hold()
    assert loop.has_work and not loop.is_quiet
    loop.step()
    assert not loop.has_work and not loop.is_quiet, "its hand-off is not over"
    loop.release("a")
    assert loop.is_quiet and loop.num_waiting == 1
    loop.step()
    assert loop.is_quiet, "nobody starts"
    assert {(n, first + count) for n, first, count in events.kv} == {("a", 2), ("a", 5)}
    runner.take_depth(8)
    loop.resume(kv_capacity_tokens=64)
    assert loop.has_work and loop.slots.kv_capacity_tokens == 64
    loop.step()
    loop.step()
    assert {(first, count) for n, first, count in events.kv if n == "b"} == {(0, 4), (4, 4)}
    loop.check()


def test_a_strict_prompt_waits_for_the_layers_its_first_token_may_need() -> None:
    runner, clock, events = FakeDepthRunner(4, 5), ManualClock(), Events()
    loop = prefill_loop(runner, events, clock, rows=4, full_depth=8)

    def strict(name: str, **changes: Any) -> SequenceState:
        return replace(make_state(name), exits=ExitParams(0.9, "strict"), **changes)

    loop.submit(RunningSequence(strict("deep")))
    loop.submit(RunningSequence(strict("late", deadline_unix_s=clock.unix_s() + 1.0)))
    assert loop.waiting_by_priority == ((0, 16),)
    loop.submit(RunningSequence(strict("cancelled", priority=3)))
    assert loop.waiting_by_priority == ((0, 16), (3, 8))
    assert not loop.has_work, "nothing to do, and no spinning"
    assert (loop.needs_depth, loop.num_waiting, loop.waiting_tokens) == (8, 3, 24)
    # Those whose first token is out, that want none, or that limit themselves need no more.
    loop.submit(RunningSequence(replace(strict("rebuilt", output_ids=[7]), exit_layers=[8])))
    loop.submit(RunningSequence(strict("scored", sampling=SamplingParams(max_tokens=0))))
    limited = replace(make_state("limited"), exits=ExitParams(0.9, "strict", 5))
    loop.submit(RunningSequence(limited))
    loop.step()
    assert {name for name, _, _ in events.kv} == {"rebuilt", "scored", "limited"}
    for name in ("rebuilt", "limited"):
        loop.release(name)
    assert loop.release("cancelled") and loop.num_waiting == 2
    clock.advance(2.0)
    ((late, output),) = loop.step()
    assert late.state.sequence_id == "late" and output is not None
    assert isinstance(output.error, DeadlineExceeded)
    loop.hold()
    assert loop.is_quiet
    runner.take_depth(8)
    loop.resume()
    assert loop.has_work
    loop.step()
    assert ("deep", 0, 8) in events.kv and loop.needs_depth == loop.num_waiting == 0
    loop.check()


def test_no_more_wait_for_layers_than_a_replica_can_remember() -> None:
    loop = prefill_loop(FakeDepthRunner(1, 5), Events(), ManualClock(), rows=1, full_depth=8)
    for i in range(MAX_WAITING_FOR_LAYERS):
        loop.submit(RunningSequence(replace(make_state(f"s{i}"), exits=ExitParams(0.9, "strict"))))
    with pytest.raises(Overloaded, match="wait for layers"):
        loop.submit(
            RunningSequence(replace(make_state("one more"), exits=ExitParams(0.9, "strict")))
        )


def costs() -> SegmentCosts:
    made = SegmentCosts(3, 4)
    for count in made.knots:
        for segment, seconds in enumerate((2.0, 3.0, 3.5)):
            made.set(segment, count, seconds * count)
            made.set(segment, count, 0.5 * count if segment < 2 else 0.0, head=True)
    made.set_slope(0, 0.02)
    return made


def test_costs_of_known_segments_stay_and_new_ones_are_taken_by_the_layer() -> None:
    known = costs()
    cut = known.resized((2, 5, 8), (2, 5))
    assert cut.forecast_s(0, 1, 2, 0, tests=True) == pytest.approx(
        known.forecast_s(0, 1, 2, 0, tests=True)
    )
    # The last segment ends in a head, whether it is tested or not.
    assert cut.forecast_s(0, 2, 2, 0, tests=False) == pytest.approx(2 * (2.0 + 3.0 + 0.5))
    again = cut.resized((2, 5), (2, 5, 8))
    for first, stop in ((0, 1), (1, 2), (0, 2)):
        assert again.forecast_s(first, stop, 4, 0, tests=True) == pytest.approx(
            known.forecast_s(first, stop, 4, 0, tests=True)
        )
    # 1 s a layer and sequence, three layers, and a head.
    assert again.forecast_s(2, 3, 1, 0, tests=False) == pytest.approx(3.5)
    assert again.forecast_s(0, 1, 0, 100, tests=False) > known.forecast_s(0, 1, 0, 0, tests=False)
    only = cut.resized((2, 5), (2,))
    assert only.num_segments == 1 and only.forecast_s(0, 1, 1, 0, tests=False) == pytest.approx(2.5)


def test_policies_keep_what_they_learned_of_exits_that_stay() -> None:
    drex = DrexRebatcher(costs(), counters=ExitCounters(), deterministic=True)
    drex._left_by[:] = [0.7, 0.9]
    deeper = drex.resized((2, 5, 8), (2, 5))
    assert deeper.left_by == (0.7,) and deeper.costs.num_segments == 2
    assert len(deeper.resized((2, 5), (2, 5, 8)).left_by) == 2
    lazy = LazyExits(costs()).resized((2, 5, 8), (2,))
    assert isinstance(lazy, LazyExits) and lazy.costs.num_segments == 1


def loop_of(runner: FakeRunner | PacedRunner) -> DecodeLoop:
    slots = make_slots(2, 128, 256)
    return DecodeLoop(runner=runner, slots=slots, eos_token_ids=(), clock=ManualClock())


def test_an_engine_without_layers_to_change_says_so() -> None:
    plain = FakeRunner(2)
    for runner in (plain, PacedRunner(plain, find_profile("steady-15ms"))):
        loop = loop_of(runner)
        with pytest.raises(ConfigError, match="runs its model as it is"):
            loop.take_depth(8)
        with pytest.raises(ConfigError, match="runs its model as it is"):
            loop.drop_to(2)
    loop = loop_of(plain)
    state = make_state("a", outputs=1)
    loop.reserve("a", 20)
    plain.write_kv(0, 0, 0, state.prompt_ids)
    with pytest.raises(InvariantViolation, match="KV of 4 layers came for row 0; 8 are needed"):
        loop.join(state, depth=4)


def drex_loop(
    num_tokens: int, policy: str, depth: int | None = None
) -> tuple[DecodeLoop, FakeDepthRunner, SequenceState]:
    """A loop whose exits are not chosen anew, with a sequence of 50 prompt tokens."""
    runner = FakeDepthRunner(2, 8)
    loop = loop_of(runner)
    loop.batch.rebatcher = DrexRebatcher(costs(), counters=loop.counters, deterministic=True)
    state = make_state("a", prompt=50, outputs=1)
    state.sampling = SamplingParams(max_tokens=num_tokens)
    state.exits = ExitParams(0.999, policy)
    loop.reserve("a", 50 + num_tokens)
    runner.write_kv(0, 0, 0, state.prompt_ids)
    loop.join(state, depth=depth)
    return loop, runner, state


def test_a_prompt_of_a_shallower_prefill_replica_is_run_again_in_pieces() -> None:
    loop, runner, state = drex_loop(10, "strict", depth=2)
    while loop.has_work:
        loop.step()
        loop.check()
    assert len(state.output_ids) == 10 and set(state.exit_layers[1:]) <= {2, 5, 8}
    assert runner.num_repaid == 50 and loop.depth.num_repayments == 1


def test_a_token_that_waits_for_its_kv_is_run_to_the_end_before_layers_go() -> None:
    """Bounded, in host memory while its replica grew; nobody may be stuck behind layers that go."""
    loop, runner, _ = drex_loop(30, "bounded")
    assert not loop.num_waiting_at_exits[0]
    loop.step()  # to the first exit, where it waits
    assert loop.num_waiting_at_exits[0] == 1
    sequence = loop.batch.sequences["a"]
    loop.batch.lift(sequence, SequenceStatus.MOVING)
    runner.set_depth_of(0, 2)
    loop.batch.enter(sequence)
    assert sequence.is_parked and sequence.next_segment == 1
    shrunk = loop.drop_to(2)
    assert not shrunk.blocked_by and [e.exit_layers for _, e in shrunk.emissions] == [[8]]
    assert loop.num_running == 1 and loop.batch.num_parked == 0
    loop.check()


def test_a_refused_change_takes_no_token_from_a_sequence() -> None:
    loop, _, state = drex_loop(16, "bounded")
    loop.step()
    with pytest.raises(ConfigError, match="8 is not below 8"):
        loop.drop_to(8)
    with pytest.raises(ConfigError, match="4 is not below 8"):
        loop.drop_to(4)
    assert loop.num_waiting_at_exits[0] == 1 and len(state.output_ids) == 1


def test_a_strict_prompt_is_refused_where_its_layers_never_come() -> None:
    """Its first token is not tested; one that is rebuilt says none before a decode replica."""
    runner, clock = FakeDepthRunner(4, 5), ManualClock()
    loop = prefill_loop(runner, Events(), clock, rows=4, full_depth=8, may_deepen=False)
    for exits in (ExitParams(0.9, "strict"), ExitParams(policy="lossless")):
        with pytest.raises(Unavailable, match="may need 8 layers, and this replica has 5"):
            loop.submit(RunningSequence(replace(make_state("deep"), exits=exits)))
    loop.submit(RunningSequence(replace(make_state("near"), exits=ExitParams(0.9, "strict", 5))))
    rebuilt = replace(make_state("again"), exits=ExitParams(0.9, "strict"), output_ids=[7])
    loop.submit(RunningSequence(replace(rebuilt, exit_layers=[8])))
    assert loop.num_waiting == 2
