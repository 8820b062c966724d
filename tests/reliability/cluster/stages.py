"""The services that are broken, each with an agent inside its cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.bench.cluster.process_cpu import service_processes
from loadgen.bench.cluster.service import ServiceUnderLoad, started_service
from quadriga.errors import ConfigError
from tests.reliability.chaos.fault_matrix import Stage, Victim
from tests.reliability.cluster.agent_client import AgentClient, AgentError, started_agent
from tests.reliability.cluster.control import gcs_address

if TYPE_CHECKING:
    from deploy.node_faults import NodeFaults

SETTINGS = {
    "deterministic": "true",
    "decode.rebatching": "drex",
    "decode.pace": "steady-15ms",
    "prefill_replicas": "2",
    "decode_replicas": "2",
    "ingress.replicas": "2",
    "engine.resources_cpus": "0.05",
    "lifecycle.heartbeat_interval_s": "0.5",
    "transport.deadline_s": "5",
    "transport.lease_s": "4",
}
CHOOSING = {
    "helios.enabled": "true",
    # The scouts wait for profiles that are never asked for: no orders come but those of the cells.
    "engine.max_model_len": "512",
    "lifecycle.drain_timeout_s": "20",
}
NODES = {"engine.resources_cpus": "1", "transport.kind": "gloo"}
NODE_DISK_BYTES = 256 << 20
# A node that is cut off is found in seconds, not in a minute.
WATCHFUL = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
COUNTED = (Victim.PREFILL, Victim.DECODE, Victim.INGRESS, Victim.SCHEDULER, Victim.CONTROLLER)


@dataclass(frozen=True, slots=True)
class Process:
    """One that can be a victim.

    Attributes:
        pid: As the agent sees it.
        node: Address of where it runs.
    """

    kind: str
    name: str
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class ServiceUnderTest:
    """A service under test.

    Attributes:
        nodes: Of the cluster of namespaces, where there is one.
    """

    stage: Stage
    service: ServiceUnderLoad
    agent: AgentClient
    nodes: NodeFaults | None = None

    @property
    def is_choosing(self) -> bool:
        return self.stage in (Stage.CHOOSING, Stage.CHOOSING_NODES)

    def census(self) -> Counter[str]:
        """How many processes of each kind there are, known to the controller or not."""
        assert self.service.pid is not None
        found = service_processes(self.service.pid)
        return Counter({kind.value: len(found.get(kind.value, ())) for kind in COUNTED})

    async def all_processes(self) -> list[Process]:
        """Those that can be victims and Ray knows. Raises: OrderFailed."""
        return [Process(**actor) for actor in await self.agent.call("actors")]

    async def processes(self, kind: str) -> list[Process]:
        """Those of a kind. Raises: OrderFailed."""
        found = await self.all_processes()
        return sorted((p for p in found if p.kind == kind), key=lambda p: p.name)

    async def process(self, name: str) -> Process:
        """Raises: OrderFailed: There is none of this name."""
        for actor in await self.agent.call("actors"):
            if actor["name"] == name:
                return Process(**actor)
        raise AgentError(f"there is no {name}")

    def node_of(self, address: str) -> str:
        """Name of the node with an address."""
        assert self.nodes is not None
        return next(n.name for n in self.nodes.cluster.nodes if n.address == address)

    async def on_nodes(self, verb: str, *args: Any, **options: Any) -> Any:
        """Call a method of `NodeFaults`, beside the event loop."""
        assert self.nodes is not None
        return await asyncio.to_thread(getattr(self.nodes, verb), *args, **options)


@asynccontextmanager
async def started_stage(
    stage: Stage, model: str, settings: Sequence[str], folder: Path
) -> AsyncIterator[ServiceUnderTest]:
    """Start the service of a stage, and end it with the block.

    Raises:
        ConfigError: It does not start here.
    """
    given = dict(setting.partition("=")[::2] for setting in settings)
    merged = SETTINGS | {"model": model}
    if stage in (Stage.CHOOSING, Stage.CHOOSING_NODES):
        merged |= CHOOSING
    log = folder / f"{stage.name.lower()}.log"
    agent_log = folder / f"{stage.name.lower()}-agent.log"
    if stage in (Stage.NODES, Stage.CHOOSING_NODES):
        under_test = _on_nodes(stage, merged | NODES | given, agent_log)
    else:
        under_test = _local(stage, merged | given, log, agent_log)
    async with under_test as found:
        yield found


@asynccontextmanager
async def in_threads(context: AbstractContextManager[Any]) -> AsyncIterator[Any]:
    """Enter and leave in threads, also where it is cancelled on its way in. Raises: ConfigError."""
    entering = asyncio.ensure_future(asyncio.to_thread(context.__enter__))
    try:
        try:
            found = await asyncio.shield(entering)
        except RuntimeError as exc:
            raise ConfigError(f"the cluster does not start: {exc}") from exc
        yield found
    finally:
        await asyncio.wait([entering])
        await asyncio.to_thread(context.__exit__, None, None, None)


@asynccontextmanager
async def _local(
    stage: Stage, settings: dict[str, str], log: Path, agent_log: Path
) -> AsyncIterator[ServiceUnderTest]:
    words = [f"{key}={value}" for key, value in settings.items()]
    async with in_threads(started_service(words, log=log)) as service:
        assert service.pid is not None
        address = await asyncio.to_thread(gcs_address, service.pid)
        async with started_agent(address, log=agent_log, environment={}) as agent:
            yield ServiceUnderTest(stage, service, agent)


@asynccontextmanager
async def _on_nodes(
    stage: Stage, settings: dict[str, str], agent_log: Path
) -> AsyncIterator[ServiceUnderTest]:
    from deploy.multinode import MultiNode
    from deploy.node_faults import NodeFaults

    spare = 1 if stage is Stage.CHOOSING_NODES else 0  # for the scouts
    cluster = MultiNode(
        num_prefill=int(settings["prefill_replicas"]) + spare,
        num_decode=int(settings["decode_replicas"]) + spare,
        config=settings,
        environment=WATCHFUL,
        disk_bytes=NODE_DISK_BYTES,
    )
    async with in_threads(cluster):
        service = ServiceUnderLoad(cluster.url, cluster.grpc, cluster.api_key, cluster.pid)
        async with started_agent(
            cluster.gcs_address,
            log=agent_log,
            prefix=cluster.on_head(),
            environment=cluster.environment,
        ) as agent:
            yield ServiceUnderTest(stage, service, agent, NodeFaults(cluster))
