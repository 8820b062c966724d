"""How fast a load may arrive at a simulated cluster while nearly all requests keep the SLO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from loadgen.simulation.loads import SimLoad
from quadriga.sim.results import SimulatedRun, Slo, latencies

MAX_DOUBLINGS = 12
"""From the rate as given, up or down, until one that keeps the SLO and one that does not are known.
"""
MIN_REQUESTS = 10
"""A load that is made anew at each rate has fewer of them the slower it is; with less than this it
says nothing."""
PRECISION = 1.05
"""The search ends when the two are no further apart than this factor."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One simulation of the search.

    Attributes:
        factor: Of the arrival rate as given.
        rate: Requests per second.
        good_share: None where the run was ended early: the wanted share could not be met any more.
        failures: Reason → requests, as far as the run went.
    """

    factor: float
    rate: float
    good_share: float | None
    is_kept: bool
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SimCapacity:
    """What the search found.

    Attributes:
        kept: The fastest load that was kept, below the slowest that was not; None: none was.
        broken: The slowest that was not; None: all were.
        probes: All simulations, in the order they were made.
        is_at_limit: The search ended where the load could not be simulated any more.
    """

    kept: Probe | None
    broken: Probe | None
    probes: tuple[Probe, ...]
    is_at_limit: bool = False


def find_capacity(
    probe: Callable[[float], Probe], least: float = 0.0, most: float = math.inf
) -> SimCapacity:
    """Double or halve the rate until the SLO is kept on one side only, then bisect.

    Args:
        probe: Simulates the load at a factor of its rate.
        least, most: Factors beyond which it cannot.
    """
    probes: list[Probe] = []
    kept: Probe | None = None
    broken: Probe | None = None

    def look(factor: float) -> None:
        nonlocal kept, broken
        probes.append(probe(factor))
        if probes[-1].is_kept:
            kept = probes[-1]
        else:
            broken = probes[-1]

    look(1.0)
    is_at_limit = False
    for power in range(1, MAX_DOUBLINGS + 1):
        if kept is not None and broken is not None:
            break
        factor = 2.0**power if broken is None else 2.0**-power
        if is_at_limit := not least <= factor <= most:
            break
        look(factor)
    while kept is not None and broken is not None and broken.factor > PRECISION * kept.factor:
        look(math.sqrt(kept.factor * broken.factor))
    return SimCapacity(kept, broken, tuple(probes), is_at_limit)


def is_hopeless(
    load: SimLoad, slo: Slo, share: float, *, from_s: float
) -> Callable[[float, SimulatedRun], bool]:
    """Return a question to ask during a run: are too many requests late for the share already?"""
    mine = load.arrivals_s >= from_s
    allowed = (1.0 - share) * int(mine.sum()) + 1e-9

    def ask(now_s: float, run: SimulatedRun) -> bool:
        ttft, tpot = latencies(run, load.arrivals_s, load.output_tokens)
        is_late = (ttft > slo.ttft_s) | (tpot > slo.tpot_s)
        is_late |= np.isnan(run.first_token_s) & (now_s - load.arrivals_s > slo.ttft_s)
        return int((mine & is_late).sum()) > allowed

    return ask
