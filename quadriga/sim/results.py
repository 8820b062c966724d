"""What came of a simulated run: its records, and the figures computed from them.

Rates are given over two spans, because neither is enough. The arrival window is the time in
which the counted requests arrive; what ends after it does not count there, so that a queue that
only the end of the load empties is not mistaken for throughput. The makespan lasts until the last
counted request finished; everything that finished counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quadriga.errors import InvariantViolation
from quadriga.sim.records import Gaps

UNFINISHED = "unfinished"
_GAP_PARTS = 4  # a stretch of growing steps is counted as this many equal parts

Floats = NDArray[np.float64]
Span = tuple[float, float]
"""From and to, absolute simulated seconds."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good when it finished inside both limits.

    Attributes:
        ttft_s: Arrival to first token.
        tpot_s: Mean time per output token after the first.
    """

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The decode replicas at one tick. There are no samples while the cluster is empty.

    Attributes:
        variance_ms2: Of their step times.
        most_used, mean_used: Share of a replica's KV memory that running sequences hold.
        most_wanted: With what paused sequences and those on their way there will hold; can be
            above 1.
        num_waiting: Prefilled sequences for which no decode replica has room.
    """

    at_s: float
    variance_ms2: float
    mean_step_s: float
    most_used: float
    mean_used: float
    most_wanted: float
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Moved:
    """One finished migration."""

    request: int
    source: int
    destination: int
    cause: str
    started_s: float
    stall_s: float
    num_tokens: int


@dataclass(slots=True)
class SimulatedRun:
    """Per request, in the order of arrival, and of the cluster as a whole.

    Attributes:
        num_prefill: Prefill replicas.
        first_token_s, finished_s: Absolute; NaN where it never came.
        prefill_wait_s: In the prefill queue, the first time; NaN where it was never prefilled.
        room_wait_s: Prefilled, without a decode replica that has room; summed.
        failures: Reason by request.
        examples: Reason → the message of the first request that failed for it.
        produced: Output tokens.
        preempted, rebuilt: Times.
        full_s: When a sequence was preempted because a memory was full ("out of memory").
        prefill_busy: Spans in which a prefill replica computed.
        prefill_blocked: Spans in which one stood still with a queue, because all its rows held
            sequences that waited for a decode replica.
        num_lowered: Tokens that left below their threshold within the budgets of their requests.
        num_cancelled: Migrations given up before the source let go.
        depth_gains: By tick: what shallow and deep sequences apart save of a token's time, or
            would; none where there is no choice.
        num_ticks_apart: Ticks at which they were apart.
        end_s: When the run ended.
    """

    num_requests: int
    num_prefill: int = 1
    first_token_s: Floats = field(init=False)
    finished_s: Floats = field(init=False)
    prefill_wait_s: Floats = field(init=False)
    room_wait_s: Floats = field(init=False)
    produced: NDArray[np.int64] = field(init=False)
    preempted: NDArray[np.int64] = field(init=False)
    rebuilt: NDArray[np.int64] = field(init=False)
    failures: dict[int, str] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    migrations: list[Moved] = field(default_factory=list)
    gaps: list[Gaps] = field(default_factory=list)
    full_s: list[float] = field(default_factory=list)
    prefill_busy: list[Span] = field(default_factory=list)
    prefill_blocked: list[Span] = field(default_factory=list)
    num_lowered: float = 0.0
    num_cancelled: int = 0
    depth_gains: list[float] = field(default_factory=list)
    num_ticks_apart: int = 0
    end_s: float = 0.0

    def __post_init__(self) -> None:
        self.first_token_s = np.full(self.num_requests, np.nan)
        self.finished_s = np.full(self.num_requests, np.nan)
        self.prefill_wait_s = np.full(self.num_requests, np.nan)
        self.room_wait_s = np.zeros(self.num_requests)
        self.produced = np.zeros(self.num_requests, dtype=np.int64)
        self.preempted = np.zeros(self.num_requests, dtype=np.int64)
        self.rebuilt = np.zeros(self.num_requests, dtype=np.int64)

    @property
    def num_full(self) -> int:
        """Preemptions because a memory was full."""
        return len(self.full_s)

    def close(self, index: int, now_s: float, failure: str | None, message: str = "") -> None:
        """A request is over. Raises: InvariantViolation when it was over before."""
        if not np.isnan(self.finished_s[index]) or index in self.failures:
            raise InvariantViolation(f"request {index} ended twice")
        if failure is None:
            self.finished_s[index] = now_s
        else:
            self.failures[index] = failure
            self.examples.setdefault(failure, message)

    def end(self, now_s: float) -> None:
        """The run is over; what is open has failed."""
        self.end_s = now_s
        for index in np.flatnonzero(np.isnan(self.finished_s)).tolist():
            if self.failures.setdefault(index, UNFINISHED) is UNFINISHED:
                self.examples.setdefault(UNFINISHED, f"the run ended at {now_s:,.0f} s")


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second of a span; NaN where the span has no length.

    Attributes:
        finished: Requests that ended in the span with all their tokens.
        good: Those of them that kept the SLO.
        tokens: Output tokens in the span, of requests that finished then or later; a request's
            tokens are taken as evenly spread from its first token to its last.
    """

    span_s: float
    finished: float
    good: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one time, in seconds; NaN where there is no value."""

    count: int
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of a run over the requests that arrived in a window.

    Attributes:
        rate: Arrivals per second of the window; NaN where all arrive at once.
        window, makespan: See the module.
        good_share: Good requests over all that arrived in the window, failed ones included.
        ttft, tpot: Of the counted requests that finished.
        prefill_wait: In the prefill queue; a part of TTFT.
        room_wait: Between prefill and decode, for want of memory; of those that waited.
        gap: Between two tokens, all tokens of the span alike.
        stall: Of migrations.
        variance_ms2: Of step times across replicas, mean over the span while any decodes.
        most_used, mean_used: KV memory held by running sequences: the highest share of any
            replica, and the mean over replicas and time.
        most_wanted: See `Sample`.
        prefill_busy_share, prefill_blocked_share: Of the prefill replicas' time in the window.
        num_full: Preemptions for want of memory.
        failures: Reason → counted requests.
    """

    num_requests: int
    rate: float
    window: Rates
    makespan: Rates
    good_share: float
    ttft: Spread
    tpot: Spread
    prefill_wait: Spread
    room_wait: Spread
    gap: Spread
    stall: Spread
    variance_ms2: float
    most_used: float
    mean_used: float
    most_wanted: float
    prefill_busy_share: float
    prefill_blocked_share: float
    num_full: int
    num_migrations: int
    failures: dict[str, int]

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())


def summarise(
    run: SimulatedRun,
    arrivals_s: Floats,
    output_tokens: NDArray[np.int64],
    slo: Slo,
    *,
    from_s: float = 0.0,
    to_s: float = np.inf,
) -> RunSummary:
    """Return the figures of the requests that arrived in [from_s, to_s).

    Latencies, waits and failures are those requests'. What belongs to the cluster (memory, steps,
    gaps, moves) is counted from `from_s` to `to_s`, or to the end of the run.
    """
    mine = (arrivals_s >= from_s) & (arrivals_s < to_s)
    finished = mine & ~np.isnan(run.finished_s)
    ttft, tpot = latencies(run, arrivals_s, output_tokens)
    is_good = ~np.isnan(run.finished_s) & (ttft <= slo.ttft_s)
    is_good &= np.isnan(tpot) | (tpot <= slo.tpot_s)
    begin_s = max(from_s, float(arrivals_s[0]))
    window = (begin_s, min(to_s, float(arrivals_s[-1])))
    last_s = float(run.finished_s[finished].max()) if finished.any() else run.end_s
    until_s = min(to_s, run.end_s)
    everyone = np.ones(len(mine), dtype=bool)
    samples = [s for s in run.samples if from_s <= s.at_s <= until_s]
    busy = [s.variance_ms2 for s in samples if s.num_running]
    moves = [m for m in run.migrations if from_s <= m.started_s <= until_s]
    prefill_s = run.num_prefill * (window[1] - window[0])
    return RunSummary(
        num_requests=int(mine.sum()),
        rate=_ratio(float(mine.sum()), window[1] - window[0]),
        window=_rates(run, output_tokens, is_good, everyone, window),
        makespan=_rates(run, output_tokens, is_good, mine, (begin_s, last_s)),
        good_share=_ratio(float((mine & is_good).sum()), float(mine.sum())),
        ttft=spread(ttft[finished]),
        tpot=spread(tpot[finished & ~np.isnan(tpot)]),
        prefill_wait=spread(run.prefill_wait_s[mine & ~np.isnan(run.prefill_wait_s)]),
        room_wait=spread(run.room_wait_s[mine & (run.room_wait_s > 0.0)]),
        gap=gap_spread([g for g in run.gaps if from_s <= g.at_s <= until_s]),
        stall=spread(np.array([m.stall_s for m in moves])),
        variance_ms2=float(np.mean(busy)) if busy else np.nan,
        most_used=max((s.most_used for s in samples), default=np.nan),
        mean_used=float(np.mean([s.mean_used for s in samples])) if samples else np.nan,
        most_wanted=max((s.most_wanted for s in samples), default=np.nan),
        prefill_busy_share=_ratio(_overlap_s(run.prefill_busy, window), prefill_s),
        prefill_blocked_share=_ratio(_overlap_s(run.prefill_blocked, window), prefill_s),
        num_full=sum(from_s <= at_s <= until_s for at_s in run.full_s),
        num_migrations=len(moves),
        failures=dict(Counter(run.failures[i] for i in sorted(run.failures) if mine[i])),
    )


def latencies(
    run: SimulatedRun, arrivals_s: Floats, output_tokens: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """TTFT and TPOT of each request, seconds; NaN where there is none."""
    ttft = run.first_token_s - arrivals_s
    tpot = np.full(len(ttft), np.nan)
    several = output_tokens > 1
    tpot[several] = (run.finished_s - run.first_token_s)[several] / (output_tokens[several] - 1)
    return ttft, tpot


def _rates(
    run: SimulatedRun,
    output_tokens: NDArray[np.int64],
    is_good: NDArray[np.bool_],
    mine: NDArray[np.bool_],
    span: Span,
) -> Rates:
    """Rates over a span of those of `mine` that ended in it, both ends included."""
    from_s, to_s = span
    ended = mine & (run.finished_s >= from_s) & (run.finished_s <= to_s)  # NaN is neither
    decoding_s = run.finished_s - run.first_token_s
    inside_s = np.minimum(run.finished_s, to_s) - np.maximum(run.first_token_s, from_s)
    later = np.divide(
        np.maximum(inside_s, 0.0), decoding_s, out=np.zeros(len(mine)), where=decoding_s > 0.0
    )
    is_first_inside = (run.first_token_s >= from_s) & (run.first_token_s <= to_s)
    tokens = (is_first_inside + later * (output_tokens - 1))[mine & ~np.isnan(run.finished_s)]
    span_s = to_s - from_s
    return Rates(
        span_s=span_s,
        finished=_ratio(float(ended.sum()), span_s),
        good=_ratio(float((ended & is_good).sum()), span_s),
        tokens=_ratio(float(tokens.sum()), span_s),
    )


def spread(values: Floats) -> Spread:
    """Return the percentiles of some seconds."""
    if not len(values):
        return Spread(0, np.nan, np.nan, np.nan, np.nan)
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return Spread(len(values), float(values.mean()), p50, p99, float(values.max()))


def gap_spread(gaps: Sequence[Gaps]) -> Spread:
    """Return the percentiles of gaps between tokens, each gap as often as there are tokens."""
    if not gaps:
        return spread(np.empty(0))
    table = np.array([(g.first_s, g.last_s, g.weight) for g in gaps])
    parts = (np.arange(_GAP_PARTS) + 0.5) / _GAP_PARTS
    values = (table[:, :1] + (table[:, 1:2] - table[:, :1]) * parts).ravel()
    weights = np.repeat(table[:, 2] / _GAP_PARTS, _GAP_PARTS)
    order = np.argsort(values, kind="stable")
    values, total = values[order], np.cumsum(weights[order])
    at = np.searchsorted(total, np.array([0.50, 0.99]) * total[-1]).clip(max=len(values) - 1)
    p50, p99 = values[at].tolist()
    mean_s = float(table[:, 2] @ (table[:, 0] + table[:, 1]) / 2.0 / table[:, 2].sum())
    most_s = float(table[:, :2].max())
    return Spread(int(table[:, 2].sum()), mean_s, p50, p99, most_s)


def _overlap_s(spans: Sequence[Span], window: Span) -> float:
    """Seconds of the spans that lie in a window."""
    if not spans:
        return 0.0
    table = np.array(spans).clip(*window)
    return float((table[:, 1] - table[:, 0]).sum())


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0.0 else np.nan
