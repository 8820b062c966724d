"""What the front door asks of the actors behind it, and how it asks them over Ray.

Every method raises errors of `quadriga.errors` only; Ray's own exceptions end in `actors.calls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from quadriga.errors import ReplicaError
from quadriga.types import (
    Admission,
    AdmitRequest,
    ClusterView,
    PollReply,
    SequenceState,
)

CALL_TIMEOUT_S = 10.0
POLL_SLACK_S = 5.0


class Cluster(Protocol):
    """The actors, by name. Raises: QuadrigaError only."""

    async def admit(self, request: AdmitRequest) -> Admission: ...

    async def finished(self, sequence_ids: Sequence[str], tokens: int) -> None: ...

    async def directory(self) -> ClusterView: ...

    async def submit(self, replica: str, state: SequenceState) -> None: ...

    async def cancel(self, replica: str, sequence_ids: Sequence[str]) -> None: ...

    async def poll(
        self, replica: str, ingress_id: str, ack: int, timeout_s: float
    ) -> PollReply: ...

    async def heartbeat(self, ingress_id: str, replicas: Sequence[str]) -> None: ...

    async def push_metrics(self, source: str, families: bytes) -> None: ...

    async def metrics(self) -> bytes: ...


class RayCluster:
    """The actors of one application as named Ray actors.

    Args:
        app_name: `QuadrigaConfig.name`; scheduler and controller are called after it.
    """

    def __init__(self, app_name: str) -> None:
        from actors.batches import CallBatcher
        from actors.calls import call

        self._calls = CallBatcher(call)
        self._scheduler = f"{app_name}:scheduler"
        self._controller = f"{app_name}:controller"

    async def admit(self, request: AdmitRequest) -> Admission:
        reply: Admission = await self._calls.call(
            self._scheduler, "admit", request, timeout_s=CALL_TIMEOUT_S
        )
        return reply

    async def finished(self, sequence_ids: Sequence[str], tokens: int) -> None:
        await self._call(self._scheduler, "finished", list(sequence_ids), tokens)

    async def directory(self) -> ClusterView:
        view: ClusterView = await self._call(self._scheduler, "directory")
        return view

    async def submit(self, replica: str, state: SequenceState) -> None:
        await self._calls.call(replica, "submit", state, timeout_s=CALL_TIMEOUT_S)

    async def cancel(self, replica: str, sequence_ids: Sequence[str]) -> None:
        await self._call(replica, "cancel", list(sequence_ids))

    async def poll(self, replica: str, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        reply: PollReply = await self._call(
            replica, "poll", ingress_id, ack, timeout_s, deadline_s=timeout_s + POLL_SLACK_S
        )
        return reply

    async def heartbeat(self, ingress_id: str, replicas: Sequence[str]) -> None:
        """Tell controller and replicas that this ingress lives; the dead ones are passed over."""
        targets = [self._controller, *replicas]
        results = await asyncio.gather(
            *(self._call(name, "ingress_heartbeat", ingress_id) for name in targets),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ReplicaError):
                raise result

    async def push_metrics(self, source: str, families: bytes) -> None:
        await self._call(self._controller, "push_metrics", source, families)

    async def metrics(self) -> bytes:
        page: bytes = await self._call(self._controller, "metrics")
        return page

    async def _call(
        self, name: str, method: str, *args: object, deadline_s: float = CALL_TIMEOUT_S
    ) -> Any:
        from actors.calls import call

        return await call(name, method, *args, timeout_s=deadline_s)
