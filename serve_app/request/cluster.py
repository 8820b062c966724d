"""What the front door asks of the actors behind it, and how it asks them over Ray.

Every method raises errors of `quadriga.errors` only; Ray's own exceptions end in `ray_rpc`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

from quadriga.core.output import PollReply
from quadriga.core.request import ResumableSequence, SequenceState
from quadriga.core.routing import Admission, AdmitRequest, AutoReport, ClusterView
from quadriga.errors import QuadrigaError, ReplicaError
from quadriga.policies.liveness import HeartbeatMonitor, Liveness, event_loop_stall_s

logger = logging.getLogger("quadriga.ingress")

CALL_TIMEOUT_S = 10.0
SCHEDULER_TIMEOUT_S = 2.0
"""Who asks it can do without: an answer that comes later is worth less than its waiting."""
HEARTBEAT_TIMEOUT_S = 3.0
PASSED_OVER = (ReplicaError, MemoryError)
POLL_SLACK_S = 5.0
HOLDING_TIMEOUT_S = 5.0
UNREACHABLE = "unreachable"  # code of an error: the connection broke; the process may live


class Cluster(Protocol):
    """The actors, by name. Raises: QuadrigaError only."""

    async def admit(self, request: AdmitRequest) -> Admission: ...

    async def finished(self, sequence_ids: Sequence[str], tokens: int) -> None: ...

    async def directory(self) -> ClusterView: ...

    async def submit(self, replica: str, state: SequenceState) -> None: ...

    async def cancel(
        self, replica: str, sequence_ids: Sequence[str], ingress_id: str | None
    ) -> None:
        """Have sequences freed that are this ingress's; None: whosever they are."""

    async def holding(self, replica: str, sequence_ids: Sequence[str]) -> list[str]:
        """Those of the sequences that the replica has."""

    async def find_resumable(self, claims: Sequence[str]) -> list[ResumableSequence]:
        """Where the sequences run that were another ingress's; those that run."""

    async def adopt(self, replica: str, sequence_id: str, ingress_id: str) -> bool:
        """Have a sequence's tokens come here, from the first on; False where it is not there."""

    async def poll(
        self, replica: str, ingress_id: str, ack: int, timeout_s: float
    ) -> PollReply: ...

    async def heartbeat(self, ingress_id: str, replicas: Sequence[str]) -> None: ...

    async def push_metrics(self, source: str, families: bytes) -> None: ...

    async def metrics(self) -> bytes: ...

    async def operators_view(self) -> dict[str, Any]: ...

    async def auto_reports(self, reports: Sequence[AutoReport]) -> None: ...

    async def history(self) -> dict[str, Any] | None: ...


class RayCluster:
    """The actors of one application as named Ray actors.

    Args:
        app_name: `QuadrigaConfig.name`; scheduler and controller are called after it.
    """

    def __init__(self, app_name: str) -> None:
        from actors.rpc.ray_rpc import call
        from actors.rpc.rpc_batcher import RpcBatcher

        self._calls = RpcBatcher(call)
        self._scheduler = f"{app_name}:scheduler"
        self._controller = f"{app_name}:controller"
        self._hearing = HeartbeatMonitor(time.monotonic())
        self._actor = own_actor()

    async def admit(self, request: AdmitRequest) -> Admission:
        reply: Admission = await self._calls.call(
            self._scheduler, "admit", request, timeout_s=SCHEDULER_TIMEOUT_S
        )
        return reply

    async def finished(self, sequence_ids: Sequence[str], tokens: int) -> None:
        await self._call(self._scheduler, "finished", list(sequence_ids), tokens)

    async def directory(self) -> ClusterView:
        view: ClusterView = await self._call(
            self._scheduler, "directory", deadline_s=SCHEDULER_TIMEOUT_S
        )
        return view

    async def submit(self, replica: str, state: SequenceState) -> None:
        await self._calls.call(replica, "submit", state, timeout_s=CALL_TIMEOUT_S)

    async def cancel(
        self, replica: str, sequence_ids: Sequence[str], ingress_id: str | None
    ) -> None:
        await self._call(replica, "cancel", list(sequence_ids), ingress_id)

    async def holding(self, replica: str, sequence_ids: Sequence[str]) -> list[str]:
        held: list[str] = await self._call(
            replica, "holding", list(sequence_ids), deadline_s=HOLDING_TIMEOUT_S
        )
        return held

    async def find_resumable(self, claims: Sequence[str]) -> list[ResumableSequence]:
        found: list[ResumableSequence] = await self._call(
            self._scheduler, "find_resumable", list(claims), deadline_s=SCHEDULER_TIMEOUT_S
        )
        return found

    async def adopt(self, replica: str, sequence_id: str, ingress_id: str) -> bool:
        is_there: bool = await self._call(
            replica, "adopt", sequence_id, ingress_id, deadline_s=HOLDING_TIMEOUT_S
        )
        return is_there

    async def poll(self, replica: str, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        reply: PollReply = await self._call(
            replica, "poll", ingress_id, ack, timeout_s, deadline_s=timeout_s + POLL_SLACK_S
        )
        return reply

    async def heartbeat(self, ingress_id: str, replicas: Sequence[str]) -> None:
        """Tell controller, scheduler and replicas that this ingress lives, passing over the dead.

        A controller that hangs is restarted, and adopts what runs; an ingress that hears nobody
        ends; see `HeartbeatMonitor`.
        """
        beats: list[tuple[str, tuple[str, ...]]] = [(self._controller, (ingress_id, self._actor))]
        beats += [(name, (ingress_id,)) for name in (self._scheduler, *replicas)]
        began_s = time.monotonic()
        results = await asyncio.gather(
            *(
                self._call(name, "ingress_heartbeat", *who, deadline_s=HEARTBEAT_TIMEOUT_S)
                for name, who in beats
            ),
            return_exceptions=True,
        )
        now_s = time.monotonic()
        answered = [not _is_lost(result) for result in results]
        verdict = self._hearing.judge(
            answered[0],
            any(answered),
            now_s=now_s,
            stood_still_s=event_loop_stall_s(began_s, now_s, HEARTBEAT_TIMEOUT_S),
        )
        if verdict is Liveness.END_ITSELF:
            self._end("nobody answers it")
        elif verdict is Liveness.RESTART_CONTROLLER:
            await self._restart(self._controller)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, PASSED_OVER):
                raise result

    def _end(self, reason: str) -> None:
        """At once, as there may be nothing left to end in order with; Serve starts another one."""
        logger.error("this ingress ends: %s", reason)
        os._exit(1)

    async def _restart(self, name: str) -> None:
        from actors.rpc.ray_rpc import restart

        logger.warning("%s hangs; it is restarted", name)
        await restart(name)

    async def push_metrics(self, source: str, families: bytes) -> None:
        await self._call(self._controller, "push_metrics", source, families)

    async def auto_reports(self, reports: Sequence[AutoReport]) -> None:
        await self._call(self._controller, "auto_reports", list(reports))

    async def history(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self._call(self._controller, "history")
        return found

    async def operators_view(self) -> dict[str, Any]:
        """What scheduler and controller show; a part whose actor is away is left out, and named."""
        actors = (self._scheduler, self._controller)
        answers = await asyncio.gather(
            *(self._call(n, "operators_view", deadline_s=SCHEDULER_TIMEOUT_S) for n in actors),
            return_exceptions=True,
        )
        view: dict[str, Any] = {"at_unix_s": time.time(), "replicas": [], "missing": {}}
        for name, answer in zip(actors, answers, strict=True):
            if isinstance(answer, QuadrigaError):
                view["missing"][name] = answer.message
            elif isinstance(answer, BaseException):
                raise answer
            else:
                view |= answer
        return view

    async def metrics(self) -> bytes:
        page: bytes = await self._call(self._controller, "metrics")
        return page

    async def _call(
        self, name: str, method: str, *args: object, deadline_s: float = CALL_TIMEOUT_S
    ) -> Any:
        from actors.rpc.ray_rpc import call

        return await call(name, method, *args, timeout_s=deadline_s)


def _is_lost(result: object) -> bool:
    """Whether a call had no answer that this process could read."""
    if isinstance(result, ReplicaError):
        return result.code == "timeout"
    return isinstance(result, MemoryError)


def own_actor() -> str:
    """Name of the Ray actor this process is; empty where it is none."""
    import ray

    return ray.get_runtime_context().get_actor_name() or ""
