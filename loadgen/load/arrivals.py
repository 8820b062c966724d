"""When requests are sent: open-loop arrival processes, and the closed loop.

An open-loop load sends at its own times whatever the service does, so a slow service sees a queue;
a closed loop keeps a fixed number in flight and hides queueing from its figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quadriga.errors import ConfigError

FORMS = (
    "trace | poisson:RATE | constant:RATE | gamma:RATE:CV | closed:CONCURRENCY | at-once "
    "(RATE in requests/s)"
)
MAX_RATE = 1e6
MAX_CV = 1e3
MAX_CONCURRENCY = 100_000


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A parsed `--arrivals` value.

    Attributes:
        rate: Requests per second of the open-loop processes; 0 otherwise.
        cv: Coefficient of variation of the gaps; 1 is Poisson, more is burstier.
        concurrency: Requests in flight of the closed loop; None for open loops.
    """

    process: str
    rate: float = 0.0
    cv: float = 0.0
    concurrency: int | None = None

    def times_s(
        self, num_requests: int, *, seed: int, trace_times_s: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Return send times: float64 [num_requests], ascending, the first at 0.

        Closed loops and `at-once` have all their requests ready at 0.

        Raises:
            ConfigError: `trace` without a trace that has arrivals.
        """
        if self.process == "trace":
            if trace_times_s is None:
                raise ConfigError(
                    f"--arrivals: this load has no arrival times of its own; choose {FORMS}",
                    param="arrivals",
                )
            return trace_times_s[:num_requests]
        if self.rate == 0:
            return np.zeros(num_requests)
        gaps = np.full(num_requests, 1 / self.rate)
        if self.cv > 0:
            # Gamma gaps of shape k and mean 1/rate have CV 1/sqrt(k); k = 1 is exponential.
            shape = self.cv**-2
            rng = np.random.default_rng([seed, 0xA221])
            gaps = rng.gamma(shape, 1 / (self.rate * shape), num_requests)
        gaps[0] = 0.0
        return np.cumsum(gaps)


def parse_arrivals(text: str) -> Arrivals:
    """Parse an `--arrivals` value.

    Raises:
        ConfigError: Unknown process, or a number out of its range.
    """
    process, *numbers = text.split(":")
    match process, len(numbers):
        case "trace" | "at-once", 0:
            return Arrivals(process)
        case "poisson", 1:
            return Arrivals(process, rate=_number(text, numbers[0], MAX_RATE), cv=1.0)
        case "constant", 1:
            return Arrivals(process, rate=_number(text, numbers[0], MAX_RATE))
        case "gamma", 2:
            rate, cv = _number(text, numbers[0], MAX_RATE), _number(text, numbers[1], MAX_CV)
            return Arrivals(process, rate=rate, cv=cv)
        case "closed", 1 if numbers[0].isascii() and numbers[0].isdecimal():
            concurrency = int(_number(text, numbers[0], MAX_CONCURRENCY))
            return Arrivals(process, concurrency=concurrency)
    raise ConfigError(f"--arrivals: {text!r} is none of {FORMS}", param="arrivals")


def _number(whole: str, text: str, limit: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= limit:
        raise ConfigError(
            f"--arrivals: {text!r} in {whole!r} must be above 0 and at most {limit:g}",
            param="arrivals",
        )
    return value
