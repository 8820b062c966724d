"""What a length head would say of a simulated sequence: all-knowing, mistaken, or nothing.

The mistaken one is made after the figures ARES publishes for its head (§4.3, Figure 7, Table 1):
for sequences of 30,000 to 32,000 tokens a mean absolute error of 18,256 tokens after the prompt
and 2,929 after 8,000 tokens; 3,873 on average over samples at every 20 tokens of ShareGPT. It
mixes, in log space, the truth with what the mere count of tokens so far would suggest, the truth
gaining weight as tokens are generated, and adds an error that the sequence keeps for life. Start
and average are met (17,700 and 3,800 on the synthetic lengths); in between it is worse than
published (6,500 after 8,000 tokens), as one lasting error cannot meet all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quadriga.core.forecast import LengthPrediction

Floats = NDArray[np.float64]

_QUANTILE = 1.2815515655446004  # the normal distribution's 90 %
_CURVE_POINTS = 256


@dataclass(frozen=True, slots=True)
class Predictions:
    """Remaining tokens of many sequences: mean and the 10 % and 90 % quantiles, each [n]."""

    mean: Floats
    lower: Floats
    upper: Floats

    def of(self, row: int) -> LengthPrediction:
        """One sequence's."""
        return LengthPrediction(
            float(self.mean[row]), float(self.lower[row]), float(self.upper[row])
        )


class RemainingPredictor(Protocol):
    """Says how long sequences still run."""

    def predict(
        self, requests: NDArray[np.int64], produced: Floats, remaining: Floats
    ) -> Predictions:
        """Predict.

        Args:
            requests: Indices of the requests, [n].
            produced: Tokens generated so far, [n].
            remaining: The truth, [n].
        """


class OraclePredictor:
    """Knows. Source: ARES-Oracle, §6.4."""

    def predict(
        self, requests: NDArray[np.int64], produced: Floats, remaining: Floats
    ) -> Predictions:
        """See `RemainingPredictor.predict`."""
        return Predictions(remaining, remaining, remaining)


@dataclass(frozen=True, slots=True)
class ErrorModel:
    """How wrong the mistaken predictor is.

    Attributes:
        start_weight: Weight of the truth after the prompt.
        settle_tokens: The doubt falls by e for each of these many tokens generated.
        sigma: Standard deviation of the log error that remains.
        spread: Log spread assumed of the doubt, for the quantiles.
    """

    start_weight: float = 0.72
    settle_tokens: float = 4000.0
    sigma: float = 0.33
    spread: float = 1.5


class NoisyPredictor:
    """Is wrong in the way ARES's head is.

    Args:
        output_tokens: Of the workload, [num_requests]: what the head was trained on.
        bias: Factor on all predictions: traffic that the head does not know.
    """

    def __init__(
        self,
        output_tokens: NDArray[np.int64],
        *,
        seed: int,
        errors: ErrorModel | None = None,
        bias: float = 1.0,
    ) -> None:
        self._errors = errors or ErrorModel()
        self._bias = bias
        rng = np.random.default_rng([seed, 0x1E46])
        self._own = self._errors.sigma * rng.standard_normal(len(output_tokens))
        self._counts, self._medians = _conditional_medians(output_tokens)

    def predict(
        self, requests: NDArray[np.int64], produced: Floats, remaining: Floats
    ) -> Predictions:
        """See `RemainingPredictor.predict`."""
        e = self._errors
        doubt = (1.0 - e.start_weight) * np.exp(-produced / e.settle_tokens)
        guess = np.interp(produced, self._counts, self._medians)
        log = (1.0 - doubt) * np.log1p(remaining) + doubt * np.log1p(guess)
        log += self._own[requests]
        mean = np.expm1(log) * self._bias
        width = _QUANTILE * np.sqrt(e.sigma**2 + (doubt * e.spread) ** 2)
        more = mean + 1.0
        lower = np.maximum(more * np.exp(-width) - 1.0, 0.0)
        return Predictions(mean, lower, more * np.exp(width) - 1.0)


def _conditional_medians(output_tokens: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Median of what remains, given how much was generated already: (counts, medians)."""
    ordered = np.sort(output_tokens).astype(np.float64)
    counts = np.linspace(0.0, ordered[-1], _CURVE_POINTS)
    first = np.searchsorted(ordered, counts, side="right")
    middle = np.minimum((first + len(ordered)) // 2, len(ordered) - 1)
    return counts, np.maximum(ordered[middle] - counts, 0.0)
