"""Rounds of a decode batch in which the first exit drafts tokens, and the whole model verifies.

A sequence that drafts has a token that waits at the first exit, like any other there. What it has
drafted beyond is known to the runner and noted in its `RunningSequence`, and nowhere else: it is
not emitted, not counted, and does not travel. To drop it is to leave the sequence waiting.

    new token ──first segment──▶ waits at the exit ──first segment──▶ … with one draft more
                                        └──all others──▶ tokens that agree, and one more: new token
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

from quadriga.core.request import SampledToken
from quadriga.errors import InvariantViolation
from quadriga.interfaces import MAX_DRAFTED, DraftingRunner, DraftPlan
from quadriga.policies.drafting import DraftAction, DraftChoice
from quadriga.policies.rebatching import Range, Waiting
from quadriga.scheduling.decode_batch import DecodeBatch, summary
from quadriga.scheduling.exits.judging import Group
from quadriga.scheduling.sequence import RunningSequence


class DraftRounds:
    """Who drafts, who verifies, and what is noted of it."""

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch
        self._num_left = 0  # passes since those with drafts last took part in one
        self._num_held = 0  # full passes for which the last decision still stands
        self._held_rows = 0
        self._is_held = False  # the pass under way is one of them

    @property
    def runner(self) -> DraftingRunner:
        """The batch's. Raises: InvariantViolation: It cannot draft."""
        runner = self._batch.drafting
        if runner is None:
            raise InvariantViolation("sequences draft on a runner that cannot")
        return runner

    def taking_part(self, ran: Range, group: Group) -> Group:
        """Those of a group that a range drafts for, or verifies."""
        batch = self._batch
        if not batch.num_drafting or (ran.first, ran.stop) not in ((0, 1), (1, len(batch.ends))):
            return []
        return [s for s in group if s.drafts]

    def size(self, ran: Range, group: Group) -> tuple[int, int]:
        """Positions that a range runs for a group, and their context tokens."""
        num_tokens = sum([s.num_tokens + s.num_drafted for s in group])
        if not ran.first:
            return len(group), num_tokens
        drafted = [s for s in group if s.num_drafted]
        more = sum([s.num_drafted * s.num_tokens for s in drafted])
        return len(group) + sum([s.num_drafted for s in drafted]), num_tokens + more

    def choose(self, groups: list[Group]) -> tuple[Range, Group]:
        """The next range, and who runs it.

        Alone, those that draft do what is best for them. Beside others, whose passes the rebatching
        policy chooses, they draft with those that run the first segment, and may be verified with
        those that run all the others; they do not wait for that longer than a token takes.
        """
        batch, last = self._batch, len(self._batch.ends)
        is_alone = len(groups[0]) == batch.num_drafting == batch.num_decoding
        self._is_held = self._num_held > 0 and is_alone and len(groups[0]) == self._held_rows
        if self._is_held:
            self._num_held -= 1
            return Range(0, last, tests=False), groups[0]
        now_s, self._num_held = batch.clock.now_s(), 0
        fresh = [s for s in groups[0] if s.drafts]
        pending = [s for s in groups[1] if s.drafts]
        num_others = sum(map(len, groups)) - len(fresh) - len(pending)
        choice = self._decide(fresh, pending, now_s)
        going = [s for s in pending if s.survival > 0.0 and s.survival >= choice.least]
        if not num_others:
            if choice.action is DraftAction.VERIFY:
                return Range(1, last, tests=False), pending
            if choice.action is DraftAction.DRAFT:
                return Range(0, 1), fresh + going
            self._num_held, self._held_rows = choice.times - 1, len(fresh)
            return Range(0, last, tests=False), fresh
        others = [s for s in groups[1] if not s.drafts]
        if pending and (self._num_left >= last or choice.action is DraftAction.VERIFY):
            self._num_left = 0
            return Range(1, last, tests=False), pending
        front = Waiting(len(groups[0]), sum([s.num_tokens for s in groups[0]]))
        waiting = [summary(group) for group in (others, *groups[2:])]
        ran = batch.rebatcher.choose(front, waiting, now_s)
        group = groups[ran.first]
        if (ran.first, ran.stop) == (0, 1):
            group = group + going
        elif ran.first == 1 and (ran.stop < last or batch.num_limited):
            group = others  # what is limited cuts the pass short
        went_on = (ran.first, ran.stop) == (0, 1) or group is groups[1]
        self._num_left = 0 if went_on or not pending else self._num_left + 1
        return ran, group

    def _decide(self, fresh: Group, pending: Group, now_s: float) -> DraftChoice:
        if not fresh and not pending:
            return DraftChoice(DraftAction.FULL)
        urgent = [s.deadline_s for s in chain(fresh, pending) if s.gap_s]
        return self._batch.drafter.choose(
            fresh=len(fresh),
            pending=len(pending),
            positions=len(pending) + sum([s.num_drafted for s in pending]),
            survivals=[s.survival for s in pending if s.survival > 0.0],
            num_tokens=sum([s.num_tokens for s in chain(fresh, pending)]),
            now_s=now_s,
            budget_s=min(urgent) - now_s if urgent else math.inf,
        )

    def ran_full(self, ran: Range, group: Group, seconds: float) -> None:
        """A pass drafted and verified nothing: measure it where it was decided anew."""
        batch = self._batch
        if self._is_held or not batch.num_drafting or ran.first or ran.stop < len(batch.ends):
            return
        batch.drafter.spent(seconds)
        times = 1 + self._num_held
        batch.drafter.ended(len(group), len(group), drafted=False, times=times)

    def draft(self, drafting: Group, confidences: Iterable[float]) -> tuple[list[int], float]:
        """Sequences were run to the first exit: let its choices be drafts, and draft on.

        Returns:
            Rows in each pass by which they drafted on, and what these took together, in seconds.
        """
        batch = self._batch
        began_s = batch.clock.now_s()
        for sequence, confidence in zip(drafting, confidences, strict=True):
            if sequence.next_segment:
                sequence.num_drafted += 1
            else:
                batch.wait(sequence, 1, began_s)
                sequence.survival = 1.0
            self._note(sequence, confidence)
        plan = None
        if batch.num_drafting == batch.num_decoding:
            if all(s.state.sampling.greedy for s in drafting):
                plan = self._plan(drafting, began_s)
        found = self.runner.draft([s.row for s in drafting], plan)
        seconds = batch.clock.now_s() - began_s
        for sequence, drafted in zip(drafting, found, strict=True):
            for confidence in drafted.confidences:
                sequence.num_drafted += 1
                self._note(sequence, confidence)
            if not _room(sequence) or drafted.tokens[-1] in sequence.end_tokens:
                sequence.survival = 0.0
        lengths = [len(drafted.confidences) for drafted in found]
        counts = [sum([length > i for length in lengths]) for i in range(max(lengths))]
        return counts, seconds if counts else 0.0

    def _plan(self, drafting: Group, now_s: float) -> DraftPlan:
        batch, urgent = self._batch, [s.deadline_s for s in drafting if s.gap_s]
        return batch.drafter.plan(
            survivals=[s.survival for s in drafting],
            rooms=[_room(s) for s in drafting],
            ends=frozenset().union(*[s.end_tokens for s in drafting]),
            positions=batch.num_drafting + sum([s.num_drafted for s in batch.decoding]),
            budget_s=min(urgent) - now_s if urgent else math.inf,
        )

    def _note(self, sequence: RunningSequence, confidence: float) -> None:
        """A sequence has one draft more, made with this confidence."""
        is_drawn = not sequence.state.sampling.greedy
        mark, chance = self._batch.drafter.judge(confidence, is_drawn=is_drawn)
        sequence.draft_marks.append(mark)
        sequence.survival *= chance

    def verified(self, drafting: Group, group: Group, tokens: list[list[SampledToken]]) -> None:
        """A group's drafts were verified, and gave these tokens."""
        batch, counters = self._batch, self._batch.counters
        counters.verified += 1
        for sequence, news in zip(group, tokens, strict=True):
            if sequence.num_drafted:
                num_agreed = len(news) - 1
                counters.drafted += sequence.num_drafted
                counters.accepted += num_agreed
                batch.drafter.verified(sequence.draft_marks[: sequence.num_drafted], num_agreed)
        batch.drafter.ended(len(group), sum(map(len, tokens)), drafted=True)
        for sequence in drafting:
            sequence.draft_marks, sequence.num_drafted, sequence.survival = [], 0, 0.0


def _room(sequence: RunningSequence) -> int:
    """Drafts that may be run beyond those that were: the answer does not end with them, their
    positions are promised, and the runner keeps so many."""
    most = len(sequence.state.prompt_ids) + sequence.most_tokens - 1
    room = min(most, sequence.room_tokens) - sequence.num_tokens
    return max(0, int(min(room, MAX_DRAFTED)) - sequence.num_drafted)
