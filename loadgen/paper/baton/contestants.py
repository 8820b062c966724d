"""The contestants: how a batch is put together, everything else being equal.

All run the same model, the same dense batch, and the same passes, on one core, prefill
included, and take the queries in the same order. What differs:

    run_to_completion  a batch is prefilled padded to its longest prompt, and decodes until its
                       longest answer is done ("Benchmark" in the paper)
    split              prefill apart, similar lengths together; batches as above ("PD")
    orca               a query joins when another ends, and all rows are padded to its prompt in
                       that step ("Baton", which the paper equates with Orca)
    baton              prefill apart, and a prefilled query joins when another ends ("Baton-PD")

A query is answered the moment it is done, whatever becomes of its row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from loadgen.paper.baton.inline import InlineRelay
from loadgen.paper.baton.queries import Query
from loadgen.paper.baton.record import QueryRecord
from loadgen.paper.baton.relay import LiveQuery, Relay
from quadriga.engine.baton.runner import BatonRunner

PREFILL_AHEAD = 4
"""Queries prefilled at once where prefill is apart, in batches."""

Contestant = Callable[[BatonRunner, QueryRecord, Sequence[Query], int], None]


def rows_needed(batch: int) -> int:
    """Rows that a contestant of this batch size may hold: prefilled ahead, and running."""
    return (PREFILL_AHEAD + 1) * batch


class _Stock:
    """Queries prefilled ahead of their turn, similar lengths together; in order of arrival.

    Source: BATON §4.2.
    """

    def __init__(self, relay: Relay, queries: Sequence[Query], batch: int) -> None:
        self._relay = relay
        self._waiting = deque(queries)
        self._ready: deque[LiveQuery] = deque()
        self._window = PREFILL_AHEAD * batch

    def take(self, count: int) -> list[LiveQuery]:
        """Up to so many prefilled queries; fewer when these are the last."""
        taken: list[LiveQuery] = []
        while len(taken) < count:
            if not self._ready and not self._refill():
                break
            taken.append(self._ready.popleft())
        return taken

    def _refill(self) -> bool:
        count = min(self._window, len(self._waiting))
        lives = [self._relay.start(self._waiting.popleft()) for _ in range(count)]
        self._relay.compute(lives)
        self._ready.extend(lives)
        return bool(lives)


def run_to_completion(
    runner: BatonRunner, record: QueryRecord, queries: Sequence[Query], batch: int
) -> None:
    relay = Relay(runner, record)
    for first in range(0, len(queries), batch):
        lives = [relay.start(query) for query in queries[first : first + batch]]
        relay.compute_padded(lives)
        _complete(relay, lives)


def split(runner: BatonRunner, record: QueryRecord, queries: Sequence[Query], batch: int) -> None:
    relay = Relay(runner, record)
    stock = _Stock(relay, queries, batch)
    while lives := stock.take(batch):
        _complete(relay, lives)


def orca(runner: BatonRunner, record: QueryRecord, queries: Sequence[Query], batch: int) -> None:
    relay = InlineRelay(runner, record, batch)
    waiting = deque(queries)
    while waiting or relay.num_running:
        free = min(batch - relay.num_running, len(waiting))
        relay.step([waiting.popleft() for _ in range(free)])


def baton(runner: BatonRunner, record: QueryRecord, queries: Sequence[Query], batch: int) -> None:
    relay = Relay(runner, record)
    stock = _Stock(relay, queries, batch)
    running = stock.take(batch)
    while running:
        relay.run_batch(running)
        running = relay.let_go(running)
        running += stock.take(batch - len(running))


def _complete(relay: Relay, lives: list[LiveQuery]) -> None:
    """Decode a batch until the longest answer is done."""
    while not all(live.is_done for live in lives):
        relay.run_batch(lives)
    relay.let_go(lives)


CONTESTANTS: dict[str, Contestant] = {
    "run_to_completion": run_to_completion,
    "split": split,
    "orca": orca,
    "baton": baton,
}
