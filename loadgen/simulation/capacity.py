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
class Capacity:
    """What the search found.

    Attributes:
        kept: The fastest load that was kept, below the slowest that was not; None: none was.
        broken: The slowest that was not; None: all were.
        probes: All simulations, in the order they were made.
    """

    kept: Probe | None
    broken: Probe | None
    probes: tuple[Probe, ...]


def find_capacity(probe: Callable[[float], Probe]) -> Capacity:
    """Double or halve the rate until the SLO is kept on one side only, then bisect.

    Args:
        probe: Simulates the load at a factor of its rate.
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
    for power in range(1, MAX_DOUBLINGS + 1):
        if kept is not None and broken is not None:
            break
        look(2.0**power if broken is None else 2.0**-power)
    while kept is not None and broken is not None and broken.factor > PRECISION * kept.factor:
        look(math.sqrt(kept.factor * broken.factor))
    return Capacity(kept, broken, tuple(probes))


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
