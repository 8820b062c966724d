"""A service that was started on this machine: its processes, and its cluster through the agent."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loadgen.bench.cluster.process_cpu import service_processes
from loadgen.bench.cluster.service import ServiceUnderLoad
from loadgen.options import API_KEY_VARIABLE
from loadgen.wire.capture import now_s
from quadriga.errors import ConfigError
from tests.reliability.cluster.agent_client import AgentClient, AgentError, started_agent

LOOK_EVERY_S = 0.25
REPLICAS = ("prefill", "decode")
ACTORS = (*REPLICAS, "scheduler", "controller", "ingress", "proxy")


class ClusterControl:
    """What soak and upgrade runs see and order of a service.

    Attributes:
        agent: In its cluster; orders raise AgentError.
    """

    def __init__(self, pid: int, agent: AgentClient) -> None:
        self._pid = pid
        self.agent = agent

    def census(self) -> Counter[str]:
        """How many processes of each kind there are."""
        found = service_processes(self._pid)
        return Counter({kind: len(found.get(kind, ())) for kind in ACTORS})

    def pids(self, *kinds: str) -> dict[int, str]:
        """Process id → kind."""
        found = service_processes(self._pid)
        return {pid: kind for kind in kinds for pid in found.get(kind, ())}

    async def replicas(self, role: str) -> list[str]:
        """Names of the ready replicas of a role. Raises: AgentError."""
        status = await self.agent.call("status")
        return ready_replicas(status, role)

    async def until_ready(self, timeout_s: float, *, may_change: bool = False) -> str:
        """Wait until just what is desired runs; with `may_change`, until each place is filled.

        Returns what is wrong, or nothing. HELIOS changes models for minutes on a slow machine.
        """
        give_up_s = now_s() + timeout_s
        while True:
            try:
                status = await self.agent.call("status")
                ready = {name.rpartition(":")[0] for name in ready_replicas(status, *REPLICAS)}
                is_well = status["is_ready"] or (may_change and len(ready) == status["num_desired"])
                trouble = "" if is_well else f"replicas: {_phases(status)}"
            except AgentError as exc:
                trouble = str(exc)
            if not trouble or now_s() > give_up_s:
                return trouble
            await asyncio.sleep(LOOK_EVERY_S)

    async def deploy(self, settings: Sequence[str]) -> None:
        """Give Serve another configuration, as `serve deploy` does; returns once it is accepted."""
        await self.agent.call("deploy", list(settings))


def ready_replicas(status: dict[str, Any], *roles: str) -> list[str]:
    """Names of the replicas of these roles that a status of the controller calls ready."""
    return [r["name"] for r in status["replicas"] if r["role"] in roles and r["phase"] == "ready"]


@asynccontextmanager
async def cluster_control(service: ServiceUnderLoad) -> AsyncIterator[ClusterControl]:
    """Have an agent in the cluster of a service that was started here, until the block ends.

    Raises:
        ConfigError: It has no cluster, or the agent did not come up.
    """
    assert service.pid is not None
    address = await asyncio.to_thread(gcs_address, service.pid)
    # A deployment is built in a process of the cluster, which has the key from the agent.
    environment = {API_KEY_VARIABLE: service.api_key or ""}
    async with started_agent(address, log=Path(os.devnull), environment=environment) as agent:
        yield ClusterControl(service.pid, agent)


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


def _phases(status: dict[str, Any]) -> str:
    phases = Counter(f"{r['role']} {r['phase']}" for r in status["replicas"])
    return ", ".join(f"{count} {what}" for what, count in sorted(phases.items())) or "none"
