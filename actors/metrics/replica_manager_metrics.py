"""What the controller counts of the fleet; it pushes into its own hub."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable
from typing import Any

from actors.controller.replica_manager import ReplicaPhase
from quadriga.core.replica import Role
from quadriga.observability.metrics import Registry


class ReplicaManagerMetrics:
    """Replica processes wanted and there.

    Its source is new with every process: a successor starts at nought, and no counter may fall.
    """

    def __init__(self, app: str) -> None:
        self.registry = Registry(f"{app}:controller:{uuid.uuid4().hex[:8]}")
        self._desired = self.registry.gauge(
            "quadriga_replicas_desired", "Replica processes the configuration asks for.", ["role"]
        )
        self._there = self.registry.gauge(
            "quadriga_replicas", "Replica processes there are, by phase.", ["role", "phase"]
        )
        self._respawns = self.registry.counter(
            "quadriga_replica_respawns_total", "Replica processes started again after a loss."
        )
        self._is_failing = self.registry.gauge(
            "quadriga_configuration_failing",
            "1 while the configuration cannot be brought about; the reason is in the status.",
        )
        self._num_respawns = 0
        self._helios_events = self.registry.counter(
            "quadriga_helios_events_total",
            "Resizes, model switches, failed orders, profiles, and trips of the breach window.",
            ["kind"],
        )
        self._window = self.registry.gauge(
            "quadriga_breach_window_tokens",
            "The consecutive breach counter: tokens of its window, and breaches among them.",
            ["kind"],
        )
        self._num_events: dict[str, int] = {}

    def snapshot(
        self,
        desired: Iterable[Role],
        there: Iterable[tuple[Role, ReplicaPhase]],
        *,
        num_respawns: int,
        is_failing: bool,
        helios: dict[str, Any] | None = None,
    ) -> bytes:
        """Set everything as it is now; what `MetricsHub.push` takes.

        Args:
            helios: `HeliosController.view`; None where it is off.
        """
        wanted, found = Counter(desired), Counter(there)
        for role in Role:
            self._desired.labels(role=role.value).set(wanted[role])
            for phase in ReplicaPhase:
                self._there.labels(role=role.value, phase=phase.value).set(found[role, phase])
        self._respawns.inc(num_respawns - self._num_respawns)
        self._num_respawns = num_respawns
        self._is_failing.set(is_failing)
        if helios is not None:
            for kind, count in helios["counters"].items():
                self._helios_events.labels(kind=kind).inc(count - self._num_events.get(kind, 0))
                self._num_events[kind] = count
            for kind, value in helios["window"].items():
                self._window.labels(kind=kind).set(value)
        return self.registry.snapshot()
