"""What came of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quadriga.errors import InvariantViolation
from quadriga.sim.records import Gaps

UNFINISHED = "unfinished"
_GAP_PARTS = 4  # a stretch of growing steps is counted as this many equal parts


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
    """The decode replicas at one tick.

    Attributes:
        variance_ms2: Of their step times.
        most_used, mean_used: Shares of the KV memory.
    """

    at_s: float
    variance_ms2: float
    mean_step_s: float
    most_used: float
    mean_used: float
    num_running: int


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
class Run:
    """Per request, in the order of arrival, and of the cluster as a whole.

    Attributes:
        first_token_s, finished_s: Absolute; NaN where it never came.
        failures: Reason by request.
        produced: Output tokens.
        preempted, rebuilt: Times.
        num_full: Preemptions because a memory was full ("out of memory").
        num_cancelled: Migrations given up before the source let go.
        end_s: When the run ended.
    """

    num_requests: int
    first_token_s: NDArray[np.float64] = field(init=False)
    finished_s: NDArray[np.float64] = field(init=False)
    produced: NDArray[np.int64] = field(init=False)
    preempted: NDArray[np.int64] = field(init=False)
    rebuilt: NDArray[np.int64] = field(init=False)
    failures: dict[int, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    migrations: list[Moved] = field(default_factory=list)
    gaps: list[Gaps] = field(default_factory=list)
    num_full: int = 0
    num_cancelled: int = 0
    end_s: float = 0.0

    def __post_init__(self) -> None:
        self.first_token_s = np.full(self.num_requests, np.nan)
        self.finished_s = np.full(self.num_requests, np.nan)
        self.produced = np.zeros(self.num_requests, dtype=np.int64)
        self.preempted = np.zeros(self.num_requests, dtype=np.int64)
        self.rebuilt = np.zeros(self.num_requests, dtype=np.int64)

    def close(self, index: int, now_s: float, failure: str | None) -> None:
        """A request is over. Raises: InvariantViolation when it was over before."""
        if not np.isnan(self.finished_s[index]) or index in self.failures:
            raise InvariantViolation(f"request {index} ended twice")
        if failure is None:
            self.finished_s[index] = now_s
        else:
            self.failures[index] = failure

    def end(self, now_s: float) -> None:
        """The run is over; what is open has failed."""
        self.end_s = now_s
        for index in np.flatnonzero(np.isnan(self.finished_s)).tolist():
            self.failures.setdefault(index, UNFINISHED)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run over the requests that arrived in a window.

    Attributes:
        goodput, throughput: Good, and finished, requests per second of the window.
        gap_p99_s: Inter-token gaps, all tokens of the run alike.
        variance_ms2: Of step times across replicas, mean over the window.
        most_used: Highest share of a replica's KV memory in the window.
    """

    rate: float
    goodput: float
    throughput: float
    tokens_per_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    gap_p99_s: float
    variance_ms2: float
    most_used: float
    num_requests: int
    num_failed: int
    num_full: int
    num_migrations: int
    stall_p99_s: float


def summarise(
    run: Run,
    arrivals_s: NDArray[np.float64],
    output_tokens: NDArray[np.int64],
    slo: Slo,
    *,
    from_s: float = 0.0,
    to_s: float = np.inf,
) -> Summary:
    """Return the figures of the requests that arrived in [from_s, to_s)."""
    mine = (arrivals_s >= from_s) & (arrivals_s < to_s)
    window_s = max(min(to_s, float(arrivals_s[-1])) - from_s, 1e-9)
    finished = mine & ~np.isnan(run.finished_s)
    ttft, tpot = latencies(run, arrivals_s, output_tokens)
    good = finished & (ttft <= slo.ttft_s) & (np.isnan(tpot) | (tpot <= slo.tpot_s))
    tpots = tpot[finished & ~np.isnan(tpot)]
    samples = [s for s in run.samples if from_s <= s.at_s < min(to_s, arrivals_s[-1])]
    stalls = [m.stall_s for m in run.migrations]
    return Summary(
        rate=float(mine.sum()) / window_s,
        goodput=float(good.sum()) / window_s,
        throughput=float(finished.sum()) / window_s,
        tokens_per_s=float(output_tokens[finished].sum()) / window_s,
        ttft_p99_s=_percentile(ttft[finished], 99),
        tpot_mean_s=float(tpots.mean()) if len(tpots) else np.nan,
        tpot_p50_s=_percentile(tpots, 50),
        tpot_p99_s=_percentile(tpots, 99),
        gap_p99_s=gap_percentile(run.gaps, 99),
        variance_ms2=float(np.mean([s.variance_ms2 for s in samples])) if samples else np.nan,
        most_used=max((s.most_used for s in samples), default=np.nan),
        num_requests=int(mine.sum()),
        num_failed=int((mine & np.isnan(run.finished_s)).sum()),
        num_full=run.num_full,
        num_migrations=len(run.migrations),
        stall_p99_s=_percentile(np.array(stalls), 99),
    )


def latencies(
    run: Run, arrivals_s: NDArray[np.float64], output_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """TTFT and TPOT of each request, seconds; NaN where there is none."""
    ttft = run.first_token_s - arrivals_s
    tpot = np.full(len(ttft), np.nan)
    several = output_tokens > 1
    tpot[several] = (run.finished_s - run.first_token_s)[several] / (output_tokens[several] - 1)
    return ttft, tpot


def gap_percentile(gaps: list[Gaps], percent: float) -> float:
    """Weighted percentile of inter-token gaps, seconds."""
    if not gaps:
        return float("nan")
    table = np.array([(g.first_s, g.last_s, g.weight) for g in gaps])
    parts = (np.arange(_GAP_PARTS) + 0.5) / _GAP_PARTS
    values = (table[:, :1] + (table[:, 1:2] - table[:, :1]) * parts).ravel()
    weights = np.repeat(table[:, 2] / _GAP_PARTS, _GAP_PARTS)
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    at = int(np.searchsorted(total, percent / 100.0 * total[-1]))
    return float(values[order][min(at, len(values) - 1)])


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")
