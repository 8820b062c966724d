"""Applications for the tests: started, looked into, and taken down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import ray

from actors.rpc.lookup import (
    NAMESPACE,
    controller_name,
    ensure_cluster,
    forget_actor,
    scheduler_name,
)
from quadriga.core.replica import ReplicaSnapshot
from quadriga.errors import QuadrigaError, ReplicaDied, Unavailable
from quadriga.observability.metrics import parse_exposition
from tests.ray.ingress import Ingress, call
from tests.waiting import wait_until

START_TIMEOUT_S = 120.0
IDLE = (0, 0, 0, 0, 0)
IDLE_S = 6.0
"""Longer than a busy machine stands still, shorter than what ends work by itself: a transfer's
lease of 10 s, the orphan times of requests of 8 s and more, the streams of tests that cancel."""


@dataclass
class App:
    """A running application and its configuration."""

    name: str
    config: dict[str, Any]
    _ending: ClassVar[list[str]] = []

    @classmethod
    def start(cls, name: str, **config: Any) -> App:
        """Start an application and wait until its replicas are ready."""
        base = {
            "name": name,
            **({} if "pools" in config else {"model": "quadriga-s"}),
            "engine.compile": "off",
            "engine.resources_cpus": 0.1,
            "lifecycle.heartbeat_interval_s": 0.5,
            "scheduler.snapshot_interval_s": 0.2,
        }
        app = cls(name, base | config)
        app.ensure()
        cls._until_gone()
        return app

    def ensure(self, **changes: Any) -> None:
        """Set the desired state and wait until it is the actual one."""
        self.config |= changes
        ensure_cluster(self.config)
        self.until_ready()

    def until_ready(self) -> None:
        """Wait until every replica is ready and the scheduler has heard of each."""
        wait_until(self._is_ready, START_TIMEOUT_S)

    def _is_ready(self) -> bool:
        try:
            call(controller_name(self.name), "ingress_heartbeat", "waiting")
            status = self.status()
            view = call(scheduler_name(self.name), "directory")
        except QuadrigaError:
            forget_actor(controller_name(self.name))
            forget_actor(scheduler_name(self.name))
            return False
        known = {s.info.name for s in view.snapshots}
        names = {r["name"] for r in status["replicas"]}
        return bool(status["is_ready"]) and names == known

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = call(controller_name(self.name), "status")
        return status

    def replicas(self, role: str) -> list[str]:
        """Names of the living replicas of a role."""
        return [r["name"] for r in self.status()["replicas"] if r["role"] == role]

    def snapshots(self) -> list[ReplicaSnapshot]:
        """Of all replicas but those that start or end: without an engine they hold nothing."""
        found = []
        for replica in self.status()["replicas"]:
            with suppress(Unavailable, ReplicaDied):
                found.append(call(replica["name"], "snapshot"))
        return found

    def loads(self) -> list[tuple[int, ...]]:
        """(running, waiting, waiting tokens, used, reserved) of every replica."""
        return [
            (s.num_running, s.num_waiting, s.waiting_tokens, s.used_tokens, s.reserved_tokens)
            for s in self.snapshots()
        ]

    def page(self) -> dict[str, float]:
        """All metrics as the controller's page has them: series → value."""
        return parse_exposition(call(controller_name(self.name), "metrics").decode())

    def metric(self, name: str) -> float:
        """A metric of the page, its series added up."""
        return sum(value for key, value in self.page().items() if key.split("{")[0] == name)

    def until_idle(self, timeout_s: float = IDLE_S) -> None:
        """Wait until no replica holds anything: the base line."""
        wait_until(lambda: all(load == IDLE for load in self.loads()), timeout_s, self.loads)

    def stop(self) -> None:
        """Take everything down. It is looked whether all is gone when the next one has started."""
        self._until_gone()
        with suppress(QuadrigaError):
            call(controller_name(self.name), "stop")
            self._ending.append(self.name)

    @classmethod
    def _until_gone(cls) -> None:
        while cls._ending:
            name = cls._ending.pop()
            wait_until(lambda n=name: not pids(n), 30.0, lambda n=name: pids(n))  # type: ignore[misc]

    def ingress(self) -> Ingress:
        return Ingress(self.name)


def app_fixture(name: str, *, scope: Any = "module", **config: Any) -> Any:
    """Return a fixture: an application with these settings, for as long as its scope lasts."""

    @pytest.fixture(scope=scope)
    def start(ray_cluster: None) -> Iterator[App]:
        app = App.start(name, **config)
        yield app
        app.stop()

    return start


def pids(app: str) -> dict[str, int]:
    """Process of every living actor of an application, by actor name."""
    table = ray._private.state.actors()
    found = {
        actor["Name"]: int(actor["Pid"])
        for actor in table.values()
        if actor["State"] in ("ALIVE", "RESTARTING", "PENDING_CREATION")
        and actor["Name"].startswith(f"{app}:")
        and actor["ActorID"]
    }
    return {name: pid for name, pid in found.items() if pid == 0 or is_running(pid)}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def living_groups(app: str) -> list[str]:
    """Placement groups of an application that are not removed."""
    table = ray.util.placement_group_table().values()
    return [g["name"] for g in table if g["state"] != "REMOVED" and g["name"].startswith(f"{app}:")]


__all__ = ["NAMESPACE", "App", "app_fixture", "is_running", "living_groups", "pids"]
