"""Tells the cluster what is over: cancellations to replicas, endings to the scheduler, batched."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from quadriga.errors import ReplicaError
from serve_app.ops.tasks import Tasks
from serve_app.request.cluster import Cluster

ENDED_PAUSE_S = 0.25


class CancellationBatcher:
    """Collects what ended and reports it, many at a time.

    Cancellations free rows and go at once; endings are only book-keeping and wait for company.
    """

    def __init__(self, cluster: Cluster, tasks: Tasks, ingress_id: str) -> None:
        self._cluster = cluster
        self._ingress_id = ingress_id
        self._tasks = tasks
        self._timer: asyncio.TimerHandle | None = None
        self._to_cancel: dict[tuple[str, str | None], list[str]] = {}
        self._ended: list[str] = []
        self._ended_tokens = 0
        self._work = asyncio.Event()

    def cancel(self, replica: str, sequence_id: str, *, is_ours: bool = True) -> None:
        """Have `replica` free a sequence.

        Args:
            is_ours: But not if another ingress has adopted it meanwhile. Otherwise whosever it is.
        """
        owner = self._ingress_id if is_ours else None
        self._to_cancel.setdefault((replica, owner), []).append(sequence_id)
        self._work.set()

    def ended(self, sequence_id: str, tokens: int) -> None:
        """A sequence is over, with this many tokens in all."""
        self._ended.append(sequence_id)
        self._ended_tokens += tokens
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ENDED_PAUSE_S, self._work.set)

    async def report_ended_sequences(self) -> None:
        """Wait for something to report, and send it off: who does not answer holds nobody up."""
        await self._work.wait()
        self._work.clear()
        for call in self._calls():
            self._tasks.spawn(_tell(call))

    async def flush(self) -> None:
        """Report all there is, and wait until everybody was told."""
        await asyncio.gather(*(_tell(call) for call in self._calls()))

    def _calls(self) -> list[Coroutine[Any, Any, None]]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        cancels, self._to_cancel = self._to_cancel, {}
        ended, self._ended = self._ended, []
        tokens, self._ended_tokens = self._ended_tokens, 0
        calls = [
            self._cluster.cancel(replica, ids, owner) for (replica, owner), ids in cancels.items()
        ]
        if ended:
            calls.append(self._cluster.finished(ended, tokens))
        return calls


async def _tell(call: Coroutine[Any, Any, None]) -> None:
    """Make a call; who cannot be told is dead, or frees by itself."""
    with suppress(ReplicaError):
        await call
