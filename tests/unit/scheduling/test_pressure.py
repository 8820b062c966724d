"""Thresholds fall under pressure, within what each request allows, and not otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.checkpoint.exits import ExitCounters, ExitParams
from quadriga.clock import ManualClock
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.policies.slot_reservation import WINDOW
from quadriga.scheduling.exits.pressure import (
    LOWEST_SHARE,
    gap_pressure,
    has_budget_left,
    memory_pressure,
)
from tests.fake_depth_runner import FakeDepthRunner
from tests.fake_runner import FakeSegmentRunner, confidence_at
from tests.sequences import make_decode_loop, make_sequence, make_slots

ENDS = (2, 5, 8)
THRESHOLD = 0.8
CAPACITY = 320  # newcomers are let in up to 288


class Replica:
    """A decode loop that tests every exit for every token."""

    def __init__(self, *, rows: int = 8) -> None:
        self.clock, self.counters = ManualClock(), ExitCounters()
        self.runner = self.make_runner(rows)
        costs = SegmentCosts(len(self.runner.segment_ends), rows)
        self.loop = make_decode_loop(
            self.runner,
            make_slots(rows, 160, CAPACITY, reservation="used"),
            self.clock,
            rebatcher=DrexRebatcher(costs, counters=self.counters, deterministic=True),
            counters=self.counters,
        )
        for _ in range(WINDOW):
            self.loop.answers.ended(1)  # newcomers are promised hardly more than they have

    def make_runner(self, rows: int) -> FakeSegmentRunner:
        return FakeSegmentRunner(rows, 160, ends=ENDS, clock=self.clock)

    def take(self, number: int, exits: ExitParams, *, max_tokens: int = 60) -> SequenceState:
        prompt = [number + 3] * 15
        state = make_sequence(
            f"s{number}",
            prompt,
            SamplingParams(max_tokens),
            exits=exits,
            output_ids=[1 + number],
            exit_layers=[8],
        )
        slot = self.loop.reserve(state.sequence_id, state.max_total_tokens, 16)
        self.runner.write_kv(slot.row, 0, 0, list(prompt))
        self.loop.join(state)
        return state

    def run(self) -> int:
        """Steps until all have ended; returns how often one was paused."""
        told: dict[str, int] = {}
        while self.loop.has_work:
            for _, emission in self.loop.step():
                if emission.progress is not None:
                    told[emission.sequence_id] = emission.progress["num_lowered"]
            self.loop.check()
        self.told = told
        return self.loop.preemption.num_pauses


def num_below(state: SequenceState, ends: Sequence[int] = ENDS) -> int:
    """Tokens that left before the last exit with less confidence than the threshold."""
    below = 0
    for i in range(1, len(state.output_ids)):
        depth = state.exit_layers[i]
        sure = confidence_at(state.prompt_ids + state.output_ids[:i], depth)
        assert depth == ends[-1] or sure >= LOWEST_SHARE * THRESHOLD
        below += depth < ends[-1] and sure < THRESHOLD
    return below


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.3, 1.0])
def test_a_request_whose_tokens_come_late_spends_its_budget_and_no_more(budget: float) -> None:
    replica = Replica()
    late = ExitParams(THRESHOLD, "bounded", 0, 1e-6, budget)
    states = [replica.take(i, late) for i in range(4)]
    replica.run()
    for state in states:
        assert num_below(state) == state.num_lowered <= budget * len(state.output_ids)
        assert replica.told[state.sequence_id] == state.num_lowered
    spent = sum(state.num_lowered for state in states)
    assert replica.counters.lowered == spent
    assert (spent > 0) is (budget > 0)
    assert replica.counters.involuntary_exits == replica.counters.breaches == 0


def test_prompts_between_its_tokens_make_them_late() -> None:
    """As on a mixed replica: the steps alone would be fast enough."""
    replica = Replica()
    state = replica.take(0, ExitParams(THRESHOLD, "bounded", 0, 0.1, 1.0))
    while replica.loop.has_work:
        replica.loop.step()
        replica.clock.advance(0.3)
    assert state.num_lowered > 0


def test_without_pressure_no_threshold_falls() -> None:
    replica = Replica()
    state = replica.take(0, ExitParams(THRESHOLD, "bounded", 0, 60.0, 1.0))
    assert replica.run() == 0
    assert num_below(state) == state.num_lowered == replica.counters.lowered == 0


def test_thresholds_fall_before_a_sequence_is_paused() -> None:
    """Four sequences outgrow their promises: together they need more memory than there is."""
    replica = Replica()
    allows = ExitParams(THRESHOLD, "bounded", 0, 0.0, 0.5)
    states = [replica.take(i, allows, max_tokens=100) for i in range(4)]
    for _ in range(10_000):
        if replica.counters.lowered or replica.loop.num_paused:
            break
        replica.loop.step()
    assert replica.counters.lowered and not replica.loop.num_paused
    assert replica.run() > 0, "afterwards memory was short all the same"
    for state in states:
        assert num_below(state) == state.num_lowered <= 0.5 * len(state.output_ids)


def test_those_beside_them_keep_their_thresholds() -> None:
    replica = Replica()
    allows = replica.take(0, ExitParams(THRESHOLD, "bounded", 0, 1e-6, 1.0))
    others = [
        replica.take(1, ExitParams(THRESHOLD, "bounded", 0, 1e-6)),
        replica.take(2, ExitParams(THRESHOLD, "strict", 0, 1e-6)),
    ]
    replica.run()
    assert num_below(allows) == allows.num_lowered > 0
    assert [num_below(other) for other in others] == [0, 0]
    assert [other.num_lowered for other in others] == [0, 0]


def test_what_was_spent_elsewhere_counts() -> None:
    """It comes from another replica, where it spent more than it may have by now."""
    replica = Replica()
    state = replica.take(0, ExitParams(THRESHOLD, "bounded", 0, 1e-6, 0.2), max_tokens=40)
    state.num_lowered = 20
    replica.run()
    assert num_below(state) == 0 and state.num_lowered == 20


@given(st.floats(0, 1), st.integers(1, 300))
def test_a_budget_is_kept_at_every_token(budget: float, num_tokens: int) -> None:
    lowered = 0
    for count in range(num_tokens):
        lowered += has_budget_left(budget, lowered, count)
        assert lowered <= budget * (count + 1)
    assert lowered >= int(budget * num_tokens) - 1, "it can be spent"


def test_memory_presses_from_where_newcomers_wait_until_somebody_is_paused() -> None:
    slots = make_slots(8, 160, CAPACITY, reservation="used")
    assert memory_pressure(slots, 0) == 0.0
    assert memory_pressure(slots, 1) == 1.0
    for name in "ab":
        slots.reserve(name, 144, 143)
    assert memory_pressure(slots, 0) == 0.0, "288 of 320 are promised"
    slots.reserve("c", 16, 15)
    assert memory_pressure(slots, 0) == pytest.approx(0.5)
    longest = make_slots(2, 160, CAPACITY)
    longest.reserve("a", 160)
    longest.reserve("b", 160)
    assert memory_pressure(longest, 0) == 0.0, "nobody can outgrow that"


def test_tokens_press_that_come_nearly_too_late() -> None:
    assert gap_pressure(0.05, 0.0) == 0.0, "no limit was named"
    assert gap_pressure(0.007, 0.01) == 0.0
    assert gap_pressure(0.009, 0.01) == pytest.approx(0.5)
    assert gap_pressure(0.03, 0.01) == 1.0


def test_a_promise_ends_where_its_row_cannot_be_filled() -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("no memory")

    loop = Replica().loop
    loop.prefixes = SimpleNamespace(touch=lambda keys: None, fill=fail)  # type: ignore[assignment]
    slot = loop.reserve("s", 20, 10, block_keys=[b"k"])
    with pytest.raises(RuntimeError):
        loop.fill("s", slot.row, [b"k"])
    assert not loop.batch.sequences and loop.slots.get("s") is None


class Shallow(Replica):
    """The same, with the first two segments loaded."""

    def make_runner(self, rows: int) -> FakeSegmentRunner:
        return FakeDepthRunner(rows, ENDS[1], clock=self.clock)


def test_tokens_of_a_row_that_lacks_layers_spend_the_budget_and_are_no_breaches() -> None:
    replica = Shallow(rows=1)
    state = replica.take(10, ExitParams(THRESHOLD, "bounded", 0, 1e-6, 1.0))
    replica.loop.take_depth(ENDS[-1])
    replica.run()
    assert state.num_breaches == 1, "of so little confidence that no budget allows it"
