"""Replicas that gain and lose layers at any moment: nobody is lost, let out early, or starved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.checkpoint.exits import NEVER, ExitCounters, ExitParams, ExitPolicy
from quadriga.clock import ManualClock
from quadriga.core.output import EngineOutput
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import KVCacheExhausted
from quadriga.policies.baselines.exits import LazyExits, NoExits
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.policies.rebatching import Rebatcher
from tests.fake_depth_runner import ALL_ENDS, FakeDepthRunner
from tests.fake_runner import EOS, confidence_at, token_at
from tests.sequences import make_decode_loop, make_sequence, make_slots

NUM_ROWS = 6
FULL = ALL_ENDS[-1]
Make = Callable[[SegmentCosts, ExitCounters], Rebatcher]
POLICIES: dict[str, Make] = {
    "drex": lambda costs, counters: DrexRebatcher(costs, counters=counters),
    "deterministic": lambda costs, counters: DrexRebatcher(
        costs, counters=counters, deterministic=True
    ),
    "lazy": lambda costs, _: LazyExits(costs),
    "none": lambda costs, _: NoExits(costs),
}


@dataclass(frozen=True, slots=True)
class Life:
    """One sequence: when it comes, what it wants, and what happens to it."""

    prompt: int
    max_tokens: int
    threshold: float
    policy: ExitPolicy
    max_depth: int
    arrival: int
    cancel: int | None
    pause: int | None


lives = st.builds(
    Life,
    prompt=st.integers(1, 100),
    max_tokens=st.integers(2, 20),
    threshold=st.sampled_from([0.0, 0.1, 0.4, 0.7, 0.95, NEVER]),
    policy=st.sampled_from(["bounded", "strict"]),
    max_depth=st.sampled_from([0, 0, 0, 2, 5]),
    arrival=st.integers(0, 40),
    cancel=st.one_of(st.none(), st.none(), st.integers(0, 60)),
    pause=st.one_of(st.none(), st.integers(1, 60)),
)


class Replica:
    """A decode loop whose depth changes, and what every token was let out with."""

    def __init__(self, policy: str, depth: int, *, reservation: str = "longest") -> None:
        self.clock = ManualClock()
        self.counters = ExitCounters()
        self.runner = FakeDepthRunner(NUM_ROWS, depth, clock=self.clock)
        costs = SegmentCosts(len(self.runner.segment_ends), NUM_ROWS)
        self.slots = make_slots(
            NUM_ROWS,
            256,
            self.runner.kv_capacity_tokens,
            reservation="used" if reservation == "used" else "longest",
        )
        self.loop = make_decode_loop(
            self.runner,
            self.slots,
            self.clock,
            eos_token_ids=(EOS,),
            rebatcher=POLICIES[policy](costs, self.counters),
            counters=self.counters,
            is_partial=depth < FULL,
        )
        self.allowed: dict[tuple[str, int], set[int]] = {}  # token → how deep its row could go then
        self.last_depth: dict[str, int] = {}  # also of one whose row is paused away
        self.finished: set[str] = set()

    def join(self, state: SequenceState) -> bool:
        try:
            slot = self.loop.reserve(
                state.sequence_id, state.max_total_tokens, state.num_tokens, state.priority
            )
        except KVCacheExhausted:
            return False
        self.runner.write_kv(slot.row, 0, 0, (state.prompt_ids + state.output_ids)[:-1])
        self.loop.join(state)
        return True

    def step(self) -> list[EngineOutput]:
        depth_of = self.depths()
        emissions = [e for _, e in self.loop.step()]
        self.note(emissions, depth_of)
        return emissions

    def depths(self) -> dict[str, int]:
        """How deep each sequence with a row may go."""
        return {s.sequence_id: self.runner.depth_of(r) for r, s in self.runner.attached.items()}

    def note(self, emissions: list[EngineOutput], depth_of: dict[str, int]) -> None:
        """Remember what a step or a change let out; in it a debt may have been paid, or come."""
        now = self.depths()
        for e in emissions:
            seen = {
                d[e.sequence_id] for d in (self.last_depth, depth_of, now) if e.sequence_id in d
            }
            self.allowed[e.sequence_id, e.first_index] = seen | {self.runner.num_layers}
            if e.finish is not None:
                self.finished.add(e.sequence_id)
        self.last_depth |= depth_of | now
        self.loop.check()

    def go(self, depth: int) -> bool:
        """Change the depth, if nobody is in the way."""
        if depth == self.runner.num_layers:
            return True
        if depth > self.runner.num_layers:
            self.loop.take_depth(depth)
        else:
            before = self.runner.num_layers
            depth_of = self.depths()
            shrunk = self.loop.drop_to(depth)
            if shrunk.blocked_by:
                assert self.runner.num_layers == before and not shrunk.emissions
                return False
            self.note([e for _, e in shrunk.emissions], depth_of)
        assert self.slots.kv_capacity_tokens == self.runner.kv_capacity_tokens
        self.loop.check()
        return True


def new_state(number: int, life: Life) -> SequenceState:
    return make_sequence(
        f"s{number}",
        [number + 1] * life.prompt,
        SamplingParams(max_tokens=life.max_tokens),
        exits=ExitParams(life.threshold, life.policy, life.max_depth),
        output_ids=[1 + number],
        exit_layers=[FULL],
        priority=number % 2,
    )


def check_tokens(state: SequenceState, life: Life, replica: Replica) -> int:
    """Every token is that of its exit and left there with reason; count the breaches."""
    breaches = 0
    for i in range(1, len(state.output_ids)):
        known, depth = state.prompt_ids + state.output_ids[:i], state.exit_layers[i]
        assert state.output_ids[i] == token_at(known, depth)
        if confidence_at(known, depth) >= life.threshold and life.threshold < NEVER:
            continue
        if depth == FULL:
            continue
        own = max((k for k in ALL_ENDS if k <= life.max_depth), default=FULL)
        if depth == own:  # the request's own limit
            breaches += life.threshold < NEVER
            continue
        assert life.policy == "bounded", "a strict token left below its threshold"
        assert depth in replica.allowed[state.sequence_id, i], "left below a depth that was there"
        breaches += life.threshold < NEVER
    return breaches


@pytest.mark.parametrize("policy", list(POLICIES))
@given(
    todo=st.lists(lives, min_size=1, max_size=9),
    start=st.sampled_from(ALL_ENDS),
    changes=st.dictionaries(st.integers(0, 80), st.sampled_from(ALL_ENDS), max_size=12),
    reservation=st.sampled_from(["longest", "used"]),
)
@settings(max_examples=60)
def test_any_life(
    policy: str, todo: list[Life], start: int, changes: dict[int, int], reservation: str
) -> None:
    replica = Replica(policy, start, reservation=reservation)
    loop = replica.loop
    states = {i: new_state(i, life) for i, life in enumerate(todo)}
    waiting, finished = dict(states), replica.finished
    cancelled: set[str] = set()
    for step in range(4000):
        for i in [i for i in waiting if todo[i].arrival <= step]:
            if replica.join(waiting[i]):
                del waiting[i]
        for i, life in enumerate(todo):
            name, here = f"s{i}", i not in waiting and f"s{i}" not in finished | cancelled
            if here and life.cancel == step:
                loop.leave(name)
                cancelled.add(name)
            elif here and life.pause == step:
                loop.preemption.pause(name)
        if step in changes:
            replica.go(changes[step])
        replica.step()
        if not loop.has_work and step > 80:
            parked = {s.sequence_id for s in loop.depth.needs_deeper}
            held = {s.sequence_id for s in loop.running}
            assert parked == {n for n in held if not loop.is_paused(n)}, "idle, and not for depth"
            if held or waiting:
                assert not held or replica.runner.num_layers < FULL
                replica.go(FULL)
            else:
                break
    else:
        raise AssertionError("somebody never ended")
    assert finished | cancelled == {f"s{i}" for i in states}
    breaches = sum(check_tokens(states[i], todo[i], replica) for i in states)
    assert replica.counters.breaches == breaches
    assert sum(state.num_breaches for state in states.values()) == breaches
    assert replica.counters.involuntary_exits == 0
    assert replica.slots.num_held == replica.slots.reserved_tokens == 0
    assert not replica.runner.attached and not replica.runner.owed


def test_hundreds_of_changes_leave_nothing_behind() -> None:
    replica = Replica("drex", 2)
    life = Life(20, 12, 0.5, "bounded", 0, 0, None, None)
    number = 0
    for turn in range(700):
        while replica.join(new_state(number, life)):
            number += 1
        replica.go(ALL_ENDS[turn * 7 % 3])
        replica.step()
    while replica.loop.has_work:
        replica.step()
    assert len(replica.finished) == number > 100
    assert replica.loop.batch.num_depth_changes >= 600
    assert replica.loop.depth.num_repayments > 50
    assert not replica.loop.batch.sequences and replica.slots.num_held == 0
