"""Prompts waiting to be computed: bounded, by priority, similar lengths together within reason."""

from __future__ import annotations

import bisect
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from quadriga.core.request import SequenceState
from quadriga.errors import Overloaded
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.transfer.rebuild import num_prefill_tokens

STARVING_S = 5.0
"""A sequence that has waited for so long takes turns with those that are more important."""
SIMILAR_LENGTH_RATIO = 2.0
"""Prompts whose lengths differ by at most this factor go well together."""
MAX_WAITING_FOR_LAYERS = 256
"""Sequences that wait for layers to be loaded; more are refused."""


def is_starving(sequence: RunningSequence, now_s: float) -> bool:
    """Whether a waiting sequence comes before more important ones because of its long wait."""
    return now_s - sequence.since_s >= STARVING_S


def find_starving(line: Sequence[RunningSequence], now_s: float) -> RunningSequence | None:
    """Which of a line takes turns with the first of it: the oldest, where it is starving.

    Args:
        line: The most important first.
    """
    oldest = min(line, key=lambda s: s.since_s, default=None)
    if oldest is None or oldest.state.priority == line[0].state.priority:
        return None
    return oldest if is_starving(oldest, now_s) else None


def _rank(sequence: RunningSequence) -> tuple[int, int]:
    return sequence.state.priority, sequence.order


class PrefillQueue:
    """FIFO inside a priority, with a bounded preference for prompts of similar length.

    The head always goes first. The rest of a batch prefers prompts of the head's length (BATON
    §4.2), but a prompt older than `max_age_s` is never passed over. The oldest comes before the
    head once it has waited for `STARVING_S`, unless the last that was taken did. Sequences that
    need more layers than are loaded stay until they are.

    Attributes:
        num_layers: Layers that are loaded.
        num_tokens: Waiting to be computed.
    """

    def __init__(self, *, max_sequences: int, max_tokens: int, max_age_s: float) -> None:
        self.num_layers = sys.maxsize
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._max_age_s = max_age_s
        self._waiting: list[RunningSequence] = []
        self.num_tokens = 0
        self._counter = 0
        self._is_turn_of_starving = False

    def push(self, sequence: RunningSequence, *, now_s: float, drain_tokens_per_s: float) -> None:
        """Queue a sequence.

        Args:
            drain_tokens_per_s: Recent prefill rate, for the prediction in a refusal.

        Raises:
            Overloaded: The queue is full, and the error says when it is predicted to have room; or
                too many sequences wait for layers.
        """
        num_tokens = num_prefill_tokens(sequence.state)
        ready = self._ready()
        if sequence.min_layers > self.num_layers:
            if len(self._waiting) - len(ready) >= MAX_WAITING_FOR_LAYERS:
                raise Overloaded(
                    f"{MAX_WAITING_FOR_LAYERS} strict sequences wait for layers to be loaded",
                    retry_after_s=1.0,
                )
        else:
            self._check_room(ready, num_tokens, drain_tokens_per_s)
        self._counter += 1
        sequence.since_s, sequence.order = now_s, self._counter
        bisect.insort(self._waiting, sequence, key=_rank)
        self.num_tokens += num_tokens

    def _check_room(
        self, ready: list[RunningSequence], num_tokens: int, drain_tokens_per_s: float
    ) -> None:
        is_all = len(ready) == len(self._waiting)
        queued = self.num_tokens if is_all else sum(num_prefill_tokens(s.state) for s in ready)
        is_full = len(ready) >= self._max_sequences
        # One prompt longer than the whole budget may still wait alone.
        if is_full or (ready and queued + num_tokens > self._max_tokens):
            raise Overloaded(
                f"the prefill queue is full: {len(ready)} of {self._max_sequences} "
                f"sequences, {queued} of {self._max_tokens} tokens",
                retry_after_s=max(1.0, 0.1 * queued / max(drain_tokens_per_s, 1.0)),
            )

    def take(
        self,
        start: Callable[[RunningSequence], bool],
        *,
        now_s: float,
        only_ending: bool = False,
    ) -> None:
        """Hand sequences to `start`, in their order, until it has no room for the next.

        Args:
            start: Takes one sequence; False leaves it queued, in its place. It must have room for a
                more important one wherever it has some for a less important one, unless that one's
                turn has come and the room is kept for it.
            only_ending: Those that go on to decode are left where they are.
        """
        line = [s for s in self._ready() if not (only_ending and s.goes_on)]
        starving = find_starving(line, now_s) if self._is_turn_of_starving else None
        if starving is not None and start(starving):
            self._is_turn_of_starving = False
            self.remove(starving)
            line.remove(starving)
        for sequence in self._preferred(line, now_s):
            if not start(sequence):
                break
            self._is_turn_of_starving = True
            self.remove(sequence)

    def remove(self, sequence: RunningSequence) -> None:
        """Take a waiting sequence out, wherever it stands."""
        self._waiting.remove(sequence)
        self.num_tokens -= num_prefill_tokens(sequence.state)

    def find(self, sequence_id: str) -> RunningSequence | None:
        """The waiting sequence of this id, or None."""
        return next((s for s in self._waiting if s.state.sequence_id == sequence_id), None)

    @property
    def tokens_by_priority(self) -> Counter[int]:
        """Tokens that wait to be computed, by priority."""
        tokens: Counter[int] = Counter()
        for sequence in self._waiting:
            tokens[sequence.state.priority] += num_prefill_tokens(sequence.state)
        return tokens

    @property
    def states(self) -> list[SequenceState]:
        """Of all that wait."""
        return [s.state for s in self._waiting]

    def expired(self, *, now_unix_s: float) -> list[RunningSequence]:
        """Sequences whose deadline has passed."""
        return [s for s in self._waiting if s.state.deadline_unix_s <= now_unix_s]

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> RunningSequence | None:
        """The most important that waits, of those that need no more layers than are loaded."""
        return next((s for s in self._waiting if s.min_layers <= self.num_layers), None)

    @property
    def first_ending(self) -> RunningSequence | None:
        """The same of those that end with their first token."""
        return next((s for s in self._ready() if not s.goes_on), None)

    @property
    def needs_layers(self) -> int:
        """Most layers that a sequence waits for; 0 where none does."""
        needs = (s.min_layers for s in self._waiting if s.min_layers > self.num_layers)
        return max(needs, default=0)

    def _ready(self) -> list[RunningSequence]:
        return [s for s in self._waiting if s.min_layers <= self.num_layers]

    def _preferred(self, line: list[RunningSequence], now_s: float) -> list[RunningSequence]:
        """The order to take from: head, the aged, the similar; others wait for the next batch.

        Priorities are never mixed by similarity: only the head's own class is reordered.
        """
        if not line:
            return []
        head = line[0]
        head_tokens = num_prefill_tokens(head.state)
        aged, similar, rest = [], [], []
        for sequence in line[1:]:
            num_tokens = num_prefill_tokens(sequence.state)
            ratio = max(num_tokens, head_tokens) / max(1, min(num_tokens, head_tokens))
            if sequence.state.priority != head.state.priority:
                rest.append(sequence)
            elif now_s - sequence.since_s >= self._max_age_s:
                aged.append(sequence)
            elif ratio <= SIMILAR_LENGTH_RATIO:
                similar.append(sequence)
            else:
                rest.append(sequence)
        return [head, *aged, *similar, *rest]
