"""Where a prefilled sequence decodes: the baselines.

Source: ARES §2.2 and §6.1 (round robin, current-load balancing); least requests is what load
balancers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import PlaceRequest
from quadriga.policies.load import decode_pressure, has_room, num_held


class Placement(Protocol):
    """Chooses a decode replica among those of the sequence's class."""

    def choose(self, request: PlaceRequest, snapshots: Sequence[ReplicaSnapshot]) -> str | None:
        """Name of the replica, or None when none has room by its last report."""


class RoundRobin:
    """Each in turn, by name; those without room are passed over."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: PlaceRequest, snapshots: Sequence[ReplicaSnapshot]) -> str | None:
        names = sorted(s.info.name for s in snapshots if has_room(s, request))
        if not names:
            return None
        self._last = next((name for name in names if name > self._last), names[0])
        return self._last


class CurrentLoad:
    """The least used tokens, as ARES's baseline does; ties go to the least pressed, then by name.

    Source: ARES §6.1: "current load" counts the tokens in the batch.
    """

    def choose(self, request: PlaceRequest, snapshots: Sequence[ReplicaSnapshot]) -> str | None:
        able = [s for s in snapshots if has_room(s, request)]
        if not able:
            return None
        best = min(able, key=lambda s: (s.used_tokens, decode_pressure(s), s.info.name))
        return best.info.name


class LeastRequests:
    """The fewest sequences, whatever their sizes; ties go to the fewest tokens, then by name."""

    def choose(self, request: PlaceRequest, snapshots: Sequence[ReplicaSnapshot]) -> str | None:
        able = [s for s in snapshots if has_room(s, request)]
        if not able:
            return None
        best = min(able, key=lambda s: (num_held(s), s.used_tokens, s.info.name))
        return best.info.name
