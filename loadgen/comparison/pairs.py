"""The ratio of two ways that took turns, with its interval: each pair of turns is one observation.

Two turns of a pair lie side by side in time, so what else the machine does weighs on both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.comparison.intervals import t_reach

CONFIDENCE = 0.95
LEAST_RATIO = 0.98
"""What is on may cost so much where it cannot help, and no more."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """One way over the other.

    Attributes:
        ratio: Geometric mean over the pairs.
        low, high: Its interval; None for a single pair.
    """

    ratio: float
    low: float | None
    high: float | None
    num_pairs: int

    def is_surely_below(self, least: float) -> bool:
        """Whether all of the interval is."""
        return self.high is not None and self.high < least

    def as_dict(self) -> dict[str, float | int | None]:
        """For a line of results."""
        low, high = (None if v is None else round(v, 3) for v in (self.low, self.high))
        return {"ratio": round(self.ratio, 3), "low": low, "high": high, "pairs": self.num_pairs}

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.ratio:.3f} (one pair)"
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}, {self.num_pairs} pairs)"


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of rounds that were run together."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> PairedRatio | None:
    """Return the first of each pair over its second; None without a pair in which both are > 0."""
    logs = np.array([math.log(a / b) for a, b in pairs if a > 0.0 and b > 0.0])
    if not len(logs):
        return None
    mean = float(logs.mean())
    if len(logs) == 1:
        return PairedRatio(math.exp(mean), None, None, 1)
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    reach = t_reach(len(logs) - 1, CONFIDENCE) * error
    return PairedRatio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs))
