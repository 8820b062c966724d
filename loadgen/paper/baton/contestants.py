"""The contestants: how a batch is put together, everything else being equal.

All but the last run the same model, the same dense batch, and the same passes, on one core, prefill
included, and take the queries in the same order. What differs:

    run_to_completion  a batch is prefilled padded to its longest prompt, and decodes until its
                       longest answer is done ("Benchmark" in the paper)
    split              prefill apart, similar lengths together; batches as above ("PD")
    orca               a query joins when another ends, and all rows are padded to its prompt in
                       that step ("Baton", which the paper equates with Orca)
    inline             the same without the padding: the others wait while the prompt is computed
    chunked            the same, a chunk of the prompt between two steps
    baton              prefill apart, and a prefilled query joins when another ends ("Baton-PD")
    generate           run_to_completion by the `generate` of `transformers`, to look beyond us

A query is answered the moment it is done, whatever becomes of its row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from loadgen.paper.baton.generate import generate
from loadgen.paper.baton.inline import InlineRelay
from loadgen.paper.baton.queries import Query
from loadgen.paper.baton.record import Record
from loadgen.paper.baton.relay import Live, Relay
from quadriga.engine.baton.runner import BatonRunner

CHUNK_TOKENS = 256
PREFILL_AHEAD = 4
"""Queries prefilled at once where prefill is apart, in batches."""

Contestant = Callable[[BatonRunner, Record, Sequence[Query], int], None]


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
        self._ready: deque[Live] = deque()
        self._window = PREFILL_AHEAD * batch

    def take(self, count: int) -> list[Live]:
        """Up to so many prefilled queries; fewer when these are the last."""
        taken: list[Live] = []
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
    runner: BatonRunner, record: Record, queries: Sequence[Query], batch: int
) -> None:
    relay = Relay(runner, record)
    for first in range(0, len(queries), batch):
        lives = [relay.start(query) for query in queries[first : first + batch]]
        relay.compute_padded(lives)
        _complete(relay, lives)


def split(runner: BatonRunner, record: Record, queries: Sequence[Query], batch: int) -> None:
    relay = Relay(runner, record)
    stock = _Stock(relay, queries, batch)
    while lives := stock.take(batch):
        _complete(relay, lives)


def orca(runner: BatonRunner, record: Record, queries: Sequence[Query], batch: int) -> None:
    relay = InlineRelay(runner, record, batch)
    waiting = deque(queries)
    while waiting or relay.num_running:
        free = min(batch - relay.num_running, len(waiting))
        relay.step([waiting.popleft() for _ in range(free)])


def inline(runner: BatonRunner, record: Record, queries: Sequence[Query], batch: int) -> None:
    relay = Relay(runner, record)
    waiting = deque(queries)
    running: list[Live] = []
    while waiting or running:
        free = min(batch - len(running), len(waiting))
        joining = [relay.start(waiting.popleft()) for _ in range(free)]
        relay.compute(joining)
        running += joining
        relay.run_batch(running)
        running = relay.let_go(running)


def chunked(runner: BatonRunner, record: Record, queries: Sequence[Query], batch: int) -> None:
    relay = Relay(runner, record, chunk_tokens=CHUNK_TOKENS)
    waiting = deque(queries)
    joining: list[Live] = []
    running: list[Live] = []
    while waiting or joining or running:
        free = min(batch - len(running) - len(joining), len(waiting))
        joining += [relay.start(waiting.popleft()) for _ in range(free)]
        relay.compute(joining, passes=1)
        running += [live for live in joining if live.state.output_ids]
        joining = [live for live in joining if not live.state.output_ids]
        if running:
            relay.run_batch(running)
            running = relay.let_go(running)


def baton(runner: BatonRunner, record: Record, queries: Sequence[Query], batch: int) -> None:
    relay = Relay(runner, record)
    stock = _Stock(relay, queries, batch)
    running = stock.take(batch)
    while running:
        relay.run_batch(running)
        running = relay.let_go(running)
        running += stock.take(batch - len(running))


def _complete(relay: Relay, lives: list[Live]) -> None:
    """Decode a batch until the longest answer is done."""
    while not all(live.is_done for live in lives):
        relay.run_batch(lives)
    relay.let_go(lives)


CONTESTANTS: dict[str, Contestant] = {
    "run_to_completion": run_to_completion,
    "split": split,
    "orca": orca,
    "inline": inline,
    "chunked": chunked,
    "baton": baton,
    "generate": generate,
}
