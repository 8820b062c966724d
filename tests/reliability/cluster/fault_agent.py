"""A process inside the cluster that injects faults there: `python -m …fault_agent ADDRESS`.

It is a driver of the service's Ray cluster and stands where that is, in whichever network and
process namespaces. One order a line comes in, as JSON with a number; one answer a line goes out,
with the same number and `value` or `error`. Orders are worked on side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from actors.rpc.lifecycle import controller_name, scheduler_name
from actors.rpc.ray_rpc import NAMESPACE, call, forget_actor, get_actor, remember_handle
from quadriga.config.loader import QuadrigaConfig
from quadriga.control.replica_names import parse_replica_name
from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport
from quadriga.core.replica import DepthClass, ReplicaInfo, ResizeReport, Role
from quadriga.errors import QuadrigaError
from tests.reliability.cluster import actor_patches
from tests.reliability.cluster.control import ready_replicas

APP = str(QuadrigaConfig.model_fields["name"].default)
DEPLOYED = "serve_app.app:build"
CALL_TIMEOUT_S = 5.0
LONG_CALL_TIMEOUT_S = 40.0
ORDER_TIMEOUT_S = 60.0
INGRESS_PREFIX = "SERVE_REPLICA::"
INGRESS_NAMESPACE = "serve"
MOVE_TRIES = 12
MOVE_TIMEOUT_S = 15.0


class FaultAgent:
    """The orders, by the names of the methods; see the module."""

    async def actors(self) -> list[dict[str, Any]]:
        """Processes that can be victims: kind, name, pid (here), address of the node."""
        import ray._private.state as state

        found = []
        for actor in (await asyncio.to_thread(state.actors)).values():
            kind = kind_of(actor["Name"])
            if actor["State"] == "ALIVE" and kind is not None:
                found.append(
                    {
                        "kind": kind,
                        "name": actor["Name"],
                        "pid": int(actor["Pid"]),
                        "node": actor["Address"]["IPAddress"],
                    }
                )
        return found

    async def signal(self, pid: int, number: int) -> bool:
        """Send a signal to a process, 0 to see whether it is there; False when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    async def is_member(self, address: str) -> bool:
        """Whether Ray counts the node of an address as alive."""
        import ray

        nodes = await asyncio.to_thread(ray.nodes)
        return any(n["Alive"] and n["NodeManagerAddress"] == address for n in nodes)

    async def do(self, actor: str, what: str, *args: Any) -> Any:
        """Call a function of `inside` in an actor's process."""
        function: Callable[..., Any] = getattr(actor_patches, what)
        handle = await self._handle(actor)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await handle.__ray_call__.remote(function, *args)

    async def unlimit(self, pid: int) -> None:
        """Let a process have memory again, whether or not it can be asked to."""
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))

    async def running(self, replica: str) -> list[tuple[str, int]]:
        """Sequences that a decode replica runs, with their output tokens."""
        forget_actor(replica)  # it may be another one by now
        found: list[tuple[str, int]] = await call(
            replica, "on_engine", _running, timeout_s=CALL_TIMEOUT_S
        )
        return found

    async def pause(self, replica: str, sequence_id: str) -> bool:
        """Have a decode replica take a sequence to host memory; whether it ran there."""
        command = partial(_pause, sequence_id)
        return bool(await call(replica, "on_engine", command, timeout_s=CALL_TIMEOUT_S))

    async def serving(self, role: str) -> list[str]:
        """Names of the ready replicas of a role that are no scouts, by their places."""
        names = ready_replicas(await self.status(), role)
        scouts = await self._scouts()
        return sorted(n for n in names if _place(n) not in scouts)

    async def status(self) -> dict[str, Any]:
        """Desired and actual replicas, from the controller."""
        name = controller_name(APP)
        try:
            found: dict[str, Any] = await call(name, "status", timeout_s=CALL_TIMEOUT_S)
        except QuadrigaError:
            forget_actor(name)  # it may be another one by now
            raise
        return found

    async def migrate(self, sequence_id: str, source: str, destination: str) -> str:
        """Move a sequence; returns what came of it."""
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
        report: MigrationReport = await call(
            source, "migrate", order, timeout_s=LONG_CALL_TIMEOUT_S
        )
        return f"{report.outcome} {report.reason}".strip()

    async def depth_class(self, replica: str) -> tuple[str, int]:
        """Model and layers that a replica holds."""
        info: ReplicaInfo = await call(replica, "info", timeout_s=CALL_TIMEOUT_S)
        return info.depth_class.model, info.depth_class.depth

    async def resize(self, replica: str, depth: int) -> str:
        """Change a replica's depth; returns what came of it."""
        report: ResizeReport = await call(
            replica, "resize", depth, CALL_TIMEOUT_S, timeout_s=LONG_CALL_TIMEOUT_S
        )
        return f"{report.outcome} {report.reason}".strip()

    async def num_open_transfers(self) -> int:
        """Leases of transfers that come to ready decode replicas, and moves that leave them."""
        names = ready_replicas(await self.status(), "decode")
        counts = [await call(n, "__ray_call__", _num_open, timeout_s=CALL_TIMEOUT_S) for n in names]
        return sum(counts)

    async def rest_channels(self) -> None:
        """Have all ready replicas give up channels of KV as soon as they are not used."""
        for name in ready_replicas(await self.status(), "prefill", "decode"):
            await self.do(name, "rest_channels")

    async def num_actors(self) -> int:
        """Actors that live in the cluster, whosever they are."""
        import ray._private.state as state

        actors = await asyncio.to_thread(state.actors)
        return sum(actor["State"] == "ALIVE" for actor in actors.values())

    async def deploy(self, settings: list[str]) -> None:
        """Give Serve another configuration, as `serve deploy` does; returns once it is accepted."""
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        assert serve  # the schema's own modules need it
        application = {
            "name": APP,
            "route_prefix": "/",
            "import_path": DEPLOYED,
            "args": dict(setting.split("=", 1) for setting in settings),
        }
        wanted = ServeDeploySchema.model_validate({"applications": [application]})
        client: Any = _get_global_client()
        await asyncio.to_thread(client.deploy_apps, wanted)

    async def switch(self, role: str, ordinal: int, model: str | None, depth: int) -> None:
        """Let a place of the fleet hold another model; None: what it held at first."""
        handle = await self._handle(controller_name(APP))
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await handle.__ray_call__.remote(_switch, role, ordinal, model, depth)

    async def reschedule(self, is_on: bool) -> bool:
        """Have the scheduler move running sequences, or not; return whether it did until now."""
        return bool(await self.do(scheduler_name(APP), "reschedule", is_on))

    async def scatter(self, kind: str, address: str) -> None:
        """Have actors of a kind start anew until one is not on the node of an address.

        Raises:
            RuntimeError: It does not go away from there.
        """
        for _ in range(MOVE_TRIES):
            found = await self._until_there(kind)
            if any(actor["node"] != address for actor in found):
                return
            os.kill(found[0]["pid"], signal.SIGKILL)
            await self._until_gone(found[0]["pid"])
        raise RuntimeError(f"the {kind} is always placed on the head")

    async def _until_there(self, kind: str) -> list[dict[str, Any]]:
        async with asyncio.timeout(MOVE_TIMEOUT_S):
            while True:
                found = [a for a in await self.actors() if a["kind"] == kind]
                if found:
                    return found
                await asyncio.sleep(0.1)

    async def _until_gone(self, pid: int) -> None:
        async with asyncio.timeout(MOVE_TIMEOUT_S):
            while any(a["pid"] == pid for a in await self.actors()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _scouts(self) -> set[str]:
        history = await call(controller_name(APP), "history", timeout_s=CALL_TIMEOUT_S)
        places = history["places"] if history is not None else {}
        return {name for name, place in places.items() if place["is_scout"]}

    async def _handle(self, name: str) -> Any:
        if name.startswith(INGRESS_PREFIX):
            import ray

            handle = await asyncio.to_thread(ray.get_actor, name, namespace=INGRESS_NAMESPACE)
            remember_handle(name, handle)
            return handle
        forget_actor(name)  # it may be another one by now
        return await asyncio.to_thread(get_actor, name)


def kind_of(name: str) -> str | None:
    """Which kind of victim an actor of this name is; None for any other."""
    if name.startswith(INGRESS_PREFIX):
        return "ingress"
    place = parse_replica_name(APP, name)
    if place is not None:
        return place[0].value
    return {scheduler_name(APP): "scheduler", controller_name(APP): "controller"}.get(name)


def _place(name: str) -> str:
    place = parse_replica_name(APP, name)
    assert place is not None
    return f"{place[0].value}:{place[1]}"


def _running(core: Any) -> list[tuple[str, int]]:
    """On the replica's engine thread."""
    return [(state.sequence_id, len(state.output_ids)) for state in core.loop.running]


def _pause(sequence_id: str, core: Any) -> bool:
    """On the replica's engine thread."""
    return bool(core.loop.preemption.pause(sequence_id))


def _num_open(replica: Any) -> int:
    """In a decode replica."""
    return int(replica.receiver.leases.num_open) + len(replica.migrations.under_way)


def _switch(controller: Any, role: str, ordinal: int, model: str | None, depth: int) -> None:
    """In the controller: what HELIOS does where it orders a switch."""
    key = (Role(role), ordinal)
    pools = controller._helios.pools
    pools.held[key] = pools.base[key] if model is None else DepthClass(model, depth)
    controller._wake.set()


async def serve(address: str) -> None:
    """Join the cluster and work until the input ends."""
    import ray

    await asyncio.to_thread(
        ray.init,
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    agent = FaultAgent()
    tasks: set[asyncio.Task[None]] = set()
    answer(0, "value", "ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        task = loop.create_task(_carry_out(agent, order))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()
    await asyncio.to_thread(ray.shutdown)


async def _carry_out(agent: FaultAgent, order: dict[str, Any]) -> None:
    number = order["number"]
    try:
        async with asyncio.timeout(ORDER_TIMEOUT_S):
            value = await getattr(agent, order["verb"])(*order["args"])
    except Exception as exc:  # the border: the giver of the order decides what it means
        answer(number, "error", f"{order['verb']}: {type(exc).__name__} {str(exc)[:500]}")
    else:
        answer(number, "value", value)


def answer(number: int, kind: str, value: Any) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps({"number": number, kind: value}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
