"""A sequence that moves to another replica keeps its row, emits nothing, and can go on."""

from __future__ import annotations

import pytest

from quadriga.checkpoint.exits import ExitCounters, ExitParams
from quadriga.clock import ManualClock
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import DeadlineExceeded, MigrationFailed
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.scheduling.sequence import SequenceStatus
from quadriga.scheduling.transfer.sequence_export import PreCopy, SequenceRemainder
from tests.fake_runner import FakeSegmentRunner
from tests.sequences import make_decode_loop, make_sequence, make_slots

ENDS = (2, 5, 8)


class Replica:
    """A decode loop with exits over a fake runner."""

    def __init__(self, rows: int = 4) -> None:
        self.clock = ManualClock()
        self.runner = FakeSegmentRunner(rows, ends=ENDS, clock=self.clock)
        counters = ExitCounters()
        self.loop = make_decode_loop(
            self.runner,
            make_slots(rows, 256, rows * 256),
            self.clock,
            rebatcher=DrexRebatcher(
                SegmentCosts(len(ENDS), rows), counters=counters, deterministic=True
            ),
            counters=counters,
        )

    def take(self, name: str, *, deadline_unix_s: float = 1e18) -> SequenceState:
        state = make_sequence(
            name,
            [7 + len(name), 9, 11],
            SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True),
            deadline_unix_s=deadline_unix_s,
            exits=ExitParams(threshold=0.5),
            output_ids=[3],
            exit_layers=[8],
        )
        slot = self.loop.reserve(name, state.max_total_tokens, state.num_tokens)
        self.runner.write_kv(slot.row, 0, 0, list(state.prompt_ids))
        self.loop.join(state)
        return state

    def begin_cutover(self, name: str, depth: int | None = None) -> SequenceRemainder:
        books = PreCopy(depth)
        found = self.loop.export.begin_cutover(name, books)
        while not isinstance(found, SequenceRemainder):
            assert found is not None
            found = self.loop.export.begin_cutover(name, books)
        return found


def test_a_moving_sequence_emits_nothing_and_keeps_its_row() -> None:
    replica = Replica()
    loop = replica.loop
    one, other = replica.take("one"), replica.take("other")
    for _ in range(6):
        loop.step()
    rest = replica.begin_cutover("one")
    said = list(one.output_ids)
    num_other = len(other.output_ids)
    for _ in range(12):
        assert all(emission.sequence_id == "other" for _, emission in loop.step())
        loop.check()
    assert one.output_ids == said
    assert len(other.output_ids) > num_other + 3
    assert rest.state.output_ids == said
    assert rest.state.output_ids is not one.output_ids, "nobody changes what is sent"
    assert {s.sequence_id for s in loop.running} == {"one", "other"}, "it is still held"
    assert loop.num_running == 1
    assert set(loop.slots.owners) == {"one", "other"}
    assert loop.export.abort_cutover("one", epoch=7)
    assert not loop.export.abort_cutover("one")
    assert one.epoch == 7
    while loop.has_work:
        loop.step()
    assert len(one.output_ids) == 50
    assert loop.slots.owners == []


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_moving_sequence_may_be_cancelled(is_paused: bool) -> None:
    replica = Replica()
    state = replica.take("one")
    replica.loop.step()
    assert not is_paused or replica.loop.preemption.pause("one")
    replica.begin_cutover("one")
    assert replica.loop.leave("one") is state
    assert not replica.loop.has_work
    assert replica.loop.slots.owners == replica.loop.running == []
    assert not replica.loop.export.abort_cutover("one")
    replica.take("one")


def test_a_sequence_does_not_expire_while_it_moves_but_right_afterwards() -> None:
    """Who owns it is being settled: an error of ours could end what runs elsewhere."""
    replica = Replica()
    loop = replica.loop
    replica.take("one", deadline_unix_s=replica.clock.unix_s() + 10.0)
    replica.take("other")
    loop.step()
    replica.begin_cutover("one")
    replica.clock.advance(60.0)
    for _ in range(3):
        assert all(e.error is None for _, e in loop.step())
    loop.export.abort_cutover("one")
    errors = [e.error for _, e in loop.step() if e.sequence_id == "one"]
    assert len(errors) == 1
    assert isinstance(errors[0], DeadlineExceeded)
    assert loop.slots.owners == ["other"]


def test_only_sequences_that_are_here_are_read() -> None:
    replica = Replica()
    export = replica.loop.export
    assert export.held("one") is None
    assert export.read("one", PreCopy(), 1) is None
    assert export.begin_cutover("one", PreCopy()) is None
    replica.take("one")
    assert export.held("one") is not None
    assert export.read("one", PreCopy(), 1) is not None
    replica.loop.leave("one")
    assert export.read("one", PreCopy(), 1) is None


def test_a_paused_sequence_moves_out_of_host_memory() -> None:
    replica = Replica()
    loop, export = replica.loop, replica.loop.export
    state, other = replica.take("one"), replica.take("other")
    for _ in range(6):
        loop.step()
    while loop.batch.sequences["one"].status is not SequenceStatus.AT_EXIT:
        loop.step()  # until its token waits at an exit
    assert loop.preemption.pause("one")
    assert export.held("one") == (state, 8)
    rest = replica.begin_cutover("one")
    assert not loop.is_paused("one")
    assert rest.resume.waited_at is not None
    assert rest.resume.rest == rest.resume.waited_at + 1, "where the runner left it"
    assert rest.resume.extents[0].num_tokens == state.num_tokens
    said = list(state.output_ids)
    for _ in range(5):
        loop.step()
        loop.check()
    assert state.output_ids == said, "nobody takes it up again"
    assert export.abort_cutover("one")
    assert loop.is_paused("one")
    while loop.has_work:
        loop.step()
    assert (len(state.output_ids), len(other.output_ids)) == (50, 50)
    assert loop.slots.owners == []


def test_a_paused_sequence_whose_move_fails_still_has_its_deadline() -> None:
    """Another's is over meanwhile, after which the first that comes is looked for anew."""
    replica = Replica()
    loop, now_unix_s = replica.loop, replica.clock.unix_s()
    replica.take("one", deadline_unix_s=now_unix_s + 60.0)
    replica.take("other", deadline_unix_s=now_unix_s + 5.0)
    loop.step()
    assert loop.preemption.pause("one")
    replica.begin_cutover("one")
    replica.clock.advance(6.0)
    assert any(e.error is not None for _, e in loop.step())
    assert loop.export.abort_cutover("one")
    assert loop.batch.first_deadline_unix_s == now_unix_s + 60.0


def test_a_token_that_waits_behind_layers_that_do_not_go_is_run_again() -> None:
    replica = Replica()
    replica.take("one")
    while not replica.loop.num_waiting_at_exits[1]:
        replica.loop.step()  # until its token waits behind five layers
    for depth, waited_at in ((8, 1), (5, 1), (2, None)):
        rest = replica.begin_cutover("one", depth)
        assert rest.resume.extents[-1].stop_layer == depth
        assert rest.resume.waited_at == waited_at
        assert all(span.stop_layer <= depth for span, _ in rest.reading.parts)
        assert replica.loop.export.abort_cutover("one")


def test_a_change_of_depth_ends_a_copy_under_way() -> None:
    replica = Replica()
    replica.take("one")
    books = PreCopy()
    assert replica.loop.export.read("one", books, 1) is not None
    replica.loop.batch.num_depth_changes += 1
    for look in (replica.loop.export.begin_cutover, lambda n, b: replica.loop.export.read(n, b, 1)):
        with pytest.raises(MigrationFailed, match="while it was copied"):
            look("one", books)
    assert isinstance(replica.begin_cutover("one"), SequenceRemainder), "and another one begins"


def test_a_token_that_went_deep_costs_another_piece_before_the_cutover() -> None:
    replica = Replica()
    state = replica.take("one")
    books = PreCopy()
    while not (reading := replica.loop.export.read("one", books, 1)) or reading.parts:
        assert reading is not None
    deep = next(
        i for i in range(200) if replica.loop.step() is not None and len(state.output_ids) > 8
    )
    assert deep > 5
    found = replica.loop.export.begin_cutover("one", books)
    assert not isinstance(found, SequenceRemainder), "more than may be left came about since"
    assert found is not None
    assert found.parts
    assert isinstance(replica.begin_cutover("one"), SequenceRemainder)
