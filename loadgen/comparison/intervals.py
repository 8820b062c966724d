"""Is a difference between two sides more than noise? Confidence intervals.

One run a side: by block bootstrap. Requests that ran at the same time are not independent: they
shared a queue, a batch and a busy moment. So blocks of consecutive requests are drawn, not single
ones; drawing single ones would call noise a difference far too often. How long blocks are depends
on how alike neighbours are; where too few of them are left, a run is too short to say anything.

Several runs a side: by the spread between the runs (Welch), which holds the noise that one run
cannot show.

Source: Künsch (1989), "The jackknife and the bootstrap for general stationary observations";
circular blocks after Politis and Romano (1992), their length after Carlstein (1986) for a series
whose neighbours are correlated. Welch (1947).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Statistic = Callable[[Values], Values]
"""float64 [num_draws, num_values] → float64 [num_draws]."""

_NUM_T_SAMPLES = 200_000
_MAX_DRAWN = 1 << 22  # values drawn at a time, for memory
_LEAST_BLOCKS = 10
"""With fewer an interval is too narrow: of alike runs with a correlation of .9 it missed 0 in a
quarter of all cases, instead of one in twenty."""
_MOST_ALIKE = 0.97


class Finding(StrEnum):
    """What the interval says."""

    NOISE = "within noise"
    LOWER = "lower"
    HIGHER = "higher"
    TOO_FEW = "too few to say"


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """A figure of two sides.

    Attributes:
        low, high: Confidence interval of b − a; None where the values are too few.
        margin: Differences up to it do not count, however sure they are: two runs of the same
            service differ too.
        num_a, num_b: Values behind the figures.
        is_paired: Both runs' values are of the same requests, drawn together.
        is_of_runs: The values are those of runs, not of requests.
    """

    a: float
    b: float
    low: float | None
    high: float | None
    margin: float
    num_a: int
    num_b: int
    is_paired: bool
    is_of_runs: bool = False

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a else None

    @property
    def finding(self) -> Finding:
        if self.low is None or self.high is None:
            return Finding.TOO_FEW
        if self.high < -self.margin:
            return Finding.LOWER
        return Finding.HIGHER if self.low > self.margin else Finding.NOISE


def percentile(share: float) -> Statistic:
    """Return the statistic: a percentile of each row."""

    def of(drawn: Values) -> Values:
        found: Values = np.percentile(drawn, share, axis=1)
        return found

    return of


def mean(drawn: Values) -> Values:
    """The statistic: the mean of each row."""
    found: Values = drawn.mean(axis=1)
    return found


def difference(
    a: Values,
    b: Values,
    statistic: Statistic,
    *,
    is_paired: bool,
    in_blocks: bool = True,
    min_values: int,
    margin_share: float,
    confidence: float,
    num_draws: int,
    seed: int,
) -> MeanDifference:
    """Return the figure of both runs and the interval of its difference.

    Args:
        a, b: float64 [num_values], in order of time; of the same requests where `is_paired`.
        in_blocks: Draw neighbours together; else every value by itself.
        min_values: With fewer in either run there is no interval.
        margin_share: Of a's figure: see `Difference.margin`.

    Raises:
        ValueError: A run has no values, or paired ones differ in number.
    """
    if not len(a) or not len(b) or (is_paired and len(a) != len(b)):
        raise ValueError(f"{len(a)} and {len(b)} values cannot be compared")
    figure_a, figure_b = (float(statistic(values[None, :])[0]) for values in (a, b))
    low = high = None
    length = max(block_length(a), block_length(b)) if in_blocks else 1
    if min(len(a), len(b)) >= max(min_values, _LEAST_BLOCKS * length if in_blocks else 0):
        rng = np.random.default_rng([seed, 0xB007])
        drawn = np.concatenate(
            [
                _draw(a, b, statistic, count, rng, is_paired=is_paired, length=length)
                for count in _portions(num_draws, max(len(a), len(b)))
            ]
        )
        tail = 100 * (1 - confidence) / 2
        low, high = (float(value) for value in np.percentile(drawn, [tail, 100 - tail]))
    margin = margin_share * abs(figure_a)
    return MeanDifference(figure_a, figure_b, low, high, margin, len(a), len(b), is_paired)


def difference_of_runs(
    a: Values, b: Values, *, margin_share: float, confidence: float
) -> MeanDifference:
    """Return the mean figure of both sides and the interval of its difference, by Welch.

    Args:
        a, b: float64 [num_runs]: the figure of each run; two or more.

    Raises:
        ValueError: A side has fewer than two runs.
    """
    if min(len(a), len(b)) < 2:
        raise ValueError(f"{len(a)} and {len(b)} runs: two or more a side have a spread")
    figure_a, figure_b = float(a.mean()), float(b.mean())
    parts = [float(values.var(ddof=1)) / len(values) for values in (a, b)]
    reach = 0.0
    if total := sum(parts):
        pairs = zip(parts, (a, b), strict=True)
        freedom = total**2 / sum(part**2 / (len(values) - 1) for part, values in pairs)
        reach = t_reach(freedom, confidence) * math.sqrt(total)
    gap, margin = figure_b - figure_a, margin_share * abs(figure_a)
    return MeanDifference(
        figure_a, figure_b, gap - reach, gap + reach, margin, len(a), len(b), False, is_of_runs=True
    )


def t_reach(freedom: float, confidence: float) -> float:
    """How far from 0 a value of Student's t lies at most, with that confidence; by sampling."""
    samples = np.random.default_rng(0x7E57).standard_t(freedom, _NUM_T_SAMPLES)
    return float(np.percentile(np.abs(samples), 100 * confidence))


def _draw(
    a: Values,
    b: Values,
    statistic: Statistic,
    count: int,
    rng: np.random.Generator,
    *,
    is_paired: bool,
    length: int,
) -> Values:
    of_a = _indices(len(a), count, rng, length)
    of_b = of_a if is_paired else _indices(len(b), count, rng, length)
    return statistic(b[of_b]) - statistic(a[of_a])


def block_length(values: Values) -> int:
    """How many neighbours are drawn together: more, the more alike their ranks are."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(counts) < 2:
        return 1
    ranks = (counts.cumsum() - counts / 2)[places]  # equals have one rank
    ranks -= ranks.mean()
    alike = float(ranks[1:] @ ranks[:-1]) / float(ranks @ ranks)
    alike += (1 + 3 * alike) / len(values)  # a short series looks less correlated than it is
    alike = min(max(alike, 0.0), _MOST_ALIKE)
    length: float = (2 * alike / (1 - alike**2)) ** (2 / 3) * (1.5 * len(values)) ** (1 / 3)
    return max(1, math.ceil(length))


def _indices(
    num_values: int, count: int, rng: np.random.Generator, length: int
) -> NDArray[np.int64]:
    """Return indices, [count, num_values]: blocks that begin anywhere and go on in a circle."""
    num_blocks = math.ceil(num_values / length)
    starts = rng.integers(0, num_values, (count, num_blocks, 1))
    drawn: NDArray[np.int64] = (starts + np.arange(length)) % num_values
    return drawn.reshape(count, -1)[:, :num_values]


def _portions(total: int, num_values: int) -> list[int]:
    portion = max(1, _MAX_DRAWN // num_values)
    return [min(portion, total - done) for done in range(0, total, portion)]
