"""Prefill and decode loops over a runner that notices every mixed-up row."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import Mock

import pytest

from quadriga.clock import ManualClock
from quadriga.core.request import FinishReason, SampledToken, SamplingParams, SequenceState
from quadriga.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DeviceMemoryExhausted,
    InvalidRequest,
    InvariantViolation,
    Overloaded,
    QuadrigaError,
)
from quadriga.interfaces import PrefillChunk
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.prefill_loop import HELD_AFTER_S, PrefillLoop, PrefillOutput
from quadriga.scheduling.prefill_queue import STARVING_S, PrefillQueue
from quadriga.scheduling.sequence import RunningSequence
from tests.fake_runner import EOS, FakeRunner, expected_output
from tests.sequences import make_sequence, make_slots


def sequence(
    name: str, prompt: list[int], max_tokens: int = 5, deadline: float = 1e9, priority: int = 0
) -> SequenceState:
    return make_sequence(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens),
        deadline_unix_s=deadline,
        priority=priority,
    )


@dataclass
class Events:
    """Records what the prefill loop calls and returns."""

    started: list[str] = field(default_factory=list)
    kv: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    done: dict[str, FinishReason | None] = field(default_factory=dict)
    rebuilt: list[str] = field(default_factory=list)
    errors: dict[str, QuadrigaError] = field(default_factory=dict)

    def on_start(self, sequence: RunningSequence) -> None:
        self.started.append(sequence.state.sequence_id)

    def on_kv(
        self, sequence: RunningSequence, chunk: PrefillChunk, first_layer: int, num_layers: int
    ) -> None:
        name = sequence.state.sequence_id
        self.kv.append((name, first_layer, num_layers, chunk.start, chunk.stop))

    def take(self, outputs: list[PrefillOutput]) -> None:
        for sequence, output in outputs:
            if output is None:
                self.rebuilt.append(sequence.state.sequence_id)
            elif output.error is not None:
                self.errors[sequence.state.sequence_id] = output.error
            else:
                self.done[sequence.state.sequence_id] = output.finish


class Harness:
    """One prefill loop over one fake runner."""

    def __init__(
        self,
        *,
        rows: int = 4,
        chunk: int = 8,
        capacity: int = 1024,
        queued: int = 8,
        queued_tokens: int = 1000,
        max_unplaced: int = sys.maxsize,
    ) -> None:
        self.clock = ManualClock()
        self.events = Events()
        self.runner = FakeRunner(rows)
        self.slots = make_slots(rows, 256, capacity)
        self.queue = PrefillQueue(max_sequences=queued, max_tokens=queued_tokens, max_age_s=1.0)
        self.loop = PrefillLoop(
            runner=self.runner,
            slots=self.slots,
            queue=self.queue,
            eos_token_ids=(EOS,),
            chunk_tokens=chunk,
            layer_groups=3,
            clock=self.clock,
            max_unplaced=max_unplaced,
            on_start=self.events.on_start,
            on_kv=self.events.on_kv,
        )

    def submit(self, state: SequenceState) -> RunningSequence:
        sequence = RunningSequence(state)
        self.loop.submit(sequence)
        return sequence

    def step(self) -> None:
        self.events.take(self.loop.step())


def test_a_long_prompt_is_computed_in_chunks_and_every_kv_is_announced_once() -> None:
    h = Harness(chunk=8)
    state = sequence("a", list(range(1, 21)))
    h.submit(state)
    for _ in range(3):
        h.step()
    assert state.output_ids == expected_output(state.prompt_ids, 1)
    assert h.events.done == {"a": None}
    covered = [
        (layer, position)
        for _, first, num, start, stop in h.events.kv
        for layer in range(first, first + num)
        for position in range(start, stop)
    ]
    assert sorted(covered) == [(layer, pos) for layer in range(8) for pos in range(20)]
    assert not h.loop.has_work
    assert h.loop.num_held == 1, "the row stays until the hand-off is acknowledged"
    assert h.loop.release("a")
    assert h.slots.num_held == 0


def test_short_prompts_share_a_chunk() -> None:
    h = Harness(chunk=8)
    for name in "abc":
        h.submit(sequence(name, [1, 2, ord(name)]))
    h.step()
    assert h.events.started == ["a", "b", "c"]
    assert set(h.events.done) == {"a", "b"}, "the third reached beyond the budget"
    h.step()
    assert set(h.events.done) == {"a", "b", "c"}


def first_token_steps(h: Harness, num_prompts: int, *, handoff_steps: int) -> list[int]:
    """Steps until each first token, where a place is found within a step and KV takes long to send.

    Each prompt is half a chunk.
    """
    sequences = {
        name: h.submit(sequence(name, [i + 1, 1, 2, 3]))
        for i, name in enumerate(f"s{i}" for i in range(num_prompts))
    }
    began: dict[str, int] = {}
    heard: dict[str, int] = {}
    for step in range(1, 20 * num_prompts):
        if not h.loop.has_work and not h.loop.num_held:
            break
        h.step()
        for name in h.events.started[len(began) :]:
            began[name] = step
        for name in h.events.done:
            heard.setdefault(name, step)
        for name in heard:
            sequences[name].is_placed = True
        for name, at in began.items():
            if step == at + handoff_steps:
                h.loop.release(name)
    assert len(heard) == num_prompts
    return sorted(heard.values())


def test_how_long_kv_takes_to_be_sent_delays_no_first_token() -> None:
    """64 prompts at once, two a step, each row held for 20 steps until its hand-off is over."""
    at_once = Harness(rows=64, queued=64, max_unplaced=16)
    assert first_token_steps(at_once, 64, handoff_steps=20)[-1] == 32, "never idle"


def test_no_prompt_is_begun_while_enough_have_no_place() -> None:
    h = Harness(rows=8, chunk=8, max_unplaced=2)
    sequences = {name: h.submit(sequence(name, [1, ord(name)])) for name in "abcd"}
    h.step()
    h.step()
    assert h.events.started == ["a", "b"], "decode is full: their second tokens must wait"
    assert not h.loop.has_work, "it does not spin until somebody has a place"
    sequences["b"].is_placed = True
    assert h.loop.has_work
    h.step()
    assert h.events.started == ["a", "b", "c"]
    assert not h.loop.has_work
    assert h.loop.num_unplaced == 0, "they are on their way"
    h.clock.advance(HELD_AFTER_S)
    assert h.loop.num_unplaced == 2
    h.loop.max_unplaced = 3
    assert h.loop.has_work, "under overload more of them wait"
    h.loop.max_unplaced = 2
    h.loop.release("a")
    assert h.loop.has_work, "cancelled"
    h.step()
    assert h.events.started == ["a", "b", "c", "d"]
    h.submit(sequence("equal", [1]))
    assert not h.loop.has_work
    h.submit(sequence("high", [1], priority=-1))
    assert h.loop.has_work, "it may take a place at a decode replica from the others"
    h.step()
    assert h.events.started[4:] == ["high"]


def test_who_ends_with_its_first_token_waits_for_no_place() -> None:
    h = Harness(rows=8, chunk=8, max_unplaced=2)
    for name in "abc":
        h.submit(sequence(name, [1, ord(name)]))
    while h.loop.has_work:
        h.step()
    h.submit(sequence("ends", [1, 2], max_tokens=1))
    assert h.loop.ending == (1, 2) and h.loop.has_work
    h.step()
    assert h.events.started == ["a", "b", "ends"]
    assert not h.loop.has_work
    h.loop.release("a")
    h.submit(sequence("high", [1, 2], max_tokens=1, priority=-1))
    h.step()
    assert h.events.started[3:] == ["high", "c"], "they do not count either"


def test_a_more_important_prompt_passes_by_one_that_found_no_room() -> None:
    h = Harness(capacity=50)
    h.submit(sequence("held", [1], priority=10))
    h.submit(sequence("long", [1] * 40, priority=10))
    h.step()
    h.submit(sequence("short", [1], priority=10))
    assert not h.loop.has_work, "it comes behind the long one"
    h.submit(sequence("high", [1], priority=0))
    assert h.loop.has_work
    h.step()
    assert h.events.started == ["held", "high"]
    assert not h.loop.has_work
    h.loop.release("long")
    assert h.loop.has_work
    h.step()
    assert h.events.started == ["held", "high", "short"]


def test_more_important_prompts_come_before_those_under_way_and_stop_none_for_ever() -> None:
    h = Harness(chunk=8)
    h.submit(sequence("long", [1] * 48, priority=10))
    h.step()
    h.submit(sequence("equal", [1], priority=10))
    h.submit(sequence("high", [1, 2, 3], priority=0))
    h.step()
    assert set(h.events.done) == {"high"}
    assert h.events.started == ["long", "high"], "equals come when a chunk has tokens left"
    h.clock.advance(STARVING_S)
    for i in range(10):
        h.loop.release(h.events.started[-1])
        h.submit(sequence(f"high{i}", [1] * 8, priority=0))
        h.step()
    assert "long" in h.events.done


def test_room_is_kept_for_a_starving_prompt_that_needs_much() -> None:
    h = Harness(capacity=63)
    h.submit(sequence("small", [1], priority=0))
    h.step()
    h.submit(sequence("large", [1] * 40, priority=10))
    h.clock.advance(STARVING_S)
    h.submit(sequence("another small", [1], priority=0))
    h.step()
    assert not h.loop.has_work, "nor does it spin"
    h.loop.release("small")
    h.step()
    assert h.events.started == ["small", "large"]


def test_a_prompt_that_cannot_be_attached_holds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    monkeypatch.setattr(h.runner, "attach", Mock(side_effect=DeviceMemoryExhausted("full")))
    h.submit(sequence("a", [1]))
    with pytest.raises(DeviceMemoryExhausted):
        h.step()
    h.loop.check()
    assert h.loop.release("a")


def test_no_row_means_waiting_without_spinning() -> None:
    h = Harness(rows=1, chunk=8)
    h.submit(sequence("a", [1, 2]))
    h.submit(sequence("b", [3, 4]))
    h.step()
    h.step()
    assert h.events.started == ["a"]
    assert not h.loop.has_work
    h.loop.release("a")
    assert h.loop.has_work
    h.step()
    assert h.events.started == ["a", "b"]


def test_a_prompt_that_finishes_at_once_frees_its_row() -> None:
    h = Harness()
    h.submit(sequence("a", [1, 2, 3], max_tokens=1))
    h.step()
    assert h.events.done == {"a": FinishReason.LENGTH}
    assert h.slots.num_held == 0


def test_a_late_prompt_is_refused_and_frees_its_row() -> None:
    h = Harness(chunk=4)
    h.submit(sequence("a", [1] * 10, deadline=5))
    h.step()
    h.clock.advance(6)
    h.step()
    assert isinstance(h.events.errors["a"], DeadlineExceeded)
    assert h.slots.num_held == 0
    assert not h.loop.has_work


def test_a_prompt_beyond_a_row_is_an_error_of_its_own() -> None:
    h = Harness()
    h.submit(sequence("a", [1] * 300))
    h.step()
    h.submit(sequence("b", [1]))
    h.step()
    assert isinstance(h.events.errors["a"], ContextTooLong)
    assert "b" in h.events.done


@pytest.mark.parametrize("when", ["queued", "active", "computed"])
def test_release_frees_everything_in_every_state(when: str) -> None:
    h = Harness(chunk=4)
    h.submit(sequence("a", [1] * 10))
    steps = {"queued": 0, "active": 1, "computed": 3}[when]
    for _ in range(steps):
        h.step()
    assert h.loop.release("a")
    assert not h.loop.release("a")
    assert (h.slots.num_held, h.loop.waiting_tokens, h.loop.used_tokens) == (0, 0, 0)
    assert not h.runner.attached
    assert not h.loop.has_work


def test_the_queue_refuses_with_a_time() -> None:
    h = Harness()
    for n in range(8):
        h.submit(sequence(str(n), [1]))
    with pytest.raises(Overloaded, match="8 of 8 sequences") as caught:
        h.submit(sequence("x", [1]))
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1


def taken(queue: PrefillQueue, token_budget: int, *, now_s: float) -> list[str]:
    """Who is taken next, where whoever is offered is taken."""
    names: list[str] = []

    def take(sequence: RunningSequence) -> bool:
        nonlocal token_budget
        if token_budget <= 0:
            return False
        token_budget -= len(sequence.state.prompt_ids)
        names.append(sequence.state.sequence_id)
        return True

    queue.take(take, now_s=now_s)
    return names


def test_nobody_waits_for_ever_behind_the_important() -> None:
    queue = PrefillQueue(max_sequences=9, max_tokens=999, max_age_s=1.0)
    came = ("humble", 5, 0.0), ("meek", 5, 0.0), ("a", 0, 1.0), ("b", 0, 4.0)
    for name, priority, since_s in came:
        state = sequence(name, [1], priority=priority)
        queue.push(RunningSequence(state), now_s=since_s, drain_tokens_per_s=1)
    assert taken(queue, 1, now_s=STARVING_S - 0.1) == ["a"]
    assert taken(queue, 1, now_s=STARVING_S + 0.1) == ["humble"]
    assert taken(queue, 1, now_s=STARVING_S + 0.1) == ["b"], "in turns, if all have waited for long"
    assert taken(queue, 1, now_s=STARVING_S + 0.1) == ["meek"]


def test_priority_then_arrival_then_similar_length() -> None:
    queue = PrefillQueue(max_sequences=9, max_tokens=999, max_age_s=1.0)
    for name, length, priority in (("a", 8, 0), ("b", 60, 0), ("c", 9, 0), ("d", 8, -1)):
        state = sequence(name, [1] * length, priority=priority)
        queue.push(RunningSequence(state), now_s=0, drain_tokens_per_s=1)
    assert taken(queue, 1, now_s=0) == ["d"]
    assert taken(queue, 16, now_s=0) == ["a", "c"], "c is like a, b is not"
    assert len(queue) == 1


def test_age_beats_similarity() -> None:
    queue = PrefillQueue(max_sequences=9, max_tokens=999, max_age_s=1.0)
    for name, length in (("a", 8), ("b", 60), ("c", 9)):
        queue.push(RunningSequence(sequence(name, [1] * length)), now_s=0, drain_tokens_per_s=1)
    assert taken(queue, 9, now_s=2.0) == ["a", "b"]


def decode_loop(
    rows: int = 4, *, step_s: float = 0.0
) -> tuple[DecodeLoop, FakeRunner, ManualClock]:
    clock = ManualClock()
    runner = FakeRunner(rows)
    decode = runner.decode

    def takes_a_while(rows: Sequence[int]) -> list[SampledToken]:
        clock.advance(step_s)
        return decode(rows)

    runner.decode = takes_a_while  # type: ignore[method-assign]
    slots = make_slots(rows, 256, 4096)
    return DecodeLoop(runner=runner, slots=slots, eos_token_ids=(EOS,), clock=clock), runner, clock


def hand_off(loop: DecodeLoop, runner: FakeRunner, state: SequenceState) -> None:
    """Do by hand what a transfer does: reserve, write the prompt's KV, join."""
    slot = loop.reserve(state.sequence_id, state.max_total_tokens)
    runner.write_kv(slot.row, 0, 0, list(state.prompt_ids))
    state.output_ids = expected_output(state.prompt_ids, 1)
    state.exit_layers = [8]
    loop.join(state)


def test_what_was_generated_is_counted_wherever_a_sequence_is() -> None:
    loop, runner, _ = decode_loop()
    hand_off(loop, runner, sequence("runs", [1, 2], 9))
    hand_off(loop, runner, sequence("paused", [3] * 5, 9))
    loop.reserve("comes", 30, 20)
    loop.step()
    loop.preemption.pause("paused")
    assert (loop.prompt_tokens, loop.generated_tokens) == (2 + 5 + 20, 2 + 2)


def test_sequences_join_and_leave_between_steps_and_none_changes_another() -> None:
    loop, runner, _ = decode_loop()
    first, second = sequence("a", [1, 2], 9), sequence("b", [3], 9)
    hand_off(loop, runner, first)
    loop.step()
    hand_off(loop, runner, second)
    emitted = [e for _ in range(20) for _, e in loop.step()]
    for state in (first, second):
        assert state.output_ids == expected_output(state.prompt_ids, 9)
        indices = [e.first_index for e in emitted if e.sequence_id == state.sequence_id]
        assert indices == sorted(set(indices))
    assert loop.slots.num_held == 0
    assert not runner.attached


@pytest.mark.parametrize("num_tokens", [2, 9])
def test_the_step_time_counts_those_that_end_in_the_step(num_tokens: int) -> None:
    loop, runner, _ = decode_loop(step_s=0.03)
    hand_off(loop, runner, sequence("a", [1, 2], num_tokens))
    for _ in range(num_tokens):
        loop.step()
    assert loop.step_time_s == pytest.approx(0.03)


def test_the_step_time_has_what_lies_between_two_steps_and_no_time_without_work() -> None:
    loop, runner, clock = decode_loop(step_s=0.03)
    for name in "ab":
        hand_off(loop, runner, sequence(name, [1, 2], 60))
        for _ in range(50):
            loop.step()
            clock.advance(0.3)  # chunks of prompts
        loop.leave(name)
        clock.advance(1000.0)
    assert loop.step_time_s == pytest.approx(0.33, rel=0.02)
    assert loop.pass_time_s == pytest.approx(0.03)


def test_the_step_time_is_that_of_the_sequences_that_run() -> None:
    """The others wait for layers, and no step could give them a token."""
    loop, runner, _ = decode_loop(step_s=0.03)
    for name in "abcd":
        hand_off(loop, runner, sequence(name, [1, 2], 9))
    for name in "cd":
        loop.batch.wait(loop.batch.sequences[name], 1, 0.0, is_parked=True)
    loop.step()
    assert loop.step_time_s == loop.pass_time_s == pytest.approx(0.03)


def test_leave_returns_the_state_of_the_running_and_frees_the_reserved() -> None:
    loop, runner, _ = decode_loop()
    state = sequence("a", [1, 2], 9)
    hand_off(loop, runner, state)
    loop.reserve("coming", 10)
    assert loop.num_reserved == 1
    assert loop.leave("coming") is None
    assert loop.leave("a") is state
    assert loop.leave("a") is None
    assert loop.slots.num_held == 0


def test_a_late_sequence_ends_in_an_error_and_frees_its_slot() -> None:
    loop, runner, clock = decode_loop()
    hand_off(loop, runner, sequence("a", [1, 2], 50, deadline=5))
    clock.advance(6)
    ((ingress, emission),) = loop.step()
    assert ingress == "i"
    assert isinstance(emission.error, DeadlineExceeded)
    assert loop.slots.num_held == 0


def test_joining_without_a_reservation_is_a_bug() -> None:
    loop, _, _ = decode_loop()
    with pytest.raises(InvariantViolation):
        loop.join(sequence("a", [1]))


@pytest.mark.parametrize(
    ("params", "output", "reason"),
    [
        (SamplingParams(max_tokens=3), [5, 6, 7], FinishReason.LENGTH),
        (SamplingParams(max_tokens=9), [5, EOS], FinishReason.STOP),
        (SamplingParams(max_tokens=9, ignore_eos=True), [5, EOS], None),
        (SamplingParams(max_tokens=9, stop_token_ids=(6,)), [5, 6], FinishReason.STOP),
        (SamplingParams(max_tokens=9, min_tokens=3), [5, EOS], None),
        (SamplingParams(max_tokens=2), [5, EOS], FinishReason.STOP),
        (SamplingParams(max_tokens=9), [5], None),
    ],
)
def test_finish_reason(
    params: SamplingParams, output: list[int], reason: FinishReason | None
) -> None:
    running = RunningSequence(sequence("a", [1]))
    running.state.sampling, running.state.output_ids = params, output
    running.set_end(eos_token_ids=(EOS,), row_capacity_tokens=64)
    assert running.finish_reason() == reason
    running.set_end(eos_token_ids=(), row_capacity_tokens=1 + len(output))
    assert running.finish_reason() is not None


def test_a_token_that_cannot_be_said_ends_its_sequence_in_either_loop() -> None:
    """A grammar that fails; the others go on, and no row stays held."""
    error = InvalidRequest("the grammar fails", code="grammar_failed")
    harness = Harness()
    prefill = harness.runner.prefill
    harness.runner.prefill = lambda *args: [  # type: ignore[method-assign]
        replace(t, error=error) if t else t for t in prefill(*args)
    ]
    harness.submit(sequence("first", [1, 2]))
    harness.step()
    assert harness.events.errors == {"first": error}
    assert harness.slots.num_held == 0
    harness.loop.check()

    loop, runner, _ = decode_loop(2)
    for name in ("bad", "good"):
        hand_off(loop, runner, sequence(name, [1, 2]))
    compute = runner.decode
    runner.decode = lambda rows: [  # type: ignore[method-assign]
        replace(token, error=error) if i == 0 else token for i, token in enumerate(compute(rows))
    ]
    outputs = {e.sequence_id: e for _, e in loop.step()}
    assert outputs["bad"].error is error
    assert outputs["bad"].token_ids == []
    assert outputs["bad"].first_index == 1
    assert len(outputs["good"].token_ids) == 1
    assert [s.sequence_id for s in loop.running] == ["good"]
    loop.check()
