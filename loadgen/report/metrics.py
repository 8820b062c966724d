"""Figures of a run, computed from its records. docs/loadgen.md defines them by symbol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from loadgen.checker import Outcome
from loadgen.runner import Record, RunResult

QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
LATE_TURN = 9  # from this turn of a conversation on (counted from 0) turns are taken together
MAX_LAG_S = 0.010  # a generator that sends later than this (P99) is too slow for its load


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one latency, in seconds; None where there is no value."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        data = np.fromiter(values, dtype=np.float64)
        if not data.size:
            return cls()
        p50, p90, p99 = np.percentile(data, list(QUANTILES.values()))
        return cls(
            data.size, float(data.mean()), float(p50), float(p90), float(p99), float(data.max())
        )


@dataclass(frozen=True, slots=True)
class LoadSlo:
    """Limits that a request must keep to count as good; None does not limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class TurnSummary:
    """Requests at one place of their conversations, or at several.

    Attributes:
        first, last: Which turns, from 0; both included.
        prompt_tokens, cached_tokens: Medians.
        shortened: Prompts that left out the oldest turns, to fit the context.
    """

    first: int
    last: int
    requests: int
    ok: int
    prompt_tokens: float | None
    cached_tokens: float | None
    shortened: int
    ttft: Distribution
    tpot: Distribution


@dataclass(slots=True)
class LoadSummary:
    """Figures of one run.

    Attributes:
        refused_attempts: With those after which a request was sent again.
        duration_s: First send to last end.
        tokens_per_write: Output tokens over writes that brought any.
        exits: Layers run → tokens, of requests whose service told.
        goodput_rps: Good requests per second; None without an SLO.
        good_share: Good requests over those that an SLO can judge, refused and failed included.
        lag: Of the generator itself: sent after its time.
        generator_cpu_share: CPU time of the generator over the duration, in cores.
        scores: Task → (right, judged).
        sessions: Conversations begun.
        turns: Their requests by place in the conversation; late ones together.
        unsent: Why conversations were broken off → turns that were therefore not sent.
        was_interrupted: What had not ended is missing.
        texts_not_verified: See `RunResult`.
    """

    requests: int = 0
    ok: int = 0
    refused: int = 0
    refused_attempts: int = 0
    failed: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    duration_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    output_tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    tokens_per_write: float | None = None
    exits: dict[int, int] = field(default_factory=dict)
    ttft: Distribution = Distribution()
    tpot: Distribution = Distribution()
    itl: Distribution = Distribution()
    stall: Distribution = Distribution()
    e2e: Distribution = Distribution()
    slo: LoadSlo = LoadSlo()
    goodput_rps: float | None = None
    good_share: float | None = None
    retry_after: Distribution = Distribution()
    lag: Distribution = Distribution()
    generator_cpu_share: float = 0.0
    scores: dict[str, tuple[int, int]] = field(default_factory=dict)
    sessions: int = 0
    turns: list[TurnSummary] = field(default_factory=list)
    unsent: dict[str, int] = field(default_factory=dict)
    was_interrupted: bool = False
    texts_not_verified: str = ""

    @property
    def generator_is_slow(self) -> bool:
        return self.lag.p99 is not None and self.lag.p99 > MAX_LAG_S

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"generator_is_slow": self.generator_is_slow}


def ttft_s(record: Record) -> float | None:
    """Send to the first token of any choice; None for answers that are not streamed."""
    if not record.spec.stream:
        return None
    firsts = [choice.writes[0].time_s for choice in record.verdict.choices if choice.writes]
    return min(firsts) - record.sent_s if firsts else None


def tpot_s(record: Record) -> float | None:
    """Mean time per token after the first, of the slowest choice; None below two tokens."""
    if not record.spec.stream:
        return None
    values = [
        (choice.writes[-1].time_s - choice.writes[0].time_s) / (choice.num_tokens - 1)
        for choice in record.verdict.choices
        if choice.num_tokens > 1
    ]
    return max(values) if values else None


def inter_token_gaps_s(record: Record) -> list[float]:
    """One gap per token after the first; tokens of one write arrive together: gaps of 0."""
    gaps: list[float] = []
    if record.spec.stream:
        for choice in record.verdict.choices:
            if choice.writes:
                gaps += [0.0] * (choice.writes[0].num_tokens - 1)
            for before, write in pairwise(choice.writes):
                gaps.append(write.time_s - before.time_s)
                gaps += [0.0] * (write.num_tokens - 1)
    return gaps


def stalls_s(record: Record) -> list[float]:
    """Gaps between arrivals: how long a reader looks at a text that does not grow.

    Writes that came in one read are one arrival.
    """
    if not record.spec.stream:
        return []
    return [
        write.time_s - before.time_s
        for choice in record.verdict.choices
        for before, write in pairwise(choice.writes)
        if write.time_s > before.time_s
    ]


def is_good(record: Record, slo: LoadSlo) -> bool:
    """Whether a request passed the checker and kept every limit that is set."""
    if record.verdict.outcome is not Outcome.OK:
        return False
    first, per_token = ttft_s(record), tpot_s(record)
    if slo.ttft_s is not None and (first is None or first > slo.ttft_s):
        return False
    return slo.tpot_s is None or per_token is None or per_token <= slo.tpot_s


def summarise(
    result: RunResult, slo: LoadSlo, *, unsent: Mapping[str, int] | None = None
) -> LoadSummary:
    """Compute all figures; latencies are over the requests that passed the checker only.

    Args:
        unsent: See `Summary`.
    """
    records = result.records
    good = [record for record in records if record.verdict.outcome is Outcome.OK]
    outcomes = Counter(record.verdict.outcome for record in records)
    summary = LoadSummary(
        requests=len(records),
        ok=outcomes[Outcome.OK],
        refused=outcomes[Outcome.REFUSED],
        refused_attempts=outcomes[Outcome.REFUSED] + sum(r.attempts - 1 for r in records),
        failed=outcomes[Outcome.FAILED],
        faults=_count_faults(records),
        slo=slo,
        scores=_scores(good),
        sessions=len({r.spec.session for r in records if r.spec.session is not None}),
        turns=_turns(records),
        unsent=dict(unsent or {}),
        was_interrupted=result.was_interrupted,
        texts_not_verified=result.texts_not_verified,
    )
    summary.retry_after = Distribution.of(
        r.verdict.retry_after_s for r in records if r.verdict.retry_after_s is not None
    )
    summary.lag = Distribution.of(record.lag_s for record in records)
    if not records:
        return summary
    first_s = min(record.sent_s for record in records)
    summary.duration_s = duration_s = max(record.ended_s for record in records) - first_s
    summary.generator_cpu_share = result.cpu_s / max(1e-9, result.end_s - result.start_s)
    summary.prompt_tokens = sum(record.verdict.prompt_tokens or 0 for record in good)
    summary.output_tokens = sum(_output_tokens(record) for record in good)
    summary.output_tokens_per_s = summary.output_tokens / duration_s
    summary.requests_per_s = len(good) / duration_s
    streamed = [record for record in good if record.spec.stream]
    num_writes = sum(len(c.writes) for record in streamed for c in record.verdict.choices)
    if num_writes:
        tokens = sum(c.num_tokens for record in streamed for c in record.verdict.choices)
        summary.tokens_per_write = tokens / num_writes
    summary.exits = _exits(good)
    summary.ttft = Distribution.of(v for r in good if (v := ttft_s(r)) is not None)
    summary.tpot = Distribution.of(v for r in good if (v := tpot_s(r)) is not None)
    summary.itl = Distribution.of(gap for r in good for gap in inter_token_gaps_s(r))
    summary.stall = Distribution.of(gap for r in good for gap in stalls_s(r))
    summary.e2e = Distribution.of(record.ended_s - record.sent_s for record in good)
    judged = [record for record in records if record.spec.stream]
    if judged and (slo.ttft_s is not None or slo.tpot_s is not None):
        num_good = sum(is_good(record, slo) for record in judged)
        summary.goodput_rps = num_good / duration_s
        summary.good_share = num_good / len(judged)
    return summary


def _output_tokens(record: Record) -> int:
    """Counted; by the usage where of several choices nobody told whose tokens are whose."""
    counted = sum(choice.num_tokens for choice in record.verdict.choices)
    return counted or record.verdict.completion_tokens or 0


def _exits(good: Sequence[Record]) -> dict[int, int]:
    told = [(record.verdict.extension or {}).get("exits") for record in good]
    counted = Counter[int]()
    for exits in told:
        counted.update({int(layers): count for layers, count in (exits or {}).items()})
    return dict(sorted(counted.items()))


def _count_faults(records: Sequence[Record]) -> dict[str, int]:
    """Requests by the kind of their first fault: later faults mostly follow from it."""
    firsts = Counter(
        str(record.verdict.faults[0].kind) for record in records if record.verdict.faults
    )
    return dict(firsts.most_common())


def _turns(records: Sequence[Record]) -> list[TurnSummary]:
    turns: dict[int, list[Record]] = {}
    for record in records:
        if record.spec.session is not None:
            turns.setdefault(min(record.spec.turn, LATE_TURN), []).append(record)
    summaries = []
    for first, found in sorted(turns.items()):
        good = [record for record in found if record.verdict.outcome is Outcome.OK]
        prompts = [r.verdict.prompt_tokens for r in good if r.verdict.prompt_tokens is not None]
        summaries.append(
            TurnSummary(
                first=first,
                last=max(record.spec.turn for record in found),
                requests=len(found),
                ok=len(good),
                prompt_tokens=float(np.median(prompts)) if prompts else None,
                cached_tokens=(
                    float(np.median([r.verdict.cached_tokens for r in good])) if good else None
                ),
                shortened=sum(record.spec.dropped_turns > 0 for record in found),
                ttft=Distribution.of(v for r in good if (v := ttft_s(r)) is not None),
                tpot=Distribution.of(v for r in good if (v := tpot_s(r)) is not None),
            )
        )
    return summaries


def _scores(records: Sequence[Record]) -> dict[str, tuple[int, int]]:
    scores: dict[str, tuple[int, int]] = {}
    for record in records:
        if record.score is not None:
            name = record.spec.task or "answer"
            right, judged = scores.get(name, (0, 0))
            scores[name] = (right + record.score, judged + 1)
    return dict(sorted(scores.items()))
