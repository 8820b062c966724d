"""Prompts waiting to be computed: bounded, by priority, similar lengths together within reason."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from quadriga.core.request import SequenceState
from quadriga.errors import Overloaded
from quadriga.scheduling.rebuild import num_prefill_tokens

STARVING_S = 5.0
"""Whoever has waited for so long is next, however important the others are."""
SIMILAR_LENGTH_RATIO = 2.0
"""Prompts whose lengths differ by at most this factor go well together."""


@dataclass(slots=True)
class _Waiting:
    state: SequenceState
    since_s: float
    order: tuple[int, int]


class PrefillQueue:
    """FIFO inside a priority, with a bounded preference for prompts of similar length.

    The head always goes first. The rest of a batch prefers prompts of the head's length (BATON
    §4.2), but a prompt older than `max_age_s` is never passed over. Whoever has waited for
    `STARVING_S` is the head, whatever its priority.
    """

    def __init__(self, *, max_sequences: int, max_tokens: int, max_age_s: float) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._max_age_s = max_age_s
        self._waiting: list[_Waiting] = []
        self._num_tokens = 0
        self._counter = 0

    def push(self, state: SequenceState, *, now_s: float, drain_tokens_per_s: float) -> None:
        """Queue a sequence.

        Args:
            drain_tokens_per_s: Recent prefill rate, for the prediction in a refusal.

        Raises:
            Overloaded: The queue is full; says when it is predicted to have room.
        """
        num_tokens = num_prefill_tokens(state)
        is_full = len(self._waiting) >= self._max_sequences
        # One prompt longer than the whole budget may still wait alone.
        if is_full or (self._waiting and self._num_tokens + num_tokens > self._max_tokens):
            rate = max(drain_tokens_per_s, 1.0)
            raise Overloaded(
                f"the prefill queue is full: {len(self._waiting)} of {self._max_sequences} "
                f"sequences, {self._num_tokens} of {self._max_tokens} tokens",
                retry_after_s=max(1.0, 0.1 * self._num_tokens / rate),
            )
        self._counter += 1
        item = _Waiting(state, now_s, (state.priority, self._counter))
        bisect.insort(self._waiting, item, key=lambda w: w.order)
        self._num_tokens += num_tokens

    def take(
        self, start: Callable[[SequenceState], bool], *, token_budget: int, now_s: float
    ) -> int:
        """Hand sequences to `start` until the budget is covered; the last may reach beyond it.

        Args:
            start: Takes one sequence; False leaves it queued, in its place, and ends the call.

        Returns:
            How many were taken.
        """
        num_taken = 0
        if not self._waiting or token_budget <= 0:
            return num_taken
        for item in self._preferred(now_s):
            if token_budget <= 0 or not start(item.state):
                break
            token_budget -= num_prefill_tokens(item.state)
            self._take(item)
            num_taken += 1
        return num_taken

    def remove(self, sequence_id: str) -> SequenceState | None:
        """Take a sequence out wherever it stands; None when it is not here."""
        for item in self._waiting:
            if item.state.sequence_id == sequence_id:
                self._take(item)
                return item.state
        return None

    def expired(self, *, now_unix_s: float) -> list[SequenceState]:
        """Take out and return the sequences whose deadline has passed."""
        late = [w for w in self._waiting if w.state.deadline_unix_s <= now_unix_s]
        for item in late:
            self._take(item)
        return [item.state for item in late]

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Tokens waiting to be computed."""
        return self._num_tokens

    def _preferred(self, now_s: float) -> list[_Waiting]:
        """The order to take from: head, the aged, the similar; others wait for the next batch.

        Priorities are never mixed by similarity: only the head's own class is reordered.
        """
        head = self._head(now_s)
        head_tokens = num_prefill_tokens(head.state)
        aged, similar, rest = [], [], []
        for item in self._waiting:
            if item is head:
                continue
            num_tokens = num_prefill_tokens(item.state)
            ratio = max(num_tokens, head_tokens) / max(1, min(num_tokens, head_tokens))
            if item.order[0] != head.order[0]:
                rest.append(item)
            elif now_s - item.since_s >= self._max_age_s:
                aged.append(item)
            elif ratio <= SIMILAR_LENGTH_RATIO:
                similar.append(item)
            else:
                rest.append(item)
        return [head, *aged, *similar, *rest]

    def _head(self, now_s: float) -> _Waiting:
        oldest = min(self._waiting, key=lambda w: w.since_s)
        return oldest if now_s - oldest.since_s >= STARVING_S else self._waiting[0]

    def _take(self, item: _Waiting) -> None:
        self._waiting.remove(item)
        self._num_tokens -= num_prefill_tokens(item.state)
