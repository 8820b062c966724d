"""The placement policy of a configured name."""

from __future__ import annotations

from collections.abc import Callable

from quadriga.policies.ares.placement import AresPlacement
from quadriga.policies.ares.settings import AresSettings
from quadriga.policies.baselines.placement import CurrentLoad, LeastRequests, Placement, RoundRobin
from quadriga.policies.least_work import LeastWork

PLAIN: dict[str, Callable[[], Placement]] = {
    "least_work": LeastWork,
    "least_requests": LeastRequests,
    "current_load": CurrentLoad,
    "round_robin": RoundRobin,
}
"""Those that look at no forecast."""


def find_placement(kind: str, settings: AresSettings) -> Placement:
    """Return a fresh policy. Raises: KeyError for an unknown name."""
    return AresPlacement(settings=settings) if kind == "ares" else PLAIN[kind]()
