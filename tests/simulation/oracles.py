"""What must hold in a simulated cluster, at every moment and in the end.

Owners are looked at whenever a sequence joins a decode replica and whenever tokens are emitted:
under one epoch of a sequence one replica speaks, and no two run it at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from actors.kv_transfer.migration import Migration
from actors.replica.decode import DecodeReplica
from actors.replica.replica import Replica
from actors.rpc.lifecycle import controller_name, scheduler_name
from actors.rpc.ray_rpc import call
from quadriga.config.resolve import num_replicas
from quadriga.core.replica import PARTS, Role
from quadriga.errors import QuadrigaError, ReplicaError
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.preemption import Preemption
from quadriga.scheduling.sequence import SequenceStatus
from serve_app.request.request_manager import RequestManager
from tests.simulation.plans import APP
from tests.simulation.processes import CURRENT, Process

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

RUNS = (SequenceStatus.RUNNING, SequenceStatus.AT_EXIT, SequenceStatus.PAUSED)
MAX_STRAY = 32
"""Outputs that an ingress has left at a replica: those of a last poll whose acknowledgement was
lost stay until it polls there again."""
MAX_REFUSALS = 12
"""Who comes back when told is not told to come again and again."""

MAX_GIVEN_UP = 3
"""Requests that a run may lose `ingress.max_rebuilds` times in a row."""
COUNTED_EVERY_S, COUNTED_WITHIN_S = 1.0, 5.0
COUNTED_IDLE_S = 60.0
"""Between two pages where nothing happens for hours."""
OF_REQUESTS = "vllm:"
"""What counters of requests and tokens begin with."""

Hook = tuple[Any, str, Callable[..., Any]]


class Oracles:
    """Looks at one cluster.

    Attributes:
        counts: How often sequences were moved, rebuilt, adopted, paused and given up.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.counts: Counter[str] = Counter()
        self._speakers: dict[tuple[str, int], Process] = {}

    def hooks(self) -> list[Hook]:
        """Where to look while the product runs: (owner, name, what is put there)."""
        return [
            (Replica, "emit", self._emit(Replica.emit)),
            (DecodeLoop, "join", self._join(DecodeLoop.join)),
            (DecodeReplica, "adopt", self._adopt(DecodeReplica.adopt)),
            (Migration, "_conclude", self._conclude(Migration._conclude)),
            (RequestManager, "_fail", self._fail(RequestManager._fail)),
            (RequestManager, "_rebuild", self._count("rebuilds", RequestManager._rebuild)),
            (Preemption, "pause", self._count("suspends", Preemption.pause)),
        ]

    # At every moment

    def _emit(self, emit: Callable[..., None]) -> Callable[..., None]:
        def hooked(replica: Any, emissions: Sequence[Any], **options: Any) -> None:
            for _, output in emissions:
                if output.token_ids and output.moved_to is None:
                    key, process = (output.sequence_id, output.epoch), CURRENT.get()
                    assert process is not None
                    speaker = self._speakers.setdefault(key, process)
                    if speaker.is_dead:  # who tries a hand-off again does so under its epoch
                        self._speakers[key] = process
                    elif speaker is not process:
                        self._cluster.fail(f"{speaker.name} and {process.name} both emit {key}")
            emit(replica, emissions, **options)

        return hooked

    def _join(self, join: Callable[..., None]) -> Callable[..., None]:
        def hooked(loop: Any, state: Any, *args: Any, **options: Any) -> None:
            join(loop, state, *args, **options)
            sequence_id, process = state.sequence_id, CURRENT.get()
            assert process is not None
            for name, decode in self._cluster.replicas(Role.DECODE):
                held = decode.engine.core.loop.batch.sequences.get(sequence_id)
                if name != process.name and held is not None and held.status in RUNS:
                    self._cluster.fail(f"{name} runs {sequence_id} as it joins {process.name}")
            for name, prefill in self._cluster.replicas(Role.PREFILL):
                held = prefill.sequences.get(sequence_id)
                if held is not None and held.status is SequenceStatus.PREFILLING:
                    self._cluster.fail(f"{name} computes {sequence_id} as it joins {process.name}")

        return hooked

    def _adopt(self, adopt: Callable[..., Any]) -> Callable[..., Any]:
        async def hooked(replica: Any, *args: Any) -> bool:
            is_there: bool = await adopt(replica, *args)
            self.counts["adoptions"] += is_there
            return is_there

        return hooked

    def _conclude(self, conclude: Callable[..., None]) -> Callable[..., None]:
        def hooked(migration: Any, outcome: str, reason: str) -> None:
            self.counts["moves"] += outcome == "moved"
            conclude(migration, outcome, reason)

        return hooked

    def _fail(self, fail: Callable[..., None]) -> Callable[..., None]:
        """The SDK begins again what its ingress gives up; clients over HTTP get the error."""

        def hooked(manager: Any, request: Any, sequence: Any, error: Exception) -> None:
            self.counts["given up"] += isinstance(error, ReplicaError)
            if self.counts["given up"] == MAX_GIVEN_UP + 1:
                self._cluster.fail(f"ingresses give up more than {MAX_GIVEN_UP} requests: {error}")
            fail(manager, request, sequence, error)

        return hooked

    def _count(self, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(*args: Any, **options: Any) -> Any:
            self.counts[what] += 1
            return method(*args, **options)

        return hooked

    async def watch_counters(self) -> None:
        """No counter falls from one page to the next, whoever dies; for ever."""
        last: dict[str, float] = {}
        while True:
            await asyncio.sleep(COUNTED_IDLE_S if self._cluster.plan.idle_s else COUNTED_EVERY_S)
            try:
                counters = await self._page()
            except (TimeoutError, QuadrigaError):
                continue
            for name, value in last.items():
                if counters.get(name, 0.0) < value:
                    self._cluster.fail(f"{name} fell from {value} to {counters.get(name)}")
            self.counts["pages"] += 1
            last = counters

    async def counted(self) -> dict[str, float]:
        """What has been counted of requests so far."""
        return {n: v for n, v in (await self._page()).items() if n.startswith(OF_REQUESTS)}

    async def _page(self) -> dict[str, float]:
        async with asyncio.timeout(COUNTED_WITHIN_S):
            page = await call(controller_name(APP), "metrics", timeout_s=COUNTED_WITHIN_S)
        return _counters(page.decode())

    # In the end

    def rest(self) -> Iterator[str]:
        """What is not as it is to be in the end."""
        yield from self._of_replicas()
        yield from self._of_ingresses()
        yield from self._of_the_scheduler()
        yield from self._of_ray()

    def _of_replicas(self) -> Iterator[str]:
        cluster = self._cluster
        ingresses = {actor.name for actor in cluster.actors("ingress")}
        for name, decode in cluster.replicas(Role.DECODE):
            loop = decode.engine.core.loop
            if loop.slots.owners:
                yield f"{name} keeps rows of {sorted(loop.slots.owners)}"
            if decode.receiver.leases.sequences():
                yield f"{name} keeps leases of {sorted(decode.receiver.leases.sequences())}"
            if decode.migrations.under_way:
                yield f"{name} has moves that do not end"
        for name, prefill in cluster.replicas(Role.PREFILL):
            if prefill.sequences or prefill._tasks:
                yield f"{name} keeps {sorted(prefill.sequences)}"
            if prefill.engine.core.loop.slots.owners:
                yield f"{name} keeps rows"
        for role in PARTS:
            for name, replica in cluster.replicas(role):
                for ingress, log in replica.mail._logs.items():
                    if ingress in ingresses and len(log.entries) > MAX_STRAY:
                        yield f"{name} keeps {len(log.entries)} outputs for {ingress}"

    def _of_ingresses(self) -> Iterator[str]:
        for actor in self._cluster.actors("ingress"):
            if actor.instance is None:
                continue
            client = actor.instance.engine_client
            if client._request_manager._live or client._num_open:
                yield f"{actor.name} keeps {sorted(client._request_manager._live)}"
            for key, meter in client.rate_limiter._meters.items():
                if meter.num_running:
                    yield f"{actor.name} counts {meter.num_running} requests of key {key}"

    def _of_the_scheduler(self) -> Iterator[str]:
        actor = self._cluster.ray.actors.get(scheduler_name(APP))
        if actor is None or actor.instance is None:
            yield "there is no scheduler"
            return
        scheduler = actor.instance
        if sent := {n: s for n, s in scheduler._inflight._sent.items() if s}:
            yield f"the scheduler counts {sent} as on their way"
        if scheduler._waiting_for_room:
            yield f"the scheduler keeps {sorted(scheduler._waiting_for_room)} waiting"
        if orders := scheduler._rescheduling.governor.moves.under_way:
            yield f"the scheduler keeps {len(orders)} orders"

    def _of_ray(self) -> Iterator[str]:
        """As many replicas as are wanted serve, and nothing else is there."""
        cluster = self._cluster
        config = cluster.wanted
        num_scouts = int(config.helios.enabled and config.helios.scout)
        numbers = {role: sum(1 for _ in cluster.replicas(role)) for role in PARTS}
        wanted = {
            role: sum(num_replicas(pool)[role] for pool in config.pools) + num_scouts
            for role in PARTS
        }
        if numbers != wanted:
            yield f"{numbers} replicas serve, {wanted} are wanted"
        serving = {name for role in PARTS for name, _ in cluster.replicas(role)}
        known = serving | {scheduler_name(APP), controller_name(APP)}
        for name in cluster.ray.actors:
            if name not in known and ":ingress:" not in name:
                yield f"{name} is left over"
        for name, state in cluster.ray.groups.items():
            if state != "REMOVED" and name not in known and ":ingress:" not in name:
                yield f"the placement group of {name} is left over"


def _counters(page: str) -> dict[str, float]:
    """What may only rise on a page of metrics, by name and labels."""
    found = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            if name.partition("{")[0].endswith(("_total", "_count", "_bucket")):
                found[name] = float(value)
    return found
