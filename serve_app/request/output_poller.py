"""Fetches output: one poll loop per replica that runs sequences of this ingress.

A loop asks for everything pending at once, and acknowledges what it delivered with its next poll,
so a lost reply loses nothing. Replicas that stop answering are found here too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from quadriga.core.output import EngineOutput, PollReply
from quadriga.core.routing import ClusterView
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError, is_known_death
from quadriga.policies.liveness import is_stalled, patience_s
from serve_app.ops.metrics import IngressMetrics
from serve_app.request.cluster_client import ClusterClient

logger = logging.getLogger("quadriga.ingress")

RETRY_PAUSE_S = 0.2
HUNG = "hung"
MAX_LOOK_GAP_S = 2.0
"""`silences_s` is called more often than this, unless the process stands still."""

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class OutputSink(Protocol):
    """What the poll loops report to."""

    def deliver(self, replica: str, emissions: list[EngineOutput]) -> None: ...

    def replica_lost(self, replica: str, error: QuadrigaError) -> None: ...


@dataclass(slots=True)
class _PollLoop:
    """The state of polling one replica.

    Attributes:
        live: Sequences of this ingress that the replica runs.
        ack: Last number delivered, of `incarnation`.
        answered_s: When a poll was last answered, loop time.
        patience: Of the poll under way.
        is_given_up: The replica was found to be gone by other means.
    """

    live: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    incarnation: str | None = None
    ack: int = 0
    answered_s: float = 0.0
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
        cluster: ClusterClient,
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
        self._polls: dict[str, _PollLoop] = {}
        self._looked_s: float | None = None

    @property
    def replicas(self) -> list[str]:
        """Replicas that run sequences of this ingress."""
        return [name for name, poll in self._polls.items() if poll.live]

    def watch(self, replica: str, sequence_id: str) -> None:
        """Poll `replica` until `unwatch`."""
        poll = self._polls.setdefault(replica, _PollLoop())
        poll.live.add(sequence_id)
        if poll.task is None:
            # Set here: `silences_s` may be called before the task has its first turn.
            poll.answered_s = asyncio.get_running_loop().time()
            poll.task = self._spawn(self._run(replica, poll))

    def unwatch(self, replica: str, sequence_id: str) -> None:
        poll = self._polls.get(replica)
        if poll is not None:
            poll.live.discard(sequence_id)

    def silences_s(self) -> dict[str, float]:
        """Seconds since each replica that is being polled last answered."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        # Where this process itself stood still, answers may have come and not been read.
        stood_still_s = now_s - (self._looked_s or now_s) - MAX_LOOK_GAP_S
        self._looked_s = now_s
        polls = {n: v for n, v in self._polls.items() if v.live and v.task is not None}
        if stood_still_s > 0:
            for poll in polls.values():
                poll.answered_s = min(now_s, poll.answered_s + stood_still_s)
        return {name: now_s - poll.answered_s for name, poll in polls.items()}

    def give_up(self, replica: str) -> None:
        """End the poll under way: the replica is taken to be gone."""
        poll = self._polls.get(replica)
        if poll is None or poll.task is None:
            return
        poll.is_given_up = True
        if poll.patience is not None:
            poll.patience.reschedule(asyncio.get_running_loop().time())

    async def _run(self, replica: str, poll: _PollLoop) -> None:
        try:
            while poll.live:
                try:
                    await self._poll_while_live(replica, poll)
                    if not poll.live:
                        await self._acknowledge(replica, poll)
                except Exception:  # the sequences there would otherwise hang until their deadlines
                    logger.exception("the output of %s could not be fetched", replica)
                    await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            poll.task = None
            if not poll.live:
                self._polls.pop(replica, None)

    async def _poll_while_live(self, replica: str, poll: _PollLoop) -> None:
        loop = asyncio.get_running_loop()
        poll.answered_s = loop.time()
        while poll.live:
            try:
                reply = await self._poll(replica, poll)
            except QuadrigaError as exc:
                self._metrics.poll_failures.labels(exc.code).inc()
                if is_known_death(exc):
                    self._give_up(replica, poll, exc)
                    return
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            poll.answered_s = loop.time()
            self._metrics.poll_replies.inc()
            if poll.incarnation not in (None, reply.incarnation):
                self._give_up(replica, poll, ReplicaDied(f"{replica} was started anew"))
                return
            poll.incarnation = reply.incarnation
            if reply.emissions:
                self._sink.deliver(replica, reply.emissions)
            poll.ack = reply.last_seq

    async def _poll(self, replica: str, poll: _PollLoop) -> PollReply:
        """Raises: ReplicaDied, code "hung", after `give_up`."""
        try:
            async with asyncio.timeout(0.0 if poll.is_given_up else None) as poll.patience:
                return await self._cluster.poll(
                    replica, self._ingress_id, poll.ack, self._poll_timeout_s
                )
        except TimeoutError as exc:
            silence_s = asyncio.get_running_loop().time() - poll.answered_s
            raise ReplicaDied(f"{replica} was silent for {silence_s:.1f} s", code=HUNG) from exc
        finally:
            poll.patience = None

    async def _acknowledge(self, replica: str, poll: _PollLoop) -> None:
        """Let the replica drop what is here; a failure only costs it some memory for a while."""
        try:
            reply = await self._cluster.poll(replica, self._ingress_id, poll.ack, 0.0)
        except ReplicaError:
            return
        if reply.incarnation == poll.incarnation and reply.emissions:
            self._sink.deliver(replica, reply.emissions)
            poll.ack = reply.last_seq

    def _give_up(self, replica: str, poll: _PollLoop, error: QuadrigaError) -> None:
        lost = ReplicaDied(f"the replica that held the request was lost: {error.message}")
        poll.incarnation, poll.ack, poll.is_given_up = None, 0, False
        self._sink.replica_lost(replica, lost)
        poll.live.clear()


def silent_replicas(
    silences_s: Mapping[str, float],
    view: ClusterView,
    *,
    limit_s: float,
    doubt_s: float,
    max_age_s: float,
) -> list[str]:
    """Return the replicas that are to be given up: a process that is stopped raises no error.

    Two signs are enough: polls without an answer for `doubt_s`, and no report to the scheduler for
    `max_age_s` (or the controller has dropped it). Polls alone count after `limit_s`. Where half
    of the replicas are silent at once, the machine is taken to be stalled, and it takes longer.

    Args:
        silences_s: Seconds since each polled replica last answered.
        view: The last one of the scheduler; an old one adds no sign.
    """
    silences = list(silences_s.values())
    longest_s = patience_s(silences, limit_s=limit_s)
    ages_s = {s.info.name: view.taken_unix_s - s.taken_unix_s for s in view.snapshots}
    is_quiet = is_stalled(silences, limit_s=2 * doubt_s) or is_stalled(
        list(ages_s.values()), limit_s=2 * max_age_s
    )
    found = []
    for name, silence_s in silences_s.items():
        is_doubted = bool(ages_s) and ages_s.get(name, max_age_s + 1.0) > max_age_s
        if silence_s > longest_s or (silence_s > doubt_s and is_doubted and not is_quiet):
            found.append(name)
    return found
