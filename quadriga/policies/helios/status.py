"""What the machine says of itself: for the terminal, metrics and the admin port."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quadriga.core.replica import DepthClass
from quadriga.policies.helios.messages import Order, Output


class HeliosPhase(StrEnum):
    """What the machine is at."""

    PROFILE = "profile"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class ModelDecision:
    """A line of the log: an output, and when."""

    at_s: float
    output: Output


@dataclass(slots=True)
class Counters:
    """What happened so far, for metrics.

    Attributes:
        trips: Times that the breach window, or changed tokens, called for a change.
    """

    resizes: int = 0
    switches: int = 0
    failures: int = 0
    profiles: int = 0
    trips: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of the machine.

    Attributes:
        served: Requests since the last assessment.
        window_breaches, window_tokens: Of the breach window.
        barred: Class → why it is not chosen until the next assessment.
    """

    phase: HeliosPhase
    target: DepthClass | None
    profiling: DepthClass | None
    order: Order | None
    served: int
    window_breaches: float
    window_tokens: int
    barred: dict[str, str]
    counters: Counters
