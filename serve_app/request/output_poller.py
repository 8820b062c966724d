"""One poll loop per replica that holds sequences of this ingress.

A pump runs while its replica has live sequences of ours, and asks for everything pending at once.
It acknowledges what it delivered with its next poll, so a lost reply loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from quadriga.core.output import EngineOutput, PollReply
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError
from serve_app.ops.metrics import IngressMetrics
from serve_app.request.cluster import UNREACHABLE, Cluster

logger = logging.getLogger("quadriga.ingress")

RETRY_PAUSE_S = 0.2
HUNG = "hung"
MAX_LOOK_GAP_S = 2.0
"""Who looks after the silent comes by more often, unless the process stands still."""

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class OutputSink(Protocol):
    """Who the pumps work for."""

    def deliver(self, replica: str, emissions: list[EngineOutput]) -> None: ...

    def replica_lost(self, replica: str, error: QuadrigaError) -> None: ...


@dataclass(slots=True)
class _PollLoop:
    """The line to one replica.

    Attributes:
        live: Sequences of ours that the replica holds.
        ack: Last number delivered, of `incarnation`.
        heard_s: When a poll was last answered, loop time.
        patience: Of the poll under way.
        is_given_up: Somebody else knows that the replica is gone.
    """

    live: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    incarnation: str | None = None
    ack: int = 0
    heard_s: float = 0.0
    patience: asyncio.Timeout | None = None
    is_given_up: bool = False


class OutputPoller:
    """All poll loops of one ingress.

    Args:
        spawn: Starts a task that belongs to the ingress, not to the request that caused it.
        poll_timeout_s: A poll without news returns after this long.
    """

    def __init__(
        self,
        cluster: Cluster,
        ingress_id: str,
        sink: OutputSink,
        metrics: IngressMetrics,
        spawn: Spawn,
        *,
        poll_timeout_s: float,
    ) -> None:
        self._cluster = cluster
        self._ingress_id = ingress_id
        self._sink = sink
        self._metrics = metrics
        self._spawn = spawn
        self._poll_timeout_s = poll_timeout_s
        self._lines: dict[str, _PollLoop] = {}
        self._looked_s: float | None = None

    @property
    def replicas(self) -> list[str]:
        """Replicas that hold sequences of ours."""
        return [name for name, line in self._lines.items() if line.live]

    def watch(self, replica: str, sequence_id: str) -> None:
        """Poll `replica` until `unwatch`."""
        line = self._lines.setdefault(replica, _PollLoop())
        line.live.add(sequence_id)
        if line.task is None:
            # Now: somebody may look who is silent before the task has its first turn.
            line.heard_s = asyncio.get_running_loop().time()
            line.task = self._spawn(self._run(replica, line))

    def unwatch(self, replica: str, sequence_id: str) -> None:
        line = self._lines.get(replica)
        if line is not None:
            line.live.discard(sequence_id)

    def silences_s(self) -> dict[str, float]:
        """Seconds since each replica that is being polled last answered."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        # Where this process itself stood still, answers may lie there unread.
        stood_still_s = now_s - (self._looked_s or now_s) - MAX_LOOK_GAP_S
        self._looked_s = now_s
        lines = {n: v for n, v in self._lines.items() if v.live and v.task is not None}
        if stood_still_s > 0:
            for line in lines.values():
                line.heard_s = min(now_s, line.heard_s + stood_still_s)
        return {name: now_s - line.heard_s for name, line in lines.items()}

    def give_up(self, replica: str) -> None:
        """End the poll under way: the replica will not answer any more."""
        line = self._lines.get(replica)
        if line is None or line.task is None:
            return
        line.is_given_up = True
        if line.patience is not None:
            line.patience.reschedule(asyncio.get_running_loop().time())

    async def _run(self, replica: str, line: _PollLoop) -> None:
        try:
            while line.live:
                try:
                    await self._poll_while_live(replica, line)
                    if not line.live:
                        await self._acknowledge(replica, line)
                except Exception:  # a border: all that live there would hang until their deadlines
                    logger.exception("what %s says could not be fetched", replica)
                    await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            line.task = None
            if not line.live:
                self._lines.pop(replica, None)

    async def _poll_while_live(self, replica: str, line: _PollLoop) -> None:
        loop = asyncio.get_running_loop()
        line.heard_s = loop.time()
        while line.live:
            try:
                reply = await self._poll(replica, line)
            except QuadrigaError as exc:
                self._metrics.poll_failures.labels(exc.code).inc()
                if isinstance(exc, ReplicaDied) and exc.code != UNREACHABLE:
                    self._give_up(replica, line, exc)
                    return
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            line.heard_s = loop.time()
            self._metrics.poll_replies.inc()
            if line.incarnation not in (None, reply.incarnation):
                self._give_up(replica, line, ReplicaDied(f"{replica} was started anew"))
                return
            line.incarnation = reply.incarnation
            if reply.emissions:
                self._sink.deliver(replica, reply.emissions)
            line.ack = reply.last_seq

    async def _poll(self, replica: str, line: _PollLoop) -> PollReply:
        """Raises: ReplicaDied, code "hung", once somebody says that it will not answer."""
        try:
            async with asyncio.timeout(0.0 if line.is_given_up else None) as line.patience:
                return await self._cluster.poll(
                    replica, self._ingress_id, line.ack, self._poll_timeout_s
                )
        except TimeoutError as exc:
            silence_s = asyncio.get_running_loop().time() - line.heard_s
            raise ReplicaDied(f"{replica} was silent for {silence_s:.1f} s", code=HUNG) from exc
        finally:
            line.patience = None

    async def _acknowledge(self, replica: str, line: _PollLoop) -> None:
        """Let the replica drop what we have; a failure only costs it some memory for a while."""
        try:
            reply = await self._cluster.poll(replica, self._ingress_id, line.ack, 0.0)
        except ReplicaError:
            return
        if reply.incarnation == line.incarnation and reply.emissions:
            self._sink.deliver(replica, reply.emissions)
            line.ack = reply.last_seq

    def _give_up(self, replica: str, line: _PollLoop, error: QuadrigaError) -> None:
        lost = ReplicaDied(f"the replica that held the request was lost: {error.message}")
        line.incarnation, line.ack, line.is_given_up = None, 0, False
        self._sink.replica_lost(replica, lost)
        line.live.clear()
