"""A decode replica that does with a full memory what vLLM's V1 scheduler does.

- The newest running sequence is preempted when the next step does not fit, and goes to the front of
  those that wait. There is no mark below the capacity: it comes back as soon as its first chunk
  fits, and pushes out, or is pushed out by, the next step.
- What a preempted sequence had is computed again in chunks, inside decode steps, within a budget of
  tokens a step; all running sequences wait for the longer step.
- In a step that preempts nobody is let in; newcomers come after all that wait.
- With prefix caching the blocks of a preempted sequence stay where they are until others take them,
  least recently freed first; what is still there need not be computed again.

Source: vLLM 0.9, `v1/core/sched/scheduler.py` and `v1/core/kv_cache_manager.py` (the rules; blocks
are counted in tokens here).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.profiles import CostProfile
from quadriga.sim.records import Gaps, Happened, MemoryRules, Sequence

BUDGET_TOKENS = 2048
"""Tokens that one step computes: one of each running sequence, and a chunk."""
NOBODY = -1


class VllmDecodeReplica(SimulatedDecodeReplica):
    """One decode replica; see the module.

    Attributes:
        num_recomputed: Tokens computed again.
    """

    def __init__(
        self, name: str, profile: CostProfile, rules: MemoryRules, on_gaps: Callable[[Gaps], None]
    ) -> None:
        super().__init__(name, profile, rules, on_gaps)
        self.num_recomputed = 0
        self._capacity = profile.kv_capacity_tokens
        self._preempted: deque[int] = deque()
        self._newcomers: deque[Sequence] = deque()
        self._filling: Sequence | None = None  # whose KV is computed again
        self._filled = self._chunk = 0
        self._is_unsettled = False  # somebody was preempted: the next step looks again
        self._freed: list[list[int]] = []  # [owner, tokens] of free blocks, longest free first

    def kill(self, now_s: float) -> list[Sequence]:
        """See `SimulatedDecodeReplica.kill`."""
        lost = super().kill(now_s) + list(self._newcomers)
        self._preempted.clear()
        self._newcomers.clear()
        self._freed.clear()
        self._filling, self._filled, self._chunk = None, 0, 0
        self._is_unsettled, self.held_up_s = False, 0.0
        return lost

    def next_event_s(self) -> float:
        """See `SimulatedDecodeReplica.next_event_s`."""
        if self._chunk:
            return self.anchor_s + self._mixed_step_s()
        if self.running:
            return self.anchor_s + self._duration_s(self._event_steps())
        if self._newcomers or self._halted:
            return self.anchor_s
        return max(self._joining[0][0], self.anchor_s) if self._joining else math.inf

    def run_to_event(self, now_s: float) -> Happened:
        """See `SimulatedDecodeReplica.run_to_event`."""
        happened = Happened()
        if self._chunk:
            self._mixed_step(happened)
        elif self.running:
            self._advance(self._event_steps())
        self.anchor_s = max(self.anchor_s, now_s)
        self._note_freed()  # who grew took blocks before those that end give theirs back
        self._finish(happened)
        self._let_leave(now_s, happened)
        while self._joining and self._joining[0][0] <= self.anchor_s:
            self._newcomers.append(heapq.heappop(self._joining)[2])
        self._schedule(happened)
        self.held_up_s = self._mixed_step_s() - self.first_step_s if self._chunk else 0.0
        return happened

    def _event_steps(self) -> int:
        while self._ends and self._is_stale(*self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self.steps
        room = self._capacity - self.tokens - self._filled
        steps = min(steps, max(1, room // len(self.running)))
        if self._is_unsettled:
            steps = min(steps, 1)
        wanted_s = min(self._leave_from_s, self._joining[0][0] if self._joining else math.inf)
        if wanted_s < self.anchor_s + self._duration_s(steps):
            steps = self._boundary(wanted_s)
        return steps

    def _mixed_step_s(self) -> float:
        """Seconds of a step that computes a chunk as well."""
        profile, before = self.profile, self._filled
        after = before + self._chunk
        chunk_s = profile.prefill_per_token_s * self._chunk
        chunk_s += profile.prefill_per_pair_s * (after * after - before * before)
        return self.first_step_s + profile.step.per_token_s * before + chunk_s

    def _mixed_step(self, happened: Happened) -> None:
        step_s, num = self._mixed_step_s(), len(self.running)
        self.anchor_s += step_s
        if num:
            self._on_gaps(Gaps(step_s, step_s, num, self.anchor_s))
        self.steps += 1
        self.tokens += num
        self.work_tokens += self.work
        self._filled += self._chunk
        self.num_recomputed += self._chunk
        self._chunk = 0
        sequence = self._filling
        if sequence is not None and self._filled >= sequence.tokens:
            self._filling, self._filled = None, 0
            del self._halted[sequence.index]
            self._put_in(sequence)
            happened.joined[sequence.index] = sequence

    def _schedule(self, happened: Happened) -> None:
        """Decide what the next step computes."""
        self._note_freed()
        self._is_unsettled = self._make_room(happened)
        num = len(self.running)
        self._chunk = 0
        if self._filling is not None:
            chunk = min(BUDGET_TOKENS - num, self._filling.tokens - self._filled)
            if self.tokens + num + self._filled + chunk > self._capacity:
                self._drop_filling()
                self._is_unsettled = True
            else:
                self._chunk = chunk
        if self._is_unsettled:
            return
        if self._filling is None and self._preempted:
            self._begin_filling()
        if self._filling is None and not self._preempted:
            self._let_newcomers_in(happened)
        self._note_freed()

    def _make_room(self, happened: Happened) -> bool:
        """Preempt until the next token of all fits. Returns whether anybody was."""
        was_full = False
        while self.running and self.tokens + len(self.running) + self._filled > self._capacity:
            was_full = True
            if self._filling is not None:
                self._drop_filling()
                continue
            newest = next(reversed(self.running))
            sequence = self._take_out(self.running[newest])
            sequence.num_pauses += 1
            self._free(sequence.index, sequence.tokens)
            self._halted[sequence.index] = sequence
            self._preempted.appendleft(sequence.index)
            happened.preempted.append(sequence)
        return was_full

    def _begin_filling(self) -> None:
        sequence = self._halted[self._preempted[0]]
        self._note_freed()
        cached = sum(tokens for owner, tokens in self._freed if owner == sequence.index)
        cached = min(cached, sequence.tokens - 1)
        num = len(self.running)
        chunk = min(BUDGET_TOKENS - num, sequence.tokens - cached)
        if self.tokens + num + cached + chunk > self._capacity:
            return
        self._preempted.popleft()
        self._freed = [part for part in self._freed if part[0] != sequence.index]
        self._filling, self._filled, self._chunk = sequence, cached, chunk

    def _let_newcomers_in(self, happened: Happened) -> None:
        while self._newcomers:
            sequence = self._newcomers[0]
            if self.tokens + len(self.running) + sequence.tokens + 1 > self._capacity:
                return
            self._newcomers.popleft()
            self.promised.pop(sequence.index, None)
            self._put_in(sequence)
            happened.joined[sequence.index] = sequence

    def _drop_filling(self) -> None:
        """Give up a recomputation under way; it begins anew when there is room."""
        assert self._filling is not None
        self._note_freed()
        self._free(self._filling.index, self._filled)
        self._preempted.appendleft(self._filling.index)
        self._filling, self._filled, self._chunk = None, 0, 0

    def _free(self, owner: int, num_tokens: int) -> None:
        if self.rules.caches_prefixes:
            self._freed.append([owner, num_tokens])

    def _note_freed(self) -> None:
        """Let free blocks be as many as there are: who grew took those that were free longest."""
        if not self.rules.caches_prefixes:
            return
        free = self._capacity - self.tokens - self._filled
        have = sum(tokens for _, tokens in self._freed)
        if have < free:
            self._freed.append([NOBODY, free - have])
        while have > free and self._freed:
            taken = min(have - free, self._freed[0][1])
            self._freed[0][1] -= taken
            have -= taken
            if not self._freed[0][1]:
                self._freed.pop(0)
