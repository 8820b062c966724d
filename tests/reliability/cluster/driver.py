"""A hand on the cluster behind a service that was started here: looks, orders, deployments."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.rpc.lifecycle import controller_name
from actors.rpc.ray_rpc import NAMESPACE, call, forget_actor
from loadgen.bench.cluster.process_cpu import service_processes
from loadgen.bench.cluster.service import Service
from loadgen.runner import now_s
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport
from quadriga.core.replica import DepthClass, ReplicaInfo, ResizeReport
from quadriga.errors import ConfigError, QuadrigaError

CALL_TIMEOUT_S = 10.0
ORDER_TIMEOUT_S = 40.0
LOOK_EVERY_S = 0.25
DEPLOYED = "serve_app.app:build"
APP = str(QuadrigaConfig.model_fields["name"].default)
REPLICAS = ("prefill", "decode")
ACTORS = ("prefill", "decode", "scheduler", "controller", "ingress", "proxy")


@dataclass(frozen=True, slots=True)
class Books:
    """What one replica has open beside its sequences.

    Attributes:
        transfers: That come to it, under a lease.
        moves: That leave it.
    """

    transfers: int
    moves: int


class ClusterHand:
    """Calls to the actors of a service; a driver of its Ray cluster."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def census(self) -> Counter[str]:
        """How many processes of each kind there are."""
        found = service_processes(self._pid)
        return Counter({kind: len(found.get(kind, ())) for kind in ACTORS})

    def pids(self, *kinds: str) -> dict[int, str]:
        """Process id → kind."""
        found = service_processes(self._pid)
        return {pid: kind for kind in kinds for pid in found.get(kind, ())}

    async def status(self) -> dict[str, Any]:
        """Desired and actual replicas, from the controller. Raises: QuadrigaError."""
        name = controller_name(APP)
        try:
            found: dict[str, Any] = await call(name, "status", timeout_s=CALL_TIMEOUT_S)
        except QuadrigaError:
            forget_actor(name)  # it may be another one by now
            raise
        return found

    async def replicas(self, role: str) -> list[str]:
        """Names of the ready replicas of a role. Raises: QuadrigaError."""
        status = await self.status()
        return [
            r["name"] for r in status["replicas"] if r["role"] == role and r["phase"] == "ready"
        ]

    async def until_ready(self, timeout_s: float) -> str:
        """Wait until just what is desired runs. Returns what is wrong, or nothing."""
        give_up_s = now_s() + timeout_s
        while True:
            try:
                status = await self.status()
                trouble = "" if status["is_ready"] else f"replicas: {_phases(status)}"
            except QuadrigaError as exc:
                trouble = exc.message
            if not trouble or now_s() > give_up_s:
                return trouble
            await asyncio.sleep(LOOK_EVERY_S)

    async def pid_of(self, actor: str) -> int:
        """Process id of a replica. Raises: QuadrigaError."""
        return int(await self._inside(actor, _pid))

    async def running(self, replica: str) -> list[str]:
        """Sequences that a decode replica runs. Raises: QuadrigaError."""
        found: list[str] = await call(replica, "on_engine", _running, timeout_s=CALL_TIMEOUT_S)
        return found

    async def books(self) -> dict[str, Books]:
        """What every ready decode replica has open. Raises: QuadrigaError."""
        return {
            name: Books(*await self._inside(name, _open)) for name in await self.replicas("decode")
        }

    async def num_actors(self) -> int:
        """Actors that live in the cluster, whosever they are."""
        import ray._private.state as state

        actors = await asyncio.to_thread(state.actors)
        return sum(actor["State"] == "ALIVE" for actor in actors.values())

    async def migrate(self, sequence_id: str, source: str, destination: str) -> MigrationReport:
        """Have a running sequence moved. Raises: QuadrigaError: The source is gone."""
        info: ReplicaInfo = await call(source, "info", timeout_s=CALL_TIMEOUT_S)
        order = MigrationOrder(
            sequence_id=sequence_id,
            depth_class=info.depth_class,
            source=source,
            destination=destination,
            cause=MigrationCause.BALANCE,
            gain=0.1,
            num_tokens=0,
            remaining_tokens=0.0,
        )
        report: MigrationReport = await call(source, "migrate", order, timeout_s=ORDER_TIMEOUT_S)
        return report

    async def resize(self, replica: str, depth: int) -> ResizeReport:
        """Change a replica's depth. Raises: QuadrigaError."""
        report: ResizeReport = await call(
            replica, "resize", depth, CALL_TIMEOUT_S, timeout_s=ORDER_TIMEOUT_S
        )
        return report

    async def depth_class(self, replica: str) -> DepthClass:
        """What a replica serves. Raises: QuadrigaError."""
        info: ReplicaInfo = await call(replica, "info", timeout_s=CALL_TIMEOUT_S)
        return info.depth_class

    async def deploy(self, settings: Sequence[str]) -> None:
        """Give Serve another configuration, as `serve deploy` does; returns once it is accepted."""
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        assert serve  # the schema's own modules need it
        arguments = dict(setting.split("=", 1) for setting in settings)
        wanted = ServeDeploySchema.model_validate(
            {
                "applications": [
                    {
                        "name": APP,
                        "route_prefix": "/",
                        "import_path": DEPLOYED,
                        "args": arguments,
                    }
                ]
            }
        )
        client: Any = _get_global_client()
        await asyncio.to_thread(client.deploy_apps, wanted)

    async def _inside(self, actor: str, look: Any) -> Any:
        return await call(actor, "__ray_call__", look, timeout_s=CALL_TIMEOUT_S)


@asynccontextmanager
async def hand_on(service: Service) -> AsyncIterator[ClusterHand]:
    """Join the Ray cluster of a service that was started here, until the block ends.

    Raises:
        ConfigError: It has no cluster.
    """
    assert service.pid is not None
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    address = gcs_address(service.pid)
    await asyncio.to_thread(
        ray.init,
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield ClusterHand(service.pid)
    finally:
        for name in list(_names()):
            forget_actor(name)
        await asyncio.to_thread(ray.shutdown)


def gcs_address(pid: int) -> str:
    """Where the Ray cluster of a process listens. Raises: ConfigError: There is none."""
    for member in service_processes(pid).get("ray", ()):
        try:
            words = Path(f"/proc/{member}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if found := re.search(r"--gcs-address=([^\s\0]+)", words):
            return found[1]
    raise ConfigError(f"process {pid} has no Ray cluster under it")


def _names() -> list[str]:
    from actors.rpc import ray_rpc as calls

    return list(calls._handles)


def _phases(status: dict[str, Any]) -> str:
    phases = Counter(f"{r['role']} {r['phase']}" for r in status["replicas"])
    return ", ".join(f"{count} {what}" for what, count in sorted(phases.items())) or "none"


# In the replica's process.


def _pid(replica: Any) -> int:
    return os.getpid()


def _running(core: Any) -> list[str]:
    return [state.sequence_id for state in core.loop.running]


def _open(replica: Any) -> tuple[int, int]:
    return replica.receiver.leases.num_open, len(replica.migrations.under_way)
