"""What an overloaded service is held to, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from loadgen.checker import Outcome
from loadgen.report.experiment import table_of
from loadgen.report.figures import milliseconds
from loadgen.report.metrics import Distribution, tpot_s, ttft_s
from loadgen.runner import Record

PHASES = ("capacity", "calm", "overload", "recovery")
PRIORITIES = (0, 1, 2)
MAX_SLOWER = 2.0
MIN_GOODPUT = 0.9
MIN_SHARE = 0.5
"""Of the share let in on average: less would be starvation."""
MIN_KEPT = 0.5
MAX_LONGER = 1.25
"""Time until let in, over the time that was told."""
CALM_AGAIN = 10
"""So many requests in a row, in time and not refused, are a recovery."""


@dataclass(slots=True)
class Phase:
    """What came of one phase.

    Attributes:
        rate: Requests a second that were sent; None where clients waited for answers.
        goodput: Output tokens a second of requests that passed.
        cores: Processor cores in use, by kind of process; `client` is this one.
        end_s: When the last request was due, on the run's clock; answers come later.
    """

    name: str
    rate: float | None
    seconds: float
    records: list[Record]
    goodput: float = 0.0
    cores: dict[str, float] = field(default_factory=dict)
    end_s: float = 0.0

    def passed(self, priority: int | None = None) -> list[Record]:
        return [r for r in self._of(priority) if r.verdict.outcome is Outcome.OK]

    def share(self, priority: int | None = None) -> float:
        """Of the requests, those that were let in."""
        return len(self.passed(priority)) / max(1, len(self._of(priority)))

    def ttft(self, priority: int | None = None) -> Distribution:
        return Distribution.of(v for r in self.passed(priority) if (v := ttft_s(r)) is not None)

    def tpot(self, priority: int | None = None) -> Distribution:
        return Distribution.of(v for r in self.passed(priority) if (v := tpot_s(r)) is not None)

    def count(self, outcome: Outcome) -> int:
        return sum(r.verdict.outcome is outcome for r in self.records)

    @property
    def lag_p99_s(self) -> float | None:
        """How late the generator sent; who came back when told is not late by that."""
        return Distribution.of(r.lag_s for r in self.records if r.attempts == 1).p99

    def _of(self, priority: int | None) -> list[Record]:
        return [r for r in self.records if priority in (None, r.spec.extra["priority"])]


@dataclass(slots=True)
class Returns:
    """Refused callers that came back when told.

    Attributes:
        tries: How often each had to come back until it was let in; infinite: it never was.
        told_s: What the first refusal said to those that were.
        needed_s: From the first refusal until the one was let in.
    """

    tries: list[float] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    needed_s: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def kept(self) -> float:
        """Share let in at the first return."""
        return sum(t == 1 for t in self.tries) / max(1, len(self.tries))

    @property
    def in_vain(self) -> int:
        return self.tries.count(math.inf)

    @property
    def longer(self) -> float:
        """Time it took on average, by what was told."""
        return sum(self.needed_s) / max(1e-3, sum(self.told_s))


@dataclass(slots=True)
class Found:
    """All phases.

    Attributes:
        returns: After the burst.
        overload_returns: During the overload.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    returns: Returns = field(default_factory=Returns)
    overload_returns: Returns = field(default_factory=Returns)
    capacity_rps: float = 0.0
    burst_recovery_s: float | None = None
    recovery_s: float | None = None


def tokens_between(records: Sequence[Record], begin_s: float, end_s: float) -> int:
    """Output tokens that arrived in that time, of requests that passed."""
    return sum(
        write.num_tokens
        for record in records
        if record.verdict.outcome is Outcome.OK
        for choice in record.verdict.choices
        for write in choice.writes
        if begin_s <= write.time_s < end_s
    )


def recovered_after_s(calm: Phase, over: Phase, phase: Phase) -> float | None:
    """Seconds from the overload until `CALM_AGAIN` requests in a row were in time; None: never."""
    limit_s = MAX_SLOWER * (calm.ttft().p99 or 0.0)
    in_a_row: list[Record] = []
    for record in sorted(phase.records, key=lambda r: r.sent_s):
        first_s = ttft_s(record)
        is_fine = (
            record.verdict.outcome is Outcome.OK and first_s is not None and first_s <= limit_s
        )
        in_a_row = [*in_a_row, record] if is_fine else []
        if len(in_a_row) == CALM_AGAIN:
            return max(0.0, in_a_row[0].sent_s - over.end_s)
    return None


def judge(found: Found) -> list[str]:
    """What did not hold; empty: everything did."""
    if lacking := [name for name in PHASES if name not in found.phases]:
        return [f"not measured: {', '.join(lacking)}"]
    calm, over, peak = (found.phases[n] for n in ("calm", "overload", "capacity"))
    failures = [
        f"{phase.name}: {phase.count(Outcome.FAILED)} requests failed: {_first_fault(phase)}"
        for phase in found.phases.values()
        if phase.count(Outcome.FAILED)
    ]
    for what in ("ttft", "tpot"):
        limit_s = MAX_SLOWER * (getattr(calm, what)().p99 or 0.0)
        for priority in (None, *PRIORITIES):
            p99 = getattr(over, what)(priority).p99
            if p99 is None or p99 > limit_s:
                of = "" if priority is None else f" of priority {priority}"
                failures.append(
                    f"P99 {what}{of} is {milliseconds(p99)}, above {milliseconds(limit_s)}"
                )
    if over.goodput < MIN_GOODPUT * peak.goodput:
        failures.append(f"goodput {over.goodput:.0f} of {peak.goodput:.0f} tokens/s at the peak")
    failures += [
        f"priority {priority}: {over.share(priority):.1%} let in"
        for priority in PRIORITIES
        if over.share(priority) < MIN_SHARE * over.share()
    ]
    refused = [r for r in over.records if r.verdict.outcome is Outcome.REFUSED]
    if not refused:
        failures.append("no request was refused: this was no overload")
    if any(r.verdict.retry_after_s is None for r in refused):
        failures.append("a refusal did not say when to come back")
    for name, returns in (("burst", found.returns), ("overload", found.overload_returns)):
        if returns.failed:
            failures.append(f"{returns.failed} requests of the {name} failed")
        if returns.tries and returns.kept < MIN_KEPT:
            failures.append(f"{name}: Retry-After held for {returns.kept:.0%} only")
        if returns.longer > MAX_LONGER:
            failures.append(f"{name}: it took {returns.longer:.2f} times as long as was told")
    if found.recovery_s is None:
        failures.append("it did not recover")
    return failures


def figures(found: Found) -> dict[str, Any]:
    """For the last line."""
    phases = {}
    for phase in found.phases.values():
        ttft, tpot = phase.ttft(), phase.tpot()
        phases[phase.name] = {
            "rate_rps": phase.rate and round(phase.rate, 2),
            "sent": len(phase.records),
            "let_in": round(phase.share(), 4),
            "by_priority": {str(p): round(phase.share(p), 4) for p in PRIORITIES},
            "failed": phase.count(Outcome.FAILED),
            "goodput_tokens_per_s": round(phase.goodput, 1),
            "cores": phase.cores,
            "generator_late_p99_s": phase.lag_p99_s,
            "ttft_p50_p99_s": [ttft.p50, ttft.p99],
            "tpot_p50_p99_s": [tpot.p50, tpot.p99],
        }
    return {
        "capacity_rps": round(found.capacity_rps, 2),
        "phases": phases,
        "burst": {
            **_request_log(found.returns),
            "recovery_s": found.burst_recovery_s and round(found.burst_recovery_s, 2),
        },
        "returns_in_overload": _request_log(found.overload_returns),
        "recovery_s": found.recovery_s and round(found.recovery_s, 2),
    }


def _request_log(returns: Returns) -> dict[str, Any]:
    return {
        "refused": len(returns.tries),
        "let_in_at_first_return": round(returns.kept, 3),
        "never_let_in": returns.in_vain,
        "mean_told_s": mean(returns.told_s),
        "mean_needed_s": mean(returns.needed_s),
    }


def table(found: Found) -> Table:
    """A line for each phase."""
    columns: dict[str, Callable[[Phase], object]] = {
        "phase": lambda p: p.name,
        "requests/s": lambda p: "closed" if p.rate is None else f"{p.rate:.1f}",
        "sent": lambda p: len(p.records),
        "let in": lambda p: f"{p.share():.1%}",
        "of priority 0 / 1 / 2": lambda p: " / ".join(f"{p.share(i):.1%}" for i in PRIORITIES),
        "failed": lambda p: p.count(Outcome.FAILED),
        "tokens/s": lambda p: f"{p.goodput:.0f}",
        "TTFT P50 / P99": lambda p: milliseconds(p.ttft().p50, p.ttft().p99),
        "TPOT P50 / P99": lambda p: milliseconds(p.tpot().p50, p.tpot().p99),
    }
    return table_of(found.phases.values(), columns)


def mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None


def mean_tokens(phase: Phase) -> float:
    passed = phase.passed()
    return sum(r.verdict.choices[0].num_tokens for r in passed) / max(1, len(passed))


def _first_fault(phase: Phase) -> str:
    return next((str(r.verdict.faults[0]) for r in phase.records if r.verdict.faults), "")
