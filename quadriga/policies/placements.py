"""The placement policy of a configured name."""

from __future__ import annotations

from quadriga.policies.ares.placement import AresPlacement
from quadriga.policies.ares.settings import AresSettings
from quadriga.policies.baselines.placement import Placement, make_placement


def find_placement(kind: str, settings: AresSettings) -> Placement:
    """Return a fresh policy. Raises: KeyError for an unknown name."""
    return AresPlacement(settings=settings) if kind == "ares" else make_placement(kind)
