"""What an idle service holds, and whether it holds the same again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from loadgen.wire.client_http import HttpClient
from quadriga.observability.metrics import parse_exposition
from tests.reliability.cluster.agent_client import AgentError
from tests.reliability.cluster.control import ClusterControl
from tests.reliability.cluster.process_resources import ProcessResources, process_resources

HELD = (
    "quadriga_running_sequences",
    "quadriga_waiting_sequences",
    "quadriga_kv_reserved_tokens",
    "quadriga_kv_used_tokens",
    "quadriga_ingress_open_requests",
)
SLACK_FDS = 4
"""A look at the moment a connection is being made or a file read is no leak."""
MEMORY_SLACK = 0.15
MEMORY_SLACK_BYTES = 24 << 20


@dataclass(slots=True)
class ResourceBaseline:
    """One look at all a service holds.

    Attributes:
        held: Blocks, slots and requests that are not 0, by metric.
        open_transfers: Leases and moves under way.
        processes: By kind.
        by_pid: Memory and descriptors of each process.
    """

    held: dict[str, float] = field(default_factory=dict)
    open_transfers: int = 0
    num_actors: int = 0
    processes: Counter[str] = field(default_factory=Counter)
    by_pid: dict[int, tuple[str, ProcessResources]] = field(default_factory=dict)
    is_ready: bool = False

    def __str__(self) -> str:
        fds, own = Counter[str](), Counter[str]()
        for kind, one in self.by_pid.values():
            fds[kind] += one.num_fds
            own[kind] += one.own_bytes >> 20
        kinds = ", ".join(
            f"{self.processes[kind]} {kind} ({fds[kind]} files, {own[kind]} MiB)" for kind in fds
        )
        return f"{self.num_actors} actors, {kinds}, {self.open_transfers} leases, held {self.held}"


async def take(control: ClusterControl, http: HttpClient) -> ResourceBaseline:
    """Look at everything; what does not answer is left out, and differs therefore."""
    found = ResourceBaseline(processes=control.census())
    try:
        found.num_actors = await control.agent.call("num_actors")
        found.is_ready = bool((await control.agent.call("status"))["is_ready"])
        found.open_transfers = await control.agent.call("num_open_transfers")
        status, page = await http.fetch_text("/metrics")
        if status == 200:
            values = parse_exposition(page)
            found.held = {k: v for k, v in values.items() if v and k.split("{")[0] in HELD}
        else:
            found.held = {f"/metrics answers {status}": 1.0}
    except (AgentError, ConnectionError, TimeoutError) as exc:
        found.held = {str(exc): 1.0}
    for pid, kind in control.pids(*found.processes).items():
        if (one := process_resources(pid)) is not None:
            found.by_pid[pid] = (kind, one)
    return found


def trouble_with(before: ResourceBaseline, after: ResourceBaseline) -> list[str]:
    """What is not as it was; empty: everything is."""
    found = []
    if not after.is_ready:
        found.append("not all replicas are ready")
    if after.held:
        found.append(f"still held: {after.held}")
    if after.open_transfers:
        found.append(f"{after.open_transfers} leases or moves are open")
    if after.num_actors != before.num_actors:
        found.append(f"{after.num_actors} actors live, were {before.num_actors}")
    if after.processes != before.processes:
        found.append(f"processes: {dict(after.processes)}, were {dict(before.processes)}")
    most_fds: dict[str, ProcessResources] = {}
    most_bytes = Counter[str]()
    for kind, one in before.by_pid.values():
        most_fds[kind] = max(most_fds.get(kind, one), one, key=lambda h: h.num_fds)
        most_bytes[kind] = max(most_bytes[kind], one.own_bytes)
    # Actors connect to each other when they have something to say.
    num_others = after.processes.total() - 1
    for pid, (kind, one) in after.by_pid.items():
        most = most_fds.get(kind, one)
        more = {k: n - most.fds.get(k, 0) for k, n in sorted(one.fds.items())}
        connections = min(num_others, max(0, more.get("socket", 0)))
        if one.num_fds > most.num_fds + SLACK_FDS + connections:
            which = ", ".join(f"{k} {n:+d}" for k, n in more.items() if n)
            found.append(
                f"{kind} {pid} has {one.num_fds} files open, {kind}s had {most.num_fds} ({which})"
            )
        limit = most_bytes[kind] * (1.0 + MEMORY_SLACK) + MEMORY_SLACK_BYTES
        if one.own_bytes > limit:
            found.append(
                f"{kind} {pid} has {one.own_bytes >> 20} MiB, {kind}s had {most_bytes[kind] >> 20}"
            )
    return found
