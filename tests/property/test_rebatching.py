"""Random lives under every rebatching policy: nobody is lost, starved, changed or let out early."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.checkpoint.exits import NEVER, ExitCounters, ExitParams
from quadriga.clock import ManualClock
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import KVCacheExhausted
from quadriga.policies.baselines.exits import EagerExits, LazyExits, MajorityExits, NoExits
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.policies.rebatching import BatchDecision, ExitGroup, Range, Rebatcher, Waiting
from tests.fake_runner import EOS, FakeSegmentRunner, confidence_at, token_at
from tests.sequences import make_decode_loop, make_sequence, make_slots

ROW_TOKENS = 48
ENDS = {1: (8,), 2: (3, 8), 3: (2, 5, 8), 5: (1, 2, 4, 7, 8)}
MAX_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Life:
    """One sequence: when it comes and goes, and what it wants."""

    prompt: int
    max_tokens: int
    threshold: float
    max_depth: int
    sla_s: float
    arrival: int
    cancel: int | None
    returns: bool
    pause: int | None = None


lives = st.builds(
    Life,
    prompt=st.integers(1, 12),
    max_tokens=st.integers(1, 20),
    threshold=st.sampled_from([0.0, 0.1, 0.4, 0.7, 0.95, 0.999, NEVER]),
    max_depth=st.sampled_from([0, 0, 0, 1, 2, 4, 6, 8]),
    sla_s=st.sampled_from([0.0, 0.0, 1e-6, 0.004, 0.02, 0.1]),
    arrival=st.integers(0, 40),
    cancel=st.one_of(st.none(), st.none(), st.integers(0, 60)),
    returns=st.booleans(),
    pause=st.one_of(st.none(), st.integers(1, 60)),
)

Make = Callable[[SegmentCosts, ExitCounters], Rebatcher]
POLICIES: dict[str, Make] = {
    "drex": lambda costs, counters: DrexRebatcher(costs, counters=counters),
    "deterministic": lambda costs, counters: DrexRebatcher(
        costs, counters=counters, deterministic=True
    ),
    "eager": lambda costs, _: EagerExits(costs),
    "lazy": lambda costs, _: LazyExits(costs),
    "majority": lambda costs, _: MajorityExits(costs),
    "none": lambda costs, _: NoExits(costs),
}


class Audit:
    """Passes on what a policy decides, and holds it to the deadlines and to everybody's turn.

    Rows that wait at an exit go on before the front does once their deadline leaves no time for
    another pass from the front; whoever is overdue is passed over for deeper rows only. So between
    two passes from the front lie at most E · (E + 1) / 2 others, with E exits.
    """

    def __init__(self, policy: Rebatcher, runner: FakeSegmentRunner) -> None:
        self._policy = policy
        self.costs = policy.costs
        self._runner = runner
        self._is_grouped = not isinstance(policy, DrexRebatcher)
        self._last_front_s = 0.0
        self._since_front = 0
        self.longest_gap_s = 0.0

    @property
    def is_surveying(self) -> bool:
        return self._policy.is_surveying

    def choose(self, front: Waiting, waiting: Sequence[Waiting], now_s: float) -> Range:
        ran = self._policy.choose(front, waiting, now_s)
        for exit_index, rows in enumerate(waiting):
            if not rows.count:
                continue
            if self._is_grouped:
                assert ran.first, "a group under way waits for nobody"
            if rows.least_deadline_s < now_s:
                assert ran.first > exit_index, f"exit {exit_index} is overdue, {ran} comes first"
            if ran.first == 0:
                stage_s = self._runner.pass_s(exit_index + 1, exit_index + 2, rows.count)
                latest_s = rows.least_deadline_s - self._last_front_s - stage_s
                assert now_s <= latest_s + 1e-9, f"exit {exit_index} cannot wait for the front"
        exits = len(waiting)
        self._since_front = 0 if ran.first == 0 else self._since_front + 1
        assert self._since_front <= exits * (exits + 1) // 2, "the front starves"
        return ran

    def judge(self, group: ExitGroup, now_s: float) -> BatchDecision:
        assert len(group.confidences) == len(group.thresholds) == len(group.passed) > 0
        assert group.remaining.count == len(group.passed) - sum(group.passed)
        return self._policy.judge(group, now_s)

    def observe(
        self,
        ran: Range,
        count: int,
        num_tokens: int,
        seconds: float,
        passed: int | None,
        filled: int = 0,
    ) -> None:
        assert passed is None or 0 <= passed <= count
        assert filled >= 0 and (ran.stop > 1 or not filled)
        if ran.first == 0:
            self._last_front_s = seconds
        self._policy.observe(ran, count, num_tokens, seconds, passed, filled)

    def target_gap_s(self, running: int) -> float:
        gap_s = self._policy.target_gap_s(running)
        self.longest_gap_s = max(self.longest_gap_s, gap_s)
        return gap_s


class Replica:
    """A decode loop over the fake runner, and a count of the steps that each sequence waits."""

    def __init__(self, policy: str, num_rows: int, ends: tuple[int, ...], row_s: float) -> None:
        self.clock = ManualClock()
        self.counters = ExitCounters()
        self.runner = FakeSegmentRunner(
            num_rows, ROW_TOKENS, ends=ends, clock=self.clock, row_s=row_s
        )
        costs = SegmentCosts(len(ends), num_rows)
        for segment in range(len(ends)):
            for count in costs.knots:
                costs.set(segment, count, self.runner.pass_s(segment, segment + 1, count))
                costs.set(segment, count, 0.0, head=True)
        self.audit = Audit(POLICIES[policy](costs, self.counters), self.runner)
        self.loop = make_decode_loop(
            self.runner,
            make_slots(num_rows, ROW_TOKENS, 10**6),
            self.clock,
            eos_token_ids=(EOS,),
            rebatcher=self.audit,
            counters=self.counters,
        )
        self.waited: dict[str, int] = {}

    def join(self, state: SequenceState) -> bool:
        """Hand a sequence over, its KV beside it; False where there is no room."""
        try:
            slot = self.loop.reserve(state.sequence_id, state.max_total_tokens)
        except KVCacheExhausted:
            return False
        known = state.prompt_ids + state.output_ids
        self.runner.write_kv(slot.row, 0, 0, known[:-1])
        self.loop.join(state)
        return True

    def step(self) -> list[str]:
        """One step; the names of those that finished."""
        before = {s.sequence_id: len(s.output_ids) for s in self.loop.running}
        finished = []
        for _, emission in self.loop.step():
            assert emission.first_index == before[emission.sequence_id], "out of order"
            assert len(emission.token_ids) == len(emission.exit_layers) == 1
            self.waited[emission.sequence_id] = 0
            if emission.finish is not None:
                finished.append(emission.sequence_id)
        self.loop.check()
        for name in before:
            self.waited[name] = self.waited.get(name, 0) + 1
            assert self.waited[name] <= self.longest_wait, f"{name} starves"
        return finished

    @property
    def longest_wait(self) -> int:
        """Steps between two tokens of a sequence that no policy may go beyond.

        At every exit a row waits until its deadline at the longest, through passes of `base_s` or
        more; then every other place may come once before it.
        """
        exits = len(self.runner.segment_ends) - 1
        gap_s = max(self.audit.longest_gap_s, 0.1)
        return math.ceil(gap_s / self.runner.base_s) + (exits + 1) ** 2 + 1


def new_state(number: int, life: Life) -> SequenceState:
    prompt = [number + 1] * life.prompt
    return make_sequence(
        f"s{number}",
        prompt,
        SamplingParams(max_tokens=life.max_tokens),
        exits=ExitParams(life.threshold, max_depth=life.max_depth, sla_tbt_s=life.sla_s),
        output_ids=[1 + number],
        exit_layers=[8],
    )


def limit_of(life: Life, ends: Sequence[int]) -> int:
    within = [k for k in ends if not life.max_depth or k <= life.max_depth]
    return max(within, default=ends[0])


def alone(number: int, life: Life, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens and depths of a sequence that has the machine to itself."""
    state = new_state(number, life)
    while len(state.output_ids) < max(2, life.max_tokens) and state.output_ids[-1] != EOS:
        known = state.prompt_ids + state.output_ids
        if len(known) >= ROW_TOKENS:
            break
        for depth in ends:
            passes = life.threshold < NEVER and confidence_at(known, depth) >= life.threshold
            if passes or depth == limit_of(life, ends):
                break
        state.output_ids.append(token_at(known, depth))
        state.exit_layers.append(depth)
    return state.output_ids, state.exit_layers


def check_tokens(
    state: SequenceState, life: Life, ends: Sequence[int], *, may_be_below: bool
) -> None:
    """Every token is the one of its exit, and left there with reason."""
    for i in range(1, len(state.output_ids)):
        known, depth = state.prompt_ids + state.output_ids[:i], state.exit_layers[i]
        assert state.output_ids[i] == token_at(known, depth)
        assert depth in ends and depth <= limit_of(life, ends)
        if depth < limit_of(life, ends) and not may_be_below:
            assert life.threshold < NEVER and confidence_at(known, depth) >= life.threshold


@pytest.mark.parametrize("policy", list(POLICIES))
@settings(max_examples=40)
@given(
    lives=st.lists(lives, min_size=1, max_size=20),
    num_rows=st.integers(1, 9),
    segments=st.sampled_from(list(ENDS)),
    row_s=st.sampled_from([0.0, 1e-4, 1e-3, 1e-2]),
)
def test_random_lives(
    policy: str, lives: list[Life], num_rows: int, segments: int, row_s: float
) -> None:
    ends = ENDS[segments]
    replica = Replica(policy, num_rows, ends, row_s)
    states = [new_state(i, life) for i, life in enumerate(lives)]
    waiting: list[int] = []
    cancelled: set[int] = set()
    finished: set[str] = set()
    for step in range(MAX_STEPS):
        for number, life in enumerate(lives):
            if life.arrival == step:
                waiting.append(number)
            if life.pause == step:
                replica.loop.preemption.pause(f"s{number}")
                replica.loop.check()
            if life.cancel == step:
                if number in waiting:
                    waiting.remove(number)
                was_running = replica.loop.leave(f"s{number}") is not None
                replica.loop.check()
                replica.waited.pop(f"s{number}", None)
                if was_running and life.returns:
                    waiting.append(number)  # as after a move away and back
                else:
                    cancelled.add(number)
        waiting = [n for n in waiting if n in cancelled or not replica.join(states[n])]
        waiting = [n for n in waiting if n not in cancelled]
        finished.update(replica.step())
        if step > 60 and not waiting and not replica.loop.has_work:
            break
    else:
        pytest.fail("a sequence starved")
    assert replica.loop.slots.num_held == 0 and not replica.runner.attached
    assert replica.loop.num_waiting_at_exits == [0] * (segments - 1)
    grouped = policy in ("eager", "majority")
    for number, (state, life) in enumerate(zip(states, lives, strict=True)):
        check_tokens(state, life, ends, may_be_below=grouped)
        if policy == "deterministic":
            tokens, depths = alone(number, life, ends)
            assert state.output_ids == tokens[: len(state.output_ids)]
            assert state.exit_layers == depths[: len(state.exit_layers)]
        if number not in cancelled:
            assert state.sequence_id in finished, "a sequence was lost"
            is_whole = len(state.output_ids) >= life.max_tokens or state.output_ids[-1] == EOS
            assert is_whole or state.num_tokens == ROW_TOKENS
    check_counters(policy, replica.counters, states, replica.runner)


def check_counters(
    policy: str, counters: ExitCounters, states: list[SequenceState], runner: FakeSegmentRunner
) -> None:
    emitted = sum(len(s.output_ids) - 1 for s in states)
    assert sum(counters.tokens.values()) == emitted
    if policy not in ("eager", "majority"):
        assert counters.involuntary_exits == 0
    if policy in ("deterministic", "eager", "majority"):
        assert counters.explored == 0
    if policy == "deterministic":
        assert counters.involuntary_stays == 0
    if policy == "none" and all(s.exits.max_depth == 0 for s in states):
        assert set(counters.tokens) <= {runner.num_layers}


def test_limits_below_the_threshold_are_breaches_not_involuntary() -> None:
    """A row at the end of its own depth leaves there under every policy: no group made it."""
    for policy in POLICIES:
        replica = Replica(policy, 4, ENDS[3], row_s=1e-3)
        lives = [Life(4, 12, 0.999, 2, 0.0, 0, None, False) for _ in range(4)]
        states = [new_state(i, life) for i, life in enumerate(lives)]
        for state in states:
            assert replica.join(state)
        while replica.loop.has_work:
            replica.step()
        tokens = sum(len(s.output_ids) - 1 for s in states)
        assert replica.counters.tokens == {2: tokens}
        assert replica.counters.breaches == tokens
        assert replica.counters.involuntary_exits == replica.counters.involuntary_stays == 0


def test_deadlines_hold_where_they_can() -> None:
    """With time enough for a front pass and a stage each, nobody is late at all."""
    replica = Replica("deterministic", 8, ENDS[2], row_s=1e-3)
    sla_s = 0.06
    longest_s = replica.runner.pass_s(0, 1, 8)
    lives = [Life(4, 20, 0.5, 0, sla_s, 0, None, False) for _ in range(8)]
    states = [new_state(i, life) for i, life in enumerate(lives)]
    for state in states:
        assert replica.join(state)
    last_s = {s.sequence_id: 0.0 for s in states}
    gaps = []
    while replica.loop.has_work:
        known = {s.sequence_id: len(s.output_ids) for s in states}
        replica.step()
        for state in states:
            if len(state.output_ids) > known[state.sequence_id]:
                gaps.append(replica.clock.now_s() - last_s[state.sequence_id])
                last_s[state.sequence_id] = replica.clock.now_s()
    assert max(gaps) <= sla_s + longest_s
    assert replica.counters.flushes > 10, "some did wait"
