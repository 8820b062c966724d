"""A prefill loop computes a lost sequence anew: all but its newest token, and says nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quadriga.core.request import SequenceState
from quadriga.errors import InvariantViolation, Overloaded
from quadriga.scheduling.transfer.rebuild import chunk_of, num_prefill_tokens
from tests.fake_runner import expected_output
from tests.unit.scheduling.test_loops import Harness, sequence

PROMPT = [1, 2, 3, 4, 5]


def lost(name: str, num_output: int) -> SequenceState:
    state = sequence(name, list(PROMPT), max_tokens=30)
    output = expected_output(PROMPT, num_output)
    return replace(state, output_ids=output, exit_layers=[8] * len(output))


def test_every_position_but_the_newest_token_is_computed() -> None:
    h = Harness(chunk=4)
    state = lost("a", 7)
    output = list(state.output_ids)
    h.submit(state)
    assert h.loop.waiting_tokens == 11
    for _ in range(3):
        assert h.events.rebuilt == []
        h.step()
    assert h.events.rebuilt == ["a"]
    assert h.events.done == {}, "there is no first token"
    assert state.output_ids == output, "and no token at all"
    slot = h.slots.get("a")
    assert slot is not None
    assert h.runner.kv[slot.row] == (PROMPT + output)[:-1]
    assert {(stop, first) for _, first, _, _, stop in h.events.kv if first == 0} == {
        (4, 0),
        (8, 0),
        (11, 0),
    }
    h.loop.check()
    assert h.loop.used_tokens == 11
    assert not h.loop.has_work
    assert h.loop.release("a")
    assert h.slots.num_held == 0


def test_a_sequence_that_only_said_its_first_token() -> None:
    h = Harness(chunk=8)
    state = lost("a", 1)
    h.submit(state)
    h.step()
    assert h.events.rebuilt == ["a"]
    assert h.runner.kv[0] == PROMPT


def test_it_shares_a_pass_with_prompts() -> None:
    h = Harness(chunk=32)
    h.submit(lost("a", 4))
    other = sequence("b", [9, 8, 7])
    h.submit(other)
    h.step()
    assert h.events.rebuilt == ["a"]
    assert h.events.done == {"b": None}
    assert other.output_ids == expected_output([9, 8, 7], 1)


def test_the_queue_counts_what_will_be_computed() -> None:
    h = Harness(queued_tokens=100)
    for i in range(3):
        h.submit(lost(f"s{i}", 26))
    assert h.loop.waiting_tokens == 90
    with pytest.raises(Overloaded, match="90 of 100 tokens"):
        h.submit(lost("late", 26))


def test_chunks_carry_the_depths_of_the_positions_they_cover() -> None:
    state = replace(sequence("a", [1, 2, 3]), output_ids=[10, 11, 12, 13], exit_layers=[8, 2, 5, 8])
    assert num_prefill_tokens(state) == 6
    whole = chunk_of(state, row=0, start=0, stop=6, num_layers=8)
    assert whole.token_ids == [1, 2, 3, 10, 11, 12]
    assert whole.depths == [8, 8, 8, 2, 5, 8], "token i + 1 was sampled by running token i"
    assert not whole.is_last
    for cut in range(1, 6):
        parts = [
            chunk_of(state, row=0, start=a, stop=b, num_layers=8) for a, b in ((0, cut), (cut, 6))
        ]
        assert [t for p in parts for t in p.token_ids] == whole.token_ids
        assert [d for p in parts for d in p.depths or ()] == whole.depths


def test_a_prompt_has_no_depths() -> None:
    state = sequence("a", [1, 2, 3])
    chunk = chunk_of(state, row=0, start=1, stop=3, num_layers=8)
    assert (chunk.token_ids, chunk.depths, chunk.is_last) == ([2, 3], None, True)


def test_a_record_with_gaps_is_refused_at_the_door() -> None:
    h = Harness()
    with pytest.raises(InvariantViolation, match="4 output tokens and the depths of 3"):
        h.submit(replace(lost("a", 4), exit_layers=[8] * 3))
    assert h.loop.num_waiting == 0
