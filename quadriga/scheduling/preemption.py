"""Who makes room when memory fills, and who comes back first.

A running sequence that outgrew its promise takes the next block. Where none is free, what others
were promised and do not use yet is taken back; where that is not enough, running sequences are
paused: their KV moves to host memory, row and blocks are free. They come back below a lower mark,
so that nobody is moved to and fro. Somebody more important than a running sequence takes its place.
Nothing is recomputed and nothing fails.

Who waits is served in the end. While somebody is paused no newcomer of the same rank is let in, and
who was paused least often is paused next, so a sequence that came back runs before those that came
later make room for it in turn. One that was paused for `PATIENCE_S` comes before everybody, more
important ones included, and keeps its place for a block of tokens.

Source: BATON, "pause, resume and scale"; the marks, who is chosen, and the patience are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from quadriga.clock import Clock
from quadriga.core.forecast import LengthPrediction
from quadriga.core.request import SequenceState
from quadriga.errors import InvariantViolation, KVCacheExhausted
from quadriga.interfaces import ModelRunner
from quadriga.policies.slot_reservation import ADMIT_SHARE, RETURN_SHARE, admitted_tokens
from quadriga.scheduling.batch_state import BatchState, Place, RunningRow
from quadriga.scheduling.slots import BLOCK_TOKENS, SlotTable

PATIENCE_S = 10.0
"""A sequence that was paused for so long comes before more important ones."""


@dataclass(slots=True, eq=False)
class PausedSequence:
    """A sequence in host memory.

    Attributes:
        suspended: What the runner gave, and takes back: a `Suspended`; None in a simulation.
        waited_at: The exit its token waits at, or None for the front.
        paused_at_s: Since when.
        num_pauses: How often it was paused here, this time included.
    """

    state: SequenceState
    suspended: Any
    waited_at: int | None
    paused_at_s: float
    num_pauses: int = 1

    def is_overdue(self, now_s: float) -> bool:
        """Whether it was paused for so long that it comes before everybody."""
        return now_s - self.paused_at_s >= PATIENCE_S


class Pausable(Protocol):
    """What the choice of a victim looks at; a `RunningRow` has it."""

    @property
    def state(self) -> SequenceState: ...

    @property
    def num_pauses(self) -> int: ...


Candidate = TypeVar("Candidate", bound=Pausable)


def remaining_tokens(state: SequenceState) -> int:
    """Longest that a sequence may still run."""
    return state.sampling.max_tokens - len(state.output_ids)


def choose_victim(running: Iterable[Candidate]) -> Candidate | None:
    """Least important first, then the least often paused, the longest remaining, the newest."""
    return max(running, key=_expendability, default=None)


def _expendability(one: Pausable) -> tuple[int, int, int, float]:
    state = one.state
    return (state.priority, -one.num_pauses, remaining_tokens(state), state.arrival_unix_s)


def choose_return(paused: Iterable[PausedSequence], now_s: float) -> PausedSequence | None:
    """Overdue ones first, then the most important, then the longest paused."""
    return min(
        paused,
        key=lambda p: (
            (False, 0, p.paused_at_s)
            if p.is_overdue(now_s)
            else (True, p.state.priority, p.paused_at_s)
        ),
        default=None,
    )


class Preemption:
    """The paused sequences of one decode replica, and the moves to and from host memory.

    Args:
        enter: Takes a sequence that came back, its row filled, into a place.

    Attributes:
        paused: By sequence id.
        num_pauses, num_resumes: Since the start.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        slots: SlotTable,
        places: BatchState,
        clock: Clock,
        enter: Callable[[int, SequenceState, Place], None],
    ) -> None:
        self.paused: dict[str, PausedSequence] = {}
        self.num_pauses = 0
        self.num_resumes = 0
        self._runner = runner
        self._slots = slots
        self._places = places
        self._clock = clock
        self._enter = enter

    def pause(self, sequence_id: str) -> bool:
        """Move a running sequence to host memory; it comes back by itself. False if not running."""
        row = self._places.rows.get(sequence_id)
        if row is None:
            return False
        running = self._places.running[row]
        paused = PausedSequence(
            state=running.state,
            suspended=self._runner.suspend(row),  # first: it may lack the memory
            waited_at=self._places.exit_of(running.place),
            paused_at_s=self._clock.now_s(),
            num_pauses=running.num_pauses + 1,
        )
        self._places.remove(row)
        self.paused[sequence_id] = paused
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
        """Let a newcomer in below the mark, pausing who is less important where that helps.

        Raises:
            KVCacheExhausted: No room for it now; nobody was paused.
            ContextTooLong: It can never fit.
        """
        slots = self._slots
        wanted = slots.tokens_wanted(
            max_total_tokens, num_tokens, upper_tokens=upper_tokens, prediction=prediction
        )
        now_s = self._clock.now_s()
        first = choose_return(self.paused.values(), now_s)
        if first is not None and (first.state.priority <= priority or first.is_overdue(now_s)):
            raise KVCacheExhausted(
                f"{len(self.paused)} paused sequences wait for memory here; try another replica"
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

    def _displaceable(self) -> list[RunningRow]:
        return [r for r in self._places.running.values() if r.num_tokens >= r.stays_until]

    @property
    def least_priority(self) -> int | None:
        """Of those whose place a more important newcomer could have now; None where nobody's."""
        if self._slots.reservation != "used":
            return None
        now_s = self._clock.now_s()
        if any(p.is_overdue(now_s) for p in self.paused.values()):
            return None
        return max((r.state.priority for r in self._displaceable()), default=None)

    def balance(self) -> None:
        """Let every running sequence grow, pausing some where they cannot; take paused ones in."""
        short = [r for r in self._places.running.values() if r.num_tokens >= r.room_tokens]
        for running in short:
            self._grow(running)
        while self.paused and self._resume_one():
            pass

    def _grow(self, running: RunningRow) -> None:
        """Give a running sequence its next block, whoever must make room for it; or pause it."""
        slots, places = self._slots, self._places
        sequence_id = running.state.sequence_id
        while places.running.get(running.row) is running:
            if slots.grow(sequence_id, running.num_tokens + 1):
                self.note_room(running)
                return
            if not self._trim():
                self._relieve()

    def note_room(self, running: RunningRow) -> None:
        """Note with a running sequence what it is promised."""
        slot = self._slots.get(running.state.sequence_id)
        if slot is not None and self._slots.reservation == "used":
            running.room_tokens = slot.reserved_tokens

    def _trim(self) -> int:
        """Take back what is promised and not used; returns how many tokens that was."""
        slots, places = self._slots, self._places
        freed = 0
        for running in places.running.values():
            freed += slots.trim(running.state.sequence_id, running.num_tokens + 1)
            self.note_room(running)
        return freed

    def _relieve(self) -> None:
        """Pause one sequence, and more until memory is no longer nearly full."""
        slots, places = self._slots, self._places
        self._pause_one()
        limit = ADMIT_SHARE * slots.kv_capacity_tokens
        while slots.reserved_tokens > limit and len(places.running) > 1:
            self._pause_one()

    def _pause_one(self) -> None:
        victim = choose_victim(self._places.running.values())
        if victim is None:
            raise InvariantViolation("memory is full and nobody runs")
        self.pause(victim.state.sequence_id)

    @property
    def may_return(self) -> bool:
        """Whether a paused sequence has room to come back."""
        first = choose_return(self.paused.values(), self._clock.now_s())
        return first is not None and self._has_room_for(first.state)

    def _has_room_for(self, state: SequenceState) -> bool:
        slots = self._slots
        wanted = slots.tokens_wanted(state.max_total_tokens, state.num_tokens)
        after = slots.reserved_tokens + wanted
        if self._places.running and after > RETURN_SHARE * slots.kv_capacity_tokens:
            return False
        return after <= slots.kv_capacity_tokens and slots.num_free_rows > 0

    def _resume_one(self) -> bool:
        """Take the first paused sequence back; False when there is no room for it yet."""
        now_s = self._clock.now_s()
        paused = choose_return(self.paused.values(), now_s)
        if paused is None or not self._has_room_for(paused.state):
            return False
        state = paused.state
        slot = self._slots.reserve(state.sequence_id, state.max_total_tokens, state.num_tokens)
        del self.paused[state.sequence_id]
        self.num_resumes += 1
        self._runner.restore(slot.row, state, paused.suspended)
        self._enter(slot.row, state, self._places.at(paused.waited_at))
        running = self._places.running[slot.row]
        running.num_pauses = paused.num_pauses
        if paused.is_overdue(now_s):
            running.stays_until = running.num_tokens + BLOCK_TOKENS
        return True
