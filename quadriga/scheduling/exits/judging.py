"""What becomes of a group at an exit: who leaves, who waits there, who is parked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress

from quadriga.policies.rebatching import BatchDecision, ExitGroup, Range
from quadriga.scheduling.decode_batch import DecodeBatch, summary
from quadriga.scheduling.sequence import RunningSequence

Group = list[RunningSequence]


def judge(
    batch: DecodeBatch,
    ran: Range,
    group: Group,
    groups: Sequence[Group],
    confidences: list[float],
    num_tokens: int,
    now_s: float,
) -> tuple[Group, int | None]:
    """Ask the policy about a group at the exit behind `ran`, and carry out what it decides.

    Args:
        group: Those that ran and may leave; the others draft.
        groups: Per segment, the sequences whose token it could run next, before the pass.
        num_tokens: Context tokens of the group.

    Returns:
        The sequences that leave, and how many may; the others wait there from now on.
    """
    if ran.stop == len(batch.ends):
        return _leave_last(batch, group, confidences, now_s), None
    passed = [c >= s.leaves_from for c, s in zip(confidences, group, strict=True)]
    stays = [s for s, p in zip(group, passed, strict=True) if not p]
    at_exit = ExitGroup(
        ran=ran,
        confidences=confidences,
        thresholds=[s.threshold for s in group],
        passed=passed,
        num_tokens=num_tokens,
        waiting=summary([s for s in groups[ran.stop] if not s.drafts]),
        remaining=summary(stays),
    )
    decision = batch.rebatcher.judge(at_exit, now_s)
    count = len(group) - len(stays)
    if batch.rebatcher.is_surveying:
        sure = [c >= s.min_confidence for c, s in zip(confidences, group, strict=True)]
        _note_sure(batch.ends[ran.stop - 1], group, sure)
    if batch.num_limited or decision is BatchDecision.LEAVE:
        return _leave_some(batch, decision, at_exit, group, now_s), count
    if decision is BatchDecision.SPLIT:
        leavers = list(compress(group, passed))
        if batch.num_budgeted:
            _count_lowered(batch, leavers, compress(confidences, passed))
    else:
        leavers, stays = [], group
        batch.counters.involuntary_stays += count
    for sequence in stays:
        batch.wait(sequence, ran.stop, now_s)
    batch.counters.buffered += len(stays)
    return leavers, count


def _note_sure(layers: int, group: Group, passed: Sequence[bool]) -> None:
    """Note who could leave at this exit, and could not before."""
    for sequence in compress(group, passed):
        sequence.sure_after = sequence.sure_after or layers


def _leave_last(batch: DecodeBatch, group: Group, confidences: list[float], now_s: float) -> Group:
    """At the deepest exit all leave, but for strict ones that need more depth than there is."""
    if not batch.is_partial:
        return group
    depth, leavers, left_with = batch.ends[-1], [], []
    for sequence, confidence in zip(group, confidences, strict=True):
        needs_more = sequence.is_strict and not 0 < sequence.state.exits.max_depth <= depth
        if needs_more and confidence < sequence.min_confidence:
            batch.wait(sequence, len(batch.ends), now_s, is_parked=True)
        else:
            leavers.append(sequence)
            left_with.append(confidence)
    _count_breaches(batch, leavers, left_with)
    return leavers


def _leave_some(
    batch: DecodeBatch, decision: BatchDecision, at: ExitGroup, group: Group, now_s: float
) -> Group:
    """The general case: sequences at the end of their own depth leave whatever the decision."""
    segment = at.ran.stop - 1
    leavers = []
    for sequence, confidence, passed in zip(group, at.confidences, at.passed, strict=True):
        if sequence.last_segment == segment:
            if sequence.lacks_layers and not passed:
                sequence.needs_layers = True
                if sequence.is_strict:
                    batch.wait(sequence, at.ran.stop, now_s, is_parked=True)
                    continue
            within_budget = sequence.lacks_layers and passed
            count = _count_lowered if within_budget else _count_breaches
            count(batch, [sequence], [confidence])
            leavers.append(sequence)
        elif (passed and decision is BatchDecision.SPLIT) or (
            decision is BatchDecision.LEAVE and (passed or not sequence.is_strict)
        ):
            batch.counters.involuntary_exits += not passed
            if passed:
                _count_lowered(batch, [sequence], [confidence])
            leavers.append(sequence)
        else:
            batch.counters.involuntary_stays += passed
            batch.wait(sequence, at.ran.stop, now_s)
    batch.counters.buffered += len(group) - len(leavers)
    return leavers


def _count_lowered(batch: DecodeBatch, leavers: Group, confidences: Iterable[float]) -> None:
    for confidence, sequence in zip(confidences, leavers, strict=True):
        if confidence < sequence.min_confidence:
            sequence.state.num_lowered += 1
            batch.counters.lowered += 1


def _count_breaches(batch: DecodeBatch, group: Group, confidences: Sequence[float]) -> None:
    breaches = [
        s
        for c, s in zip(confidences, group, strict=True)
        if c < s.min_confidence and s.min_confidence < math.inf
    ]
    depth = batch.ends[-1]
    for sequence in breaches:
        sequence.state.num_breaches += 1
    batch.counters.breaches += len(breaches)
    batch.counters.limited += sum(0 < s.state.exits.max_depth <= depth for s in breaches)
