"""Loads that rise: which rate or concurrency at which time, in steps or steadily."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.load.arrivals import MAX_CONCURRENCY, Arrivals
from quadriga.errors import ConfigError

Unit = Literal["rate", "concurrency"]
Rise = Literal["even", "geometric", "linear"]
MAX_REQUESTS = 2_000_000
_MARGIN_SIGMAS = 8.0


@dataclass(frozen=True, slots=True)
class Step:
    """A stretch of a ramp; times are seconds from its start.

    Attributes:
        level: Mean rate or concurrency.
        counted_from_s: What is sent earlier in the step belongs to no figure: the level has yet to
            take effect.
    """

    number: int
    level: float
    from_s: float
    counted_from_s: float
    to_s: float

    @property
    def counted_s(self) -> float:
        return self.to_s - self.counted_from_s


@dataclass(frozen=True, slots=True)
class Ramp:
    """A load that rises from `low` to `high`.

    Attributes:
        unit: What rises: users beginning per second (open loop), or users at a time (closed loop).
        rise: `even` and `geometric` hold each of `num_steps` levels for `step_s`, or of fewer where
            no more whole concurrencies lie between; `linear` rises all the time, and its steps are
            stretches of that.
        settle_s: Left out at the beginning of each step.
        users: What begins: `requests` or `conversations`.
    """

    unit: Unit
    rise: Rise
    low: float
    high: float
    num_steps: int
    step_s: float
    settle_s: float
    users: str = "requests"

    @property
    def duration_s(self) -> float:
        return len(self.levels()) * self.step_s

    def levels(self) -> list[float]:
        """Return the level of each step, rising; none comes twice in a closed loop."""
        if self.rise == "linear":
            height = (self.high - self.low) / self.num_steps
            return [self.low + (number + 0.5) * height for number in range(self.num_steps)]
        space = np.geomspace if self.rise == "geometric" else np.linspace
        levels = [float(level) for level in space(self.low, self.high, self.num_steps)]
        if self.unit == "rate":
            return levels
        return list(dict.fromkeys(float(round(level)) for level in levels))

    def steps(self) -> list[Step]:
        """Return the steps in order."""
        return [
            Step(
                number=number,
                level=level,
                from_s=number * self.step_s,
                counted_from_s=number * self.step_s + self.settle_s,
                to_s=(number + 1) * self.step_s,
            )
            for number, level in enumerate(self.levels())
        ]

    def times_s(self, process: Arrivals, *, seed: int) -> NDArray[np.float64]:
        """Return when users begin: float64 [num_users], ascending, all inside the ramp.

        The process at one per unit of expected arrivals is stretched onto the rising rate, so a
        Poisson process stays one.

        Args:
            process: One with a rate of 1.

        Raises:
            ConfigError: They would be more than `MAX_REQUESTS`.
        """
        edges_s = np.array([0.0, *(step.to_s for step in self.steps())])
        expected = np.concatenate(([0.0], np.cumsum(np.array(self.levels()) * self.step_s)))
        total = float(expected[-1])
        if total > MAX_REQUESTS:
            raise ConfigError(
                f"--rate: {total:,.0f} requests in all; at most {MAX_REQUESTS:,} are possible: "
                "lower --rate, --steps or --step-s",
                param="rate",
            )
        spread = _MARGIN_SIGMAS * max(1.0, process.cv) * math.sqrt(total)
        count = math.ceil(total + spread) + 1
        marks = process.times_s(count, seed=seed)
        marks = marks[marks < total]
        if self.rise == "linear" and self.high > self.low:
            slope = (self.high - self.low) / self.duration_s
            times_s: NDArray[np.float64] = (
                np.sqrt(self.low**2 + 2 * slope * marks) - self.low
            ) / slope
            return times_s
        stretched: NDArray[np.float64] = np.interp(marks, expected, edges_s)
        return stretched

    def places_s(self) -> tuple[float, ...]:
        """Return when each place of the closed loop opens, ascending."""
        if self.rise == "linear":
            per_s = (self.high - self.low) / self.duration_s
            extra = range(1, round(self.high - self.low) + 1)
            return (0.0,) * round(self.low) + tuple(place / per_s for place in extra)
        opens: list[float] = []
        for step in self.steps():
            opens += [step.from_s] * (round(step.level) - len(opens))
        return tuple(opens)


def check_concurrency(low: float, high: float) -> None:
    """Raises: ConfigError where a closed loop cannot have so many users at a time."""
    if low != int(low) or high != int(high) or high > MAX_CONCURRENCY:
        raise ConfigError(
            f"--concurrency: {low:g}-{high:g} must be whole numbers up to {MAX_CONCURRENCY}",
            param="concurrency",
        )
