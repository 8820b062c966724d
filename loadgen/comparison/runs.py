"""Compare the runs of two sides: every figure with its interval."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from loadgen.checker import Outcome, Verdict
from loadgen.comparison.intervals import (
    Finding,
    MeanDifference,
    Statistic,
    Values,
    difference,
    difference_of_runs,
    mean,
    percentile,
)
from loadgen.load.workload import RequestSpec
from loadgen.report.metrics import LoadSlo, is_good, stalls_s, tpot_s, ttft_s
from loadgen.report.results import RunResults, StepLine
from loadgen.runner import Record

MIN_FOR_MEDIAN = 30
MIN_FOR_P99 = 300  # three requests lie beyond; with fewer the bootstrap of a tail misleads
MIN_FOR_MEAN = 30
NUM_SLICES = 40  # of a run's duration, for figures per second
MIN_PAIRED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that is compared.

    Attributes:
        value: Of one request; None where it has none.
        is_of_all: Over all requests, failed and refused ones included; else over those that passed.
        in_blocks: Neighbours are alike by chance, so they are drawn together. Failures and wrong
            answers are alike for a reason: a stretch of them is no noise.
        scale: From the value's unit to the one shown.
    """

    name: str
    unit: str
    value: Callable[[Record], float | None]
    statistic: Statistic
    min_values: int
    scale: float = 1e3
    is_lower_better: bool = True
    is_of_all: bool = False
    in_blocks: bool = True


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A line of the comparison.

    Attributes:
        group: Step of a ramp; empty for a run.
    """

    group: str
    name: str
    unit: str
    is_lower_better: bool
    difference: MeanDifference

    @property
    def verdict(self) -> str:
        finding = self.difference.finding
        if finding in (Finding.NOISE, Finding.TOO_FEW):
            return str(finding)
        return "better" if (finding is Finding.LOWER) is self.is_lower_better else "worse"

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self.difference) | {"ratio": self.difference.ratio}
        named = {"group": self.group, "figure": self.name, "unit": self.unit}
        return named | found | {"verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Method:
    """How intervals are computed.

    Attributes:
        margin_share: Of A's figure; smaller differences of latencies and speeds do not count.
    """

    margin_share: float
    confidence: float
    num_draws: int
    seed: int


def compare(
    a: Sequence[RunResults],
    b: Sequence[RunResults],
    slo: LoadSlo,
    method: Method,
    *,
    same_load: bool,
) -> Iterator[ComparedFigure | None]:
    """Yield every figure, `num_figures` in all; None for one that a run lacks.

    Args:
        a, b: One run each, or two or more each.
        same_load: Requests of the same index are the same requests.
    """
    for group, left, right in _groups(a, b):
        for figure in _figures(slo):
            if len(left) == 1:
                found = _of_requests(group, figure, left[0], right[0], method, same_load=same_load)
            else:
                found = _of_runs(figure, left, right, method)
            yield _row(group, figure.name, figure.unit, found, figure.is_lower_better)
        if not group:
            tokens = _tokens_per_s(left, right, method)
            yield _row(group, "output tokens", "/s", tokens, is_lower_better=False)


def _row(
    group: str, name: str, unit: str, found: MeanDifference | None, is_lower_better: bool
) -> ComparedFigure | None:
    return None if found is None else ComparedFigure(group, name, unit, is_lower_better, found)


def num_figures(a: Sequence[RunResults], b: Sequence[RunResults], slo: LoadSlo) -> int:
    """Return how many figures there are to compare."""
    groups = _groups(a, b)
    return len(groups) * len(_figures(slo)) + sum(not group for group, _, _ in groups)


def slo_of(runs: Sequence[RunResults], ttft_s: float | None, tpot_s: float | None) -> LoadSlo:
    """Return each limit that is given, else the one that all runs had, if they had one."""

    def own(limits: set[float | None]) -> float | None:
        return limits.pop() if len(limits) == 1 else None

    return LoadSlo(
        own({run.summary.slo.ttft_s for run in runs}) if ttft_s is None else ttft_s,
        own({run.summary.slo.tpot_s for run in runs}) if tpot_s is None else tpot_s,
    )


def longest_stall_s(record: Record) -> float | None:
    """The longest time without anything new; None for answers of one write."""
    return max(stalls_s(record), default=None)


def e2e_s(record: Record) -> float:
    """Send to last byte."""
    return record.ended_s - record.sent_s


def _is_within(record: Record, *, slo: LoadSlo) -> bool | None:
    return is_good(record, slo) if record.spec.stream else None


def _figures(slo: LoadSlo) -> list[Figure]:
    latencies: dict[str, Callable[[Record], float | None]] = {
        "TTFT": ttft_s,
        "TPOT": tpot_s,
        "longest stall": longest_stall_s,
        "E2E": e2e_s,
    }
    figures = []
    for name, value in latencies.items():
        figures += [
            Figure(f"{name} P50", "ms", value, percentile(50), MIN_FOR_MEDIAN),
            Figure(f"{name} P99", "ms", value, percentile(99), MIN_FOR_P99),
        ]

    def share(name: str, value: Callable[[Record], float | None], *, in_blocks: bool) -> Figure:
        return Figure(name, "%", value, mean, MIN_FOR_MEAN, 100.0, False, True, in_blocks)

    figures.append(
        share("passed", lambda record: record.verdict.outcome is Outcome.OK, in_blocks=False)
    )
    if slo.ttft_s is not None or slo.tpot_s is not None:
        within = partial(_is_within, slo=slo)
        figures.append(share("within SLO", within, in_blocks=True))
    figures.append(share("right answers", lambda record: record.score, in_blocks=False))
    return figures


def _of_requests(
    group: str,
    figure: Figure,
    left: Sequence[Record],
    right: Sequence[Record],
    method: Method,
    *,
    same_load: bool,
) -> MeanDifference | None:
    """Compare two runs by their requests."""
    of_a, of_b = _values(figure, left), _values(figure, right)
    common = [index for index in of_a if index in of_b]
    is_paired = same_load and len(common) >= MIN_PAIRED_SHARE * max(len(of_a), len(of_b))
    is_paired &= min(of_a.keys() ^ of_b.keys(), default=0) >= 0  # none was given up by one alone
    if is_paired:
        of_a, of_b = ({index: values[index] for index in common} for values in (of_a, of_b))
    if not of_a or not of_b:
        return None
    a, b = (_array(figure, values) for values in (of_a, of_b))
    return difference(
        a,
        b,
        figure.statistic,
        is_paired=is_paired,
        in_blocks=figure.in_blocks,
        min_values=figure.min_values,
        margin_share=0.0 if figure.is_of_all else method.margin_share,
        confidence=method.confidence,
        num_draws=method.num_draws,
        seed=_seed(method, group + figure.name),
    )


def _of_runs(
    figure: Figure,
    left: Sequence[Sequence[Record]],
    right: Sequence[Sequence[Record]],
    method: Method,
) -> MeanDifference | None:
    """Compare two sides by the spread between their runs."""
    sides = []
    for runs in (left, right):
        values = [_array(figure, _values(figure, records)) for records in runs]
        if not all(len(one) for one in values):
            return None
        sides.append(np.array([float(figure.statistic(one[None, :])[0]) for one in values]))
    return difference_of_runs(
        *sides,
        margin_share=0.0 if figure.is_of_all else method.margin_share,
        confidence=method.confidence,
    )


def _array(figure: Figure, values: dict[int, float]) -> Values:
    return figure.scale * np.array([*values.values()], dtype=np.float64)


def _values(figure: Figure, records: Sequence[Record]) -> dict[int, float]:
    """Return index → value, in order of time: what was sent together stays together."""
    return {
        record.spec.index: float(value)
        for record in sorted(records, key=lambda record: record.sent_s)
        if (figure.is_of_all or record.verdict.outcome is Outcome.OK)
        and (value := figure.value(record)) is not None
    }


def _tokens_per_s(
    left: Sequence[Sequence[Record]], right: Sequence[Sequence[Record]], method: Method
) -> MeanDifference | None:
    sides = [[_slices(records) for records in runs] for runs in (left, right)]
    a, b = ([one for one in side if one is not None] for side in sides)
    if len(a) < len(left) or len(b) < len(right):
        return None
    if len(left) > 1:
        return difference_of_runs(
            np.array([one.mean() for one in a]),
            np.array([one.mean() for one in b]),
            margin_share=method.margin_share,
            confidence=method.confidence,
        )
    found = difference(
        a[0],
        b[0],
        mean,
        is_paired=False,
        min_values=NUM_SLICES,
        seed=_seed(method, "tokens"),
        margin_share=method.margin_share,
        confidence=method.confidence,
        num_draws=method.num_draws,
    )
    # There are as many slices of few requests.
    passed = (sum(r.verdict.outcome is Outcome.OK for r in side[0]) for side in (left, right))
    return found if min(passed) >= MIN_FOR_MEAN else replace(found, low=None, high=None)


def _slices(records: Sequence[Record]) -> Values | None:
    """Return tokens per second in equal slices, [NUM_SLICES]; their mean is the run's."""
    passed = [record for record in records if record.verdict.outcome is Outcome.OK]
    writes = [w for r in passed for choice in r.verdict.choices for w in choice.writes]
    if not writes:
        return None
    from_s = min(record.sent_s for record in records)
    to_s = max(max(record.ended_s for record in records), from_s + 1e-9)
    counts, edges = np.histogram(
        [write.time_s for write in writes],
        bins=np.linspace(from_s, to_s, NUM_SLICES + 1),
        weights=[write.num_tokens for write in writes],
    )
    return np.asarray(counts / np.diff(edges), dtype=np.float64)


_Side = Sequence[Sequence[Record]]
"""Records of each run of a side."""


def _groups(a: Sequence[RunResults], b: Sequence[RunResults]) -> list[tuple[str, _Side, _Side]]:
    """Return (name, side, side): one group for runs, one for each step that all ramps finished."""
    runs = [*a, *b]
    if runs[0].header.kind == "run":
        return [("", [run.records for run in a], [run.records for run in b])]
    capacity = runs[0].capacity
    unit = "/s" if capacity is not None and capacity.unit == "rate" else " at a time"
    groups: list[tuple[str, _Side, _Side]] = []
    for number, lines in enumerate(zip(*(run.steps for run in runs), strict=False)):
        step = lines[0].step
        if any(other.step != step for other in lines):
            break
        sides = [[_due(run.records, run.steps[number]) for run in side] for side in (a, b)]
        groups.append((f"{step.level:.4g}{unit}", sides[0], sides[1]))
    return groups


def _due(records: Sequence[Record], line: StepLine) -> list[Record]:
    """Return the step's requests; those that were given up left no records, and did not pass."""
    from_s, to_s = line.step.counted_from_s, line.step.to_s
    due = [r for r in records if from_s <= r.scheduled_s < to_s]
    for index in range(-line.unfinished, 0):
        spec = RequestSpec(index, from_s, "", 1)
        due.append(Record(spec, "", from_s, to_s, to_s, 1, 0, Verdict(Outcome.FAILED)))
    return due


def _seed(method: Method, name: str) -> int:
    return method.seed + zlib.crc32(name.encode())
