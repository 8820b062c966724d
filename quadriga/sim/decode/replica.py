"""A decode replica whose steps are counted, not made.

Between two events nothing joins or leaves, every sequence gains one token a step, and so each
step takes a little longer than the one before: k steps are a sum in closed form. An event is a
sequence's last token, a full memory, or the first step boundary after someone asked to join or
leave. A sequence's size is its base plus the steps its replica has made.

Which sequence is preempted, and which comes back first, is decided by the cluster's own code.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from quadriga.core.forecast import LengthPrediction
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import InvariantViolation
from quadriga.policies.slot_reservation import AnswerLengths
from quadriga.scheduling.preemption import choose_return, choose_victim, is_overdue
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.slots import BLOCK_TOKENS
from quadriga.sim.profiles import CostProfile
from quadriga.sim.records import Gaps, Happened, MemoryRules, Sequence

DRAW_EVERY_S = 1.0


class SimulatedDecodeReplica:
    """One decode replica; see the module. Times are absolute simulated seconds."""

    def __init__(
        self, name: str, profile: CostProfile, rules: MemoryRules, on_gaps: Callable[[Gaps], None]
    ) -> None:
        self.name = name
        self.profile = profile
        self.rules = rules
        self.steps = 0
        self.anchor_s = 0.0  # when `steps` were made
        self.tokens = 0  # KV tokens of the running, at the anchor
        # The same and their number, each counted by the share of the layers that its tokens run.
        self.work_tokens = self.work = 0.0
        self.front_share = 1.0
        self._num_deep, self._log_leaves = 0, 0.0  # who never leaves early; whether any goes on
        self.running: dict[int, Sequence] = {}
        self.paused: dict[int, RunningSequence] = {}
        self.promised: dict[int, int] = {}  # tokens of the sequences on their way here
        self.num_lowered = 0.0  # tokens that left below their threshold within a budget
        self._pressure, self._lowers = 0.0, 0.0  # and so many of them in a step now
        self.answers = AnswerLengths()
        self.held_up_s = 0.0  # of the step under way, over a plain one
        self.factor = 1.0  # of the profile's step times, until the next draw
        self.draw_factor: Callable[[], float] | None = None
        self.predict: Callable[[int, int], LengthPrediction | None] | None = None
        self._drawn_s = -math.inf
        self._halted: dict[int, Sequence] = {}  # the paused, as sequences
        self._joining: list[tuple[float, int, Sequence]] = []
        self._leaving: set[int] = set()
        self._leave_from_s = math.inf
        self._ends: list[tuple[int, int]] = []  # (step, index), stale entries included
        self._on_gaps = on_gaps

    # What others look at

    @property
    def first_step_s(self) -> float:
        """Seconds of the step that begins at the anchor."""
        return self.factor * self.modelled_step_s

    @property
    def modelled_step_s(self) -> float:
        """The same without the factor: layers that no token runs are not read."""
        step = self.profile.step
        unread = 0.0 if self._num_deep else math.exp(self._log_leaves)
        unread *= (1.0 - self.front_share) * bool(self.running)
        return step.step_s(self.work, self.work_tokens) - step.base_s * unread

    def _share(self, sequence: Sequence) -> float:
        return self.front_share + (1.0 - self.front_share) * sequence.stays

    @property
    def slope_s(self) -> float:
        """What a step takes more than the one before."""
        return self.factor * self.profile.step.per_token_s * self.work

    @property
    def held_tokens(self) -> int:
        """At the anchor: the running, the paused, and the promised."""
        paused = sum(s.tokens for s in self._halted.values())
        return self.tokens + paused + sum(self.promised.values())

    def spare_tokens(self) -> list[int]:
        """At the anchor: what is promised to each of the running and not used, where it is any.

        Until the next event these grow into it, and the others beyond what they were promised.
        """
        if self.rules.reservation == "longest":
            return []
        steps = self.steps
        spare = [s.promised_tokens - s.base - steps for s in self.running.values()]
        return [tokens for tokens in spare if tokens > 0]

    @property
    def num_held(self) -> int:
        return len(self.running) + len(self._halted) + len(self.promised)

    @property
    def num_halted(self) -> int:
        """Paused sequences."""
        return len(self._halted)

    # What the cluster asks for

    def join(self, sequence: Sequence, *, ready_s: float) -> None:
        """Let a sequence into the batch at the first step boundary from `ready_s` on."""
        wanted = max(sequence.tokens, sequence.promised_tokens)
        self.promised.setdefault(sequence.index, wanted)
        heapq.heappush(self._joining, (ready_s, sequence.index, sequence))

    def leave(self, index: int, *, from_s: float) -> None:
        """Take a running sequence out at the first step boundary from now on."""
        self._leaving.add(index)
        self._leave_from_s = min(self._leave_from_s, from_s)

    def release(self, index: int) -> Sequence:
        """Let go of a paused sequence, now."""
        del self.paused[index]
        return self._halted.pop(index)

    def stay(self, index: int) -> None:
        """Take back a `leave`."""
        self._leaving.discard(index)
        if not self._leaving:
            self._leave_from_s = math.inf

    def kill(self, now_s: float) -> list[Sequence]:
        """Lose everything; returns what was held, at its size, the promised excluded."""
        self._advance(self._steps_until(now_s - self.held_up_s))
        lost = [self._stopped(s) for s in self.running.values()] + [*self._halted.values()]
        lost += [s for _, index, s in self._joining if index in self.promised]
        self.running.clear()
        self.paused.clear()
        self._halted.clear()
        self.promised.clear()
        self._joining.clear()
        self._leaving.clear()
        self._ends.clear()
        self._leave_from_s = math.inf
        self.tokens, self.anchor_s = 0, now_s
        self.work_tokens = self.work = self._log_leaves = 0.0
        self._num_deep, self._lowers, self._pressure = 0, 0.0, 0.0
        return lost

    # Time

    def next_event_s(self) -> float:
        """When something happens next, if no call interferes; infinite when idle."""
        if not self.running:
            if self._joining:  # whom a paused one may have to wait for
                return max(self._joining[0][0], self.anchor_s)
            return self.anchor_s if self._halted else math.inf
        return self.anchor_s + self._duration_s(self._event_steps())

    def run_to_event(self, now_s: float) -> Happened:
        """Make the steps up to the next event, which is at `now_s`, and let it happen."""
        if self.running:
            self._advance(self._event_steps())
        return self._let_happen(now_s)

    def _let_happen(self, now_s: float) -> Happened:
        """What the boundary at `now_s` brings."""
        self.anchor_s = max(self.anchor_s, now_s)
        happened = Happened()
        self._finish(happened)
        self._let_leave(now_s, happened)
        self._let_join(happened)
        self._preempt(happened)
        self._resume(happened)
        self._feel_pressure()
        if self.draw_factor is not None and now_s >= self._drawn_s + DRAW_EVERY_S:
            self.factor, self._drawn_s = self.draw_factor(), now_s
        return happened

    def _event_steps(self) -> int:
        """Steps until the next event, from the anchor."""
        while self._ends and self._is_stale(*self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self.steps
        room = self.profile.kv_capacity_tokens - self.tokens
        steps = min(steps, max(0, room // len(self.running) + 1), *self.spare_tokens())
        wanted_s = min(self._leave_from_s, self._joining[0][0] if self._joining else math.inf)
        if wanted_s < self.anchor_s + self._duration_s(steps):
            steps = self._boundary(wanted_s)
        return steps

    def _is_stale(self, step: int, index: int) -> bool:
        sequence = self.running.get(index)
        return sequence is None or sequence.base + step != sequence.final_tokens

    def _duration_s(self, steps: int) -> float:
        return steps * self.first_step_s + self.slope_s * steps * (steps - 1) / 2.0

    def _steps_until(self, now_s: float) -> int:
        """Whole steps made by `now_s`."""
        if not self.running or now_s <= self.anchor_s:
            return 0
        steps = self._boundary(now_s)
        return steps if self.anchor_s + self._duration_s(steps) <= now_s else steps - 1

    def _boundary(self, at_s: float) -> int:
        """Steps to the first boundary at or after `at_s`: the quadratic solved, then rounded."""
        wanted_s = at_s - self.anchor_s
        if wanted_s <= 0.0:
            return 0
        first_s = self.first_step_s
        half = self.slope_s / 2.0
        linear = first_s - half
        # The root in the form that stays exact where the quadratic term vanishes.
        root = 2.0 * wanted_s / (linear + math.sqrt(linear * linear + 4.0 * half * wanted_s))
        steps = max(0, math.ceil(root))
        while steps and self._duration_s(steps - 1) >= wanted_s:
            steps -= 1
        while self._duration_s(steps) < wanted_s:
            steps += 1
        return steps

    def _advance(self, steps: int) -> None:
        if steps <= 0 or not self.running:
            return
        num = len(self.running)
        first_s = self.first_step_s
        last_s = first_s + self.slope_s * (steps - 1)
        self.anchor_s += self._duration_s(steps)
        self._on_gaps(Gaps(first_s, last_s, steps * num, self.anchor_s))
        self.steps += steps
        self.num_lowered += steps * self._lowers
        self.tokens += steps * num
        self.work_tokens += steps * self.work

    # What happens at a boundary, in this order

    def _finish(self, happened: Happened) -> None:
        while self._ends and (self._is_stale(*self._ends[0]) or self._ends[0][0] <= self.steps):
            step, index = heapq.heappop(self._ends)
            sequence = self.running.get(index)
            if sequence is not None and sequence.base + step == sequence.final_tokens:
                self.answers.ended(sequence.final_tokens - sequence.prompt_tokens)
                happened.finished.append(self._take_out(sequence))

    def _let_leave(self, now_s: float, happened: Happened) -> None:
        if self._leave_from_s > now_s:
            return
        for index in sorted(self._leaving):
            sequence = self.running.get(index)
            if sequence is not None:
                happened.left.append(self._take_out(sequence))
        self._leaving.clear()
        self._leave_from_s = math.inf

    def _let_join(self, happened: Happened) -> None:
        while self._joining and self._joining[0][0] <= self.anchor_s:
            _, index, sequence = heapq.heappop(self._joining)
            self.promised.pop(index, None)
            self._put_in(sequence)
            happened.joined[index] = sequence

    def _preempt(self, happened: Happened) -> None:
        if self.tokens <= self.profile.kv_capacity_tokens:
            return
        for sequence in self.running.values():
            sequence.promised_tokens = 0
        limit = math.floor(self.rules.high * self.profile.kv_capacity_tokens)
        while self.tokens > limit and self.running:
            # A lone one that cannot grow goes as well, but none for the sake of the mark alone.
            if len(self.running) == 1 and self.tokens <= self.profile.kv_capacity_tokens:
                break
            victim = choose_victim(self._candidate(s) for s in self.running.values())
            if victim is None:
                raise InvariantViolation(f"{self.name}: memory is full and no sequence runs")
            sequence = self._take_out(self.running[int(victim.state.sequence_id)])
            sequence.num_pauses += 1
            self._halted[sequence.index] = sequence
            victim.num_pauses = sequence.num_pauses
            self.paused[sequence.index] = victim
            happened.preempted.append(sequence)

    def _resume(self, happened: Happened) -> None:
        limit = self.rules.low * self.profile.kv_capacity_tokens
        while (first := choose_return(self.paused.values(), self.anchor_s)) is not None:
            sequence = self._halted[int(first.state.sequence_id)]
            coming = sum(self.promised[i] for _, i, _ in self._joining if i in self.promised)
            is_alone = not self.running and not self._joining
            if self.tokens + coming + sequence.tokens + 1 > limit and not is_alone:
                return
            if is_overdue(first, self.anchor_s):
                sequence.stays_until = sequence.tokens + BLOCK_TOKENS
            del self.paused[sequence.index], self._halted[sequence.index]
            if self.rules.on_full == "pause":
                num_bytes = sequence.tokens * self.profile.kv_bytes_per_token
                self.join(
                    sequence,
                    ready_s=self.anchor_s + num_bytes / self.profile.host_bandwidth_bytes_per_s,
                )
                happened.resumed.append(sequence)
                continue
            blocked_s = self.profile.prefill_s([sequence.tokens])
            self.anchor_s += blocked_s
            if self.running:
                self._on_gaps(Gaps(blocked_s, blocked_s, len(self.running), self.anchor_s))
            self._put_in(sequence)
            happened.joined[sequence.index] = sequence

    def _feel_pressure(self) -> None:
        """Lower thresholds as memory fills; looked at where something happens, in quarters.

        Source: `quadriga.scheduling.exits.pressure`, of which this is the mean.
        """
        if self.rules.reservation != "used":
            return
        capacity = self.profile.kv_capacity_tokens
        begins = self.rules.admits * capacity
        over = (self.held_tokens - begins) / max(1.0, capacity - begins)
        pressure = 1.0 if self._halted else round(4.0 * min(1.0, max(0.0, over))) / 4.0
        if pressure == self._pressure:
            return
        self._pressure = pressure
        for sequence in self.running.values():
            if sequence.quality_budget:
                self._weigh(sequence, -1)
                sequence.stays = sequence.lowered_stays(pressure)
                self._weigh(sequence, 1)

    def _put_in(self, sequence: Sequence) -> None:
        if sequence.quality_budget:
            sequence.stays = sequence.lowered_stays(self._pressure)
        sequence.base = sequence.tokens - self.steps
        self.running[sequence.index] = sequence
        self.tokens += sequence.tokens
        self._weigh(sequence, 1)
        heapq.heappush(self._ends, (sequence.final_tokens - sequence.base, sequence.index))

    def _take_out(self, sequence: Sequence) -> Sequence:
        del self.running[sequence.index]
        self._stopped(sequence)
        self.tokens -= sequence.tokens
        self._weigh(sequence, -1)
        return sequence

    def _weigh(self, sequence: Sequence, sign: int) -> None:
        share = self._share(sequence)
        self._lowers += sign * (sequence.usual_stays - sequence.stays)
        self.work += sign * share
        self.work_tokens += sign * share * sequence.tokens
        if sequence.stays < 1.0:
            self._log_leaves += sign * math.log1p(-sequence.stays)
        else:
            self._num_deep += sign

    def _stopped(self, sequence: Sequence) -> Sequence:
        sequence.tokens = sequence.base + self.steps
        return sequence

    def _candidate(self, sequence: Sequence) -> RunningSequence:
        return RunningSequence(
            self._state(sequence),
            since_s=self.anchor_s,
            num_tokens=sequence.base + self.steps,
            num_pauses=sequence.num_pauses,
            stays_until=sequence.stays_until,
        )

    def _state(self, sequence: Sequence) -> SequenceState:
        """The sequence as the batching code knows it: its ids do not matter, their number does."""
        tokens = sequence.base + self.steps
        produced = tokens - sequence.prompt_tokens
        said = None if self.predict is None else self.predict(sequence.index, tokens)
        return SequenceState(
            sequence_id=str(sequence.index),
            request_id=str(sequence.index),
            model="",
            prompt_ids=[0] * sequence.prompt_tokens,
            sampling=SamplingParams(max_tokens=self.profile.max_tokens),
            ingress_id="",
            arrival_unix_s=sequence.arrival_s,
            deadline_unix_s=math.inf,
            output_ids=[0] * produced,
            prediction=said,
            predicted_at=produced,
        )
