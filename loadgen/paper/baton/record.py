"""What a run over a query set did: tokens over time, work that was of no use, memory held."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from loadgen.paper.baton.queries import Query


@dataclass(frozen=True, slots=True)
class MemorySample:
    """K/V memory at one moment.

    Attributes:
        taken_bytes: Columns × rows in use, padding included, and rows outside the batch.
        allocated_bytes: With the room to grow.
        live_bytes: K/V of tokens of unfinished queries: what is really needed.
    """

    time_s: float
    taken_bytes: int
    allocated_bytes: int
    live_bytes: int


@dataclass(slots=True)
class QueryRecord:
    """A run of one contestant over one query set; every query is there from the start.

    Attributes:
        now_s: The clock; `begin` sets it to 0.
        computed: Positions computed: rows × tokens of every pass, padding included.
        useful: Those that were a prompt token, or that gave an unfinished query its next token.
        steps: Passes that gave running rows their next token.
        tokens: (time, indices of the queries that got a token then).
        first_s, done_s: By query index.
    """

    now_s: Callable[[], float]
    began_s: float = 0.0
    seconds: float = 0.0
    computed: int = 0
    useful: int = 0
    steps: int = 0
    tokens: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    first_s: dict[int, float] = field(default_factory=dict)
    done_s: dict[int, float] = field(default_factory=dict)
    memory: list[MemorySample] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)

    def begin(self) -> None:
        self.began_s = self.now_s()

    def end(self) -> None:
        self.seconds = self.now_s() - self.began_s

    def passed(self, *, computed: int, useful: int) -> None:
        """A pass over `computed` positions is done."""
        self.computed += computed
        self.useful += useful

    def emitted(self, tokens: Iterable[tuple[Query, int]]) -> None:
        """Queries got their next tokens; what comes after a query's end is dropped."""
        now_s = self.now_s() - self.began_s
        got = []
        for query, token_id in tokens:
            output = self.outputs.setdefault(query.index, [])
            if len(output) >= query.num_output:
                continue
            output.append(token_id)
            got.append(query.index)
            self.first_s.setdefault(query.index, now_s)
            if len(output) == query.num_output:
                self.done_s[query.index] = now_s
        if got:
            self.tokens.append((now_s, tuple(got)))

    def held(self, *, taken_bytes: int, allocated_bytes: int, live_bytes: int) -> None:
        """Note the memory held now."""
        time_s = self.now_s() - self.began_s
        self.memory.append(MemorySample(time_s, taken_bytes, allocated_bytes, live_bytes))

    @property
    def idle_share(self) -> float:
        """Share of the positions computed that were of no use."""
        return 1.0 - self.useful / self.computed if self.computed else 0.0

    @property
    def peak_bytes(self) -> int:
        return max((m.allocated_bytes for m in self.memory), default=0)

    @property
    def memory_in_use(self) -> float:
        """Share of the memory taken that unfinished queries needed, over time."""
        pairs = list(itertools.pairwise(self.memory))
        taken = sum(a.taken_bytes * (b.time_s - a.time_s) for a, b in pairs)
        live = sum(a.live_bytes * (b.time_s - a.time_s) for a, b in pairs)
        return live / taken if taken else 0.0

    def gaps_s(self) -> list[float]:
        """All times between two tokens of a query."""
        last: dict[int, float] = {}
        gaps = []
        for time_s, indices in self.tokens:
            for index in indices:
                if index in last:
                    gaps.append(time_s - last[index])
                last[index] = time_s
        return gaps


@dataclass(frozen=True, slots=True)
class BatonSetting:
    """A query set at a batch size."""

    name: str  # "mixed" or "brief"
    num_queries: int
    batch: int


@dataclass(slots=True)
class BatonRow:
    """One contestant in one setting, all rounds.

    Attributes:
        ceilings: See `step_ceiling`, by round.
        ties: Queries whose tokens part from the other contestants' where the two best logits are
            equal up to rounding.
    """

    setting: BatonSetting
    contestant: str
    records: list[QueryRecord] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    ties: int = 0

    @property
    def seconds(self) -> float:
        return statistics.median(r.seconds for r in self.records)
