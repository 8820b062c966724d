"""Which sequences make room when memory fills, and which come back first.

A running sequence that outgrew its promise takes the next block. Where none is free, what others
were promised and do not use yet is taken back; where that is not enough, running sequences are
paused: their KV moves to host memory, row and blocks are free. They come back below a lower mark,
so that none is moved to and fro. A newcomer takes the place of a less important sequence. Nothing
is recomputed and nothing fails.

The sequence with the largest predicted total is paused first: it holds the most memory for the
longest time, and is late in any case. Where nothing is predicted, the least often paused is.

Every sequence is served in the end. While one is paused no newcomer of the same rank is let in. One
that was paused for `PATIENCE_S` comes before all others, more important ones included, and keeps
its place for a block of tokens: until then all others are paused before it, and of several such the
one that was paused least often goes first.

Source: BATON, "pause, resume and scale"; the marks, the choice, and the patience are ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from quadriga.core.forecast import LengthPrediction
from quadriga.core.request import SequenceState, remaining_of
from quadriga.errors import InvariantViolation, KVCacheExhausted
from quadriga.policies.slot_reservation import ADMIT_SHARE, RETURN_SHARE, admitted_tokens
from quadriga.scheduling.decode_batch import AT_EXIT, PAUSED, RUNNING, DecodeBatch
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.slots import BLOCK_TOKENS

PATIENCE_S = 10.0
"""A sequence that was paused for so long comes before more important ones."""
REST_S = 1.0
"""Nobody comes back to others for so long once a pass has lacked the device's memory."""


class Pausable(Protocol):
    """What the choices look at; a `RunningSequence` has it.

    Attributes:
        since_s: Of a paused one: when it was paused.
        num_tokens, stays_until: Of a running one: what it has, and up to where it keeps its place.
    """

    state: SequenceState
    num_pauses: int
    since_s: float
    num_tokens: int
    stays_until: int


Candidate = TypeVar("Candidate", bound=Pausable)


def is_overdue(paused: Pausable, now_s: float) -> bool:
    """Whether a sequence was paused for so long that it comes before all others."""
    return now_s - paused.since_s >= PATIENCE_S


def choose_victim(running: Iterable[Candidate]) -> Candidate | None:
    """Least important first, then the largest predicted total, kept ones last; see the module."""
    return max(running, key=_expendability, default=None)


def _expendability(one: Pausable) -> tuple[bool, int, float, int, int, float]:
    state, is_kept = one.state, one.num_tokens < one.stays_until
    remaining, total_tokens = remaining_of(state), 0.0
    if remaining is not None and not is_kept:
        # It hardly changes while the sequence runs, so who is the longest stays so.
        total_tokens = state.num_tokens + remaining.mean
    most = state.sampling.max_tokens
    return not is_kept, state.priority, total_tokens, -one.num_pauses, most, state.arrival_unix_s


def choose_return(paused: Iterable[Candidate], now_s: float) -> Candidate | None:
    """Overdue ones first, then the most important, then the longest paused."""
    return min(
        paused,
        key=lambda p: (
            (False, 0, p.since_s) if is_overdue(p, now_s) else (True, p.state.priority, p.since_s)
        ),
        default=None,
    )


class Preemption:
    """The moves of a decode replica's sequences to host memory and back.

    Attributes:
        num_pauses, num_resumes: Since the start.
    """

    def __init__(self, batch: DecodeBatch) -> None:
        self.num_pauses = 0
        self.num_resumes = 0
        self._batch = batch
        self._back_from_s = 0.0

    def pause(self, sequence_id: str) -> bool:
        """Move a decoding sequence to host memory; it comes back by itself. False if none is."""
        batch = self._batch
        sequence = batch.find(sequence_id, RUNNING, AT_EXIT)
        if sequence is None:
            return False
        suspended = batch.runner.suspend(sequence.row)  # first: it may lack the memory
        batch.lift(sequence, PAUSED)
        batch.free_row(sequence)
        batch.num_paused += 1
        sequence.suspended = suspended
        sequence.num_pauses += 1
        sequence.state.num_pauses += 1
        self.num_pauses += 1
        return True

    def make_room(
        self,
        max_total_tokens: int,
        num_tokens: int | None,
        priority: int,
        *,
        upper_tokens: int,
        prediction: LengthPrediction | None,
    ) -> None:
        """Let a newcomer in below the mark, pausing less important ones where that helps.

        Raises:
            KVCacheExhausted: No room for it now; no sequence was paused.
            ContextTooLong: It can never fit.
        """
        batch, slots = self._batch, self._batch.slots
        wanted = slots.tokens_wanted(
            max_total_tokens, num_tokens, upper_tokens=upper_tokens, prediction=prediction
        )
        now_s = batch.clock.now_s()
        first = choose_return(batch.having(PAUSED), now_s) if batch.num_paused else None
        if first is not None and (first.state.priority <= priority or is_overdue(first, now_s)):
            raise KVCacheExhausted(
                f"{batch.num_paused} paused sequences wait for memory here; try another replica"
            )
        if slots.reservation != "used":
            return
        limit = admitted_tokens(slots.kv_capacity_tokens, slots.num_rows, slots.row_capacity_tokens)
        rows, tokens = slots.num_free_rows, slots.reserved_tokens
        less = [r for r in self._displaceable() if r.state.priority > priority]
        less.sort(key=_expendability)
        victims: list[str] = []
        while rows == 0 or (tokens and tokens + wanted > limit):
            if not less:
                raise KVCacheExhausted(
                    f"no room for {wanted} tokens: {slots.num_free_rows} of {slots.num_rows} rows "
                    f"are free, and new sequences are let in up to {limit} tokens, of which "
                    f"{slots.reserved_tokens} are promised"
                )
            victim = less.pop().state.sequence_id
            slot = slots.get(victim)
            victims.append(victim)
            rows, tokens = rows + 1, tokens - (slot.reserved_tokens if slot else 0)
        for victim in victims:
            self.pause(victim)

    def _displaceable(self) -> list[RunningSequence]:
        return [s for s in self._batch.decoding if s.num_tokens >= s.stays_until]

    @property
    def least_priority(self) -> int | None:
        """Who is more important than this could have a place now; None where nobody could."""
        batch, slots = self._batch, self._batch.slots
        now_s = batch.clock.now_s()
        paused = batch.having(PAUSED) if batch.num_paused else []
        if slots.reservation != "used" or any(is_overdue(s, now_s) for s in paused):
            return None
        before = [s.state.priority for s in paused]  # they come before newcomers of their rank
        has_room = slots.reserved_tokens < ADMIT_SHARE * slots.kv_capacity_tokens
        if before and has_room and slots.num_free_rows:
            return min(before)
        running = [s.state.priority for s in self._displaceable()]
        return min([max(running), *before]) if running else None

    def balance(self) -> None:
        """Let every decoding sequence grow, pausing some where they cannot; take paused ones in."""
        batch = self._batch
        short = [s for s in batch.sequences.values() if s.num_tokens >= s.room_tokens]
        for sequence in short:
            self._grow(sequence)
        while batch.num_paused and self._resume_one():
            pass

    def _grow(self, sequence: RunningSequence) -> None:
        """Give a sequence its next block, pausing others or itself where none is free."""
        batch = self._batch
        while sequence.status is RUNNING or sequence.status is AT_EXIT:
            if batch.slots.grow(sequence.state.sequence_id, sequence.num_tokens + 1):
                batch.note_room(sequence)
                return
            if not self._trim():
                self._relieve()

    def _trim(self) -> int:
        """Take back what is promised and not used; returns how many tokens that was."""
        batch, freed = self._batch, 0
        for sequence in batch.decoding:
            freed += batch.slots.trim(sequence.state.sequence_id, sequence.num_tokens + 1)
            batch.note_room(sequence)
        return freed

    def _relieve(self) -> None:
        """Pause one sequence, and more until memory is no longer nearly full."""
        batch = self._batch
        self._pause_one()
        limit = ADMIT_SHARE * batch.slots.kv_capacity_tokens
        while batch.slots.reserved_tokens > limit and batch.num_decoding > 1:
            self._pause_one()

    def lighten(self, count: int) -> None:
        """Pause so many sequences: a pass lacked the device's memory, and would again."""
        for _ in range(count):
            self._pause_one()
        self._back_from_s = self._batch.clock.now_s() + REST_S

    def _pause_one(self) -> None:
        victim = choose_victim(self._batch.decoding)
        if victim is None:
            raise InvariantViolation("memory is full and no sequence runs")
        self.pause(victim.state.sequence_id)

    @property
    def may_return(self) -> bool:
        """Whether a paused sequence has room to come back."""
        batch = self._batch
        first = choose_return(batch.having(PAUSED), batch.clock.now_s())
        return first is not None and self._has_room_for(first.state)

    def _has_room_for(self, state: SequenceState) -> bool:
        batch, slots = self._batch, self._batch.slots
        wanted = slots.tokens_wanted(state.max_total_tokens, state.num_tokens)
        after = slots.reserved_tokens + wanted
        rests = batch.clock.now_s() < self._back_from_s
        if batch.num_decoding and (rests or after > RETURN_SHARE * slots.kv_capacity_tokens):
            return False
        return after <= slots.kv_capacity_tokens and slots.num_free_rows > 0

    def _resume_one(self) -> bool:
        """Take the first paused sequence back; False when there is no room for it yet."""
        batch, now_s = self._batch, self._batch.clock.now_s()
        sequence = choose_return(batch.having(PAUSED), now_s)
        if sequence is None or not self._has_room_for(sequence.state):
            return False
        state, was_overdue = sequence.state, is_overdue(sequence, now_s)
        slot = batch.slots.reserve(state.sequence_id, state.max_total_tokens, state.num_tokens)
        sequence.row = slot.row
        batch.num_paused -= 1
        self.num_resumes += 1
        suspended, sequence.suspended = sequence.suspended, None
        batch.runner.restore(slot.row, state, suspended)
        batch.enter(sequence)
        if was_overdue:
            sequence.stays_until = sequence.num_tokens + BLOCK_TOKENS
        return True
