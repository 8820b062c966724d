"""Who makes room when memory fills, and who comes back first.

Memory is watched at two marks. Above the high one running sequences are paused: their KV moves to
host memory, row and blocks are free. They come back, and new ones are let in, while the batch stays
below the low one, so that nobody is moved to and fro. Somebody more important than a running
sequence takes its place. Nothing is recomputed and nothing fails.

Source: BATON, "pause, resume and scale"; the watermarks, and who is chosen, are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quadriga.batching.places import Place, Places
from quadriga.batching.slots import SlotTable
from quadriga.clock import Clock
from quadriga.errors import InvariantViolation, KVCacheExhausted
from quadriga.interfaces import ModelRunner
from quadriga.policies.load import LOW_WATERMARK
from quadriga.types import SequenceState

HIGH_WATERMARK = 0.90


@dataclass(slots=True, eq=False)
class PausedSequence:
    """A sequence in host memory.

    Attributes:
        suspended: What the runner gave, and takes back: a `Suspended`; None in a simulation.
        waited_at: The exit its token waits at, or None for the front.
        paused_at_s: Since when.
    """

    state: SequenceState
    suspended: Any
    waited_at: int | None
    paused_at_s: float


def remaining_tokens(state: SequenceState) -> int:
    """Longest that a sequence may still run."""
    return state.sampling.max_tokens - len(state.output_ids)


def choose_victim(running: Iterable[SequenceState]) -> SequenceState | None:
    """Least important first, then the longest remaining, then the newest."""
    return max(running, key=_expendability, default=None)


def _expendability(state: SequenceState) -> tuple[int, int, float]:
    return (state.priority, remaining_tokens(state), state.arrival_unix_s)


def choose_return(paused: Iterable[PausedSequence]) -> PausedSequence | None:
    """Most important first, then the longest paused: whoever waits is served in the end."""
    return min(paused, key=lambda p: (p.state.priority, p.paused_at_s), default=None)


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
        places: Places,
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
        )
        self._places.remove(row)
        self.paused[sequence_id] = paused
        self.num_pauses += 1
        return True

    def make_room(self, max_total_tokens: int, num_tokens: int | None, priority: int) -> None:
        """Let a newcomer in below the low mark, pausing who is less important where that helps.

        Raises:
            KVCacheExhausted: No room for it now; nobody was paused.
            ContextTooLong: It can never fit.
        """
        slots = self._slots
        wanted = slots.tokens_wanted(max_total_tokens, num_tokens)
        first = choose_return(self.paused.values())
        if first is not None and first.state.priority <= priority:
            raise KVCacheExhausted(
                f"{len(self.paused)} paused sequences wait for memory here; try another replica"
            )
        if slots.reservation != "used":
            return
        limit = int(LOW_WATERMARK * slots.kv_capacity_tokens)
        rows, tokens = slots.num_free_rows, slots.reserved_tokens
        less = [r.state for r in self._places.running.values() if r.state.priority > priority]
        less.sort(key=_expendability)
        victims: list[str] = []
        while rows == 0 or (tokens and tokens + wanted > limit):
            if not less:
                raise KVCacheExhausted(
                    f"no room for {wanted} tokens: {slots.num_free_rows} of {slots.num_rows} rows "
                    f"are free, and new sequences are let in up to {limit} tokens, of which "
                    f"{slots.reserved_tokens} are promised"
                )
            victim = less.pop().sequence_id
            slot = slots.get(victim)
            victims.append(victim)
            rows, tokens = rows + 1, tokens - (slot.reserved_tokens if slot else 0)
        for victim in victims:
            self.pause(victim)

    def balance(self) -> None:
        """Let every running sequence grow, pausing some where they cannot; take paused ones in."""
        slots, places = self._slots, self._places
        if slots.reservation == "used":
            for running in list(places.running.values()):
                sequence_id = running.state.sequence_id
                while sequence_id in places.rows and not slots.grow(
                    sequence_id, running.num_tokens + 1
                ):
                    self._pause_one()
            while slots.reserved_tokens > HIGH_WATERMARK * slots.kv_capacity_tokens:
                if len(places.running) <= 1:
                    break
                self._pause_one()
        while self.paused and self._resume_one():
            pass

    def _pause_one(self) -> None:
        victim = choose_victim(r.state for r in self._places.running.values())
        if victim is None:
            raise InvariantViolation("memory is full and nobody runs")
        self.pause(victim.sequence_id)

    @property
    def may_return(self) -> bool:
        """Whether a paused sequence has room to come back."""
        first = choose_return(self.paused.values())
        return first is not None and self._has_room_for(first.state)

    def _has_room_for(self, state: SequenceState) -> bool:
        slots = self._slots
        after = slots.reserved_tokens + state.num_tokens + 1
        if self._places.running and after > LOW_WATERMARK * slots.kv_capacity_tokens:
            return False
        wanted = slots.tokens_wanted(state.max_total_tokens, state.num_tokens)
        fits = slots.reserved_tokens + wanted <= slots.kv_capacity_tokens
        return fits and slots.num_free_rows > 0

    def _resume_one(self) -> bool:
        """Take the first paused sequence back; False when there is no room for it yet."""
        paused = choose_return(self.paused.values())
        if paused is None or not self._has_room_for(paused.state):
            return False
        state = paused.state
        slot = self._slots.reserve(state.sequence_id, state.max_total_tokens, state.num_tokens)
        del self.paused[state.sequence_id]
        self.num_resumes += 1
        self._runner.restore(slot.row, state, paused.suspended)
        self._enter(slot.row, state, self._places.at(paused.waited_at))
        return True
