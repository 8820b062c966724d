"""The order in which the sequences of a prefill replica ask for a decode replica."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from quadriga.core.request import remaining_of
from quadriga.scheduling.prefill_queue import STARVING_S, is_starving
from quadriga.scheduling.sequence import RunningSequence


class PlacementTurns:
    """Where no decode replica has room, sequences ask one after the other; on one event loop.

    Args:
        sequences: Those of the replica, by id; those with a `turn` wait for a place.
        now_s: A steady clock that goes as the event loop's does.
    """

    def __init__(
        self, sequences: Mapping[str, RunningSequence], now_s: Callable[[], float]
    ) -> None:
        self._sequences = sequences
        self._now_s = now_s
        self._orders = itertools.count()

    def is_free_for(self, priority: int) -> bool:
        """Whether no sequence waits that would be served before a new one of this priority."""
        return all(
            head.state.priority > priority and not is_starving(head, self._now_s())
            for head in self._heads()
        )

    @asynccontextmanager
    async def turn(self, sequence: RunningSequence) -> AsyncIterator[None]:
        """Wait for a sequence's turn; it lasts as long as the context.

        The most important first, of these the shortest by its predicted total, and the oldest
        beside it where it is starving. A sequence that comes to the head while another one has its
        turn gets its own beside it.
        """
        sequence.since_s, sequence.order = self._now_s(), next(self._orders)
        sequence.turn = asyncio.Event()
        self.call_heads()
        # A starving sequence becomes a head though none comes or goes.
        starving = asyncio.get_running_loop().call_later(STARVING_S, self.call_heads)
        try:
            await sequence.turn.wait()
            yield
        finally:
            starving.cancel()
            sequence.turn = None
            self.call_heads()

    def call_heads(self) -> None:
        """Give their turns to those who are first now; call it when a length becomes known."""
        for head in self._heads():
            if head.turn is not None:
                head.turn.set()

    def _heads(self) -> list[RunningSequence]:
        """Those whose turn it is: the first by rank, and the oldest where it is starving."""
        waiting = [s for s in self._sequences.values() if s.turn is not None]
        if not waiting:
            return []
        oldest, first = min(waiting, key=lambda s: s.order), min(waiting, key=_rank)
        is_apart = oldest is not first and is_starving(oldest, self._now_s())
        return [oldest, first] if is_apart else [first]


def _rank(sequence: RunningSequence) -> tuple[int, float, int]:
    """Importance, predicted total (unknown ones last), order of coming."""
    state = sequence.state
    remaining = remaining_of(state)
    total = math.inf if remaining is None else state.num_tokens + remaining.mean
    return state.priority, total, sequence.order
