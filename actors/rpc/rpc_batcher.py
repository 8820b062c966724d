"""Small calls to one actor, made at about the same time, go together as one call.

A call between actors takes both sides processor time, whatever it carries. Sequences that are
prefilled together ask for places, rows and commits at the same moments, so their calls go together.
Each caller gets its own result or its own error.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.rpc.connections import DirectlyCalled, Outcome, outcome_of
from quadriga.background import background
from quadriga.errors import QuadrigaError, ReplicaError

logger = logging.getLogger(__name__)

GATHER_S = 0.002
"""A call that follows a batch sooner than this waits for the rest of it, so that others join."""
MAX_BATCH = 64
TELL_TIMEOUT_S = 5.0
TELL_TRIES = 3


class Caller(Protocol):
    """`actors.rpc.ray_rpc.call`."""

    async def __call__(self, name: str, method: str, *args: Any, timeout_s: float) -> Any: ...


@dataclass(slots=True)
class _Batch:
    """Calls of one method of one actor that were not sent yet.

    Attributes:
        sent_s: When the last batch was sent, loop time.
        is_due: Whether a task sends the waiting calls soon.
    """

    waiting: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = field(default_factory=list)
    sent_s: float = float("-inf")
    is_due: bool = False


class RpcBatcher:
    """The caller's side; on one event loop.

    The first call is sent at once, with the other calls of the same turn of the loop. A call that
    is cancelled before it is sent is not made; one that is cancelled later may still take effect.
    """

    def __init__(self, call: Caller) -> None:
        self._call = call
        self._batches: dict[tuple[str, str], _Batch] = {}

    async def call(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        """As `actors.rpc.ray_rpc.call`, of an actor that is a `BatchedCalls`.

        Raises:
            QuadrigaError: Whatever the method raised, or what the whole batch failed with.
        """
        loop = asyncio.get_running_loop()
        batch = self._batches.get((name, method))
        if batch is None:
            self._forget_idle(loop.time())
            batch = self._batches[name, method] = _Batch()
        future: asyncio.Future[Any] = loop.create_future()
        batch.waiting.append((args, future))
        if not batch.is_due:
            batch.is_due = True
            pause_s = batch.sent_s + GATHER_S - loop.time()
            background(self._send(name, method, batch, pause_s, timeout_s))
        return await future

    async def call_alone(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        """As `actors.rpc.ray_rpc.call`: at once, and in no batch."""
        return await self._call(name, method, *args, timeout_s=timeout_s)

    async def tell(self, name: str, method: str, *args: Any) -> None:
        """Call an actor that may be gone, where no answer is needed.

        The call is made again where no answer came, as it may not have arrived either: it must be
        one that may be repeated.
        """
        for _ in range(TELL_TRIES):
            try:
                await self._call(name, method, *args, timeout_s=TELL_TIMEOUT_S)
                return
            except QuadrigaError as exc:
                logger.info("%s of %s: %s", method, name, exc)
                if exc.code not in ("timeout", "unreachable"):
                    return
                if exc.code == "unreachable":
                    await asyncio.sleep(TELL_TIMEOUT_S)

    async def _send(
        self, name: str, method: str, batch: _Batch, pause_s: float, timeout_s: float
    ) -> None:
        """Send what has gathered after the pause; what exceeds MAX_BATCH goes beside it."""
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        batch.is_due, batch.sent_s = False, asyncio.get_running_loop().time()
        wanted = [(args, future) for args, future in batch.waiting if not future.done()]
        batch.waiting = wanted[MAX_BATCH:]
        if batch.waiting:
            batch.is_due = True
            background(self._send(name, method, batch, 0.0, timeout_s))
        calls = [args for args, _ in wanted[:MAX_BATCH]]
        if not calls:
            return
        try:
            outcomes: list[Outcome] = await self._call(
                name, "call_many", method, calls, timeout_s=timeout_s
            )
        except Exception as exc:  # a border: no caller awaits this task, and all would hang
            error = exc
            if not isinstance(exc, QuadrigaError):
                logger.exception("%s of %s could not be called", method, name)
                error = ReplicaError(f"{method} of {name} could not be called: {exc!r}")
            # An exception of its own for each caller: each adds its own traceback.
            outcomes = [(False, copy.copy(error)) for _ in calls]
        for (_, future), (is_well, value) in zip(wanted, outcomes, strict=False):
            if future.done():
                continue
            if is_well:
                future.set_result(value)
            else:
                future.set_exception(value)

    def _forget_idle(self, now_s: float) -> None:
        """Drop the batches of actors that were not called lately, as actors come and go."""
        self._batches = {
            key: batch
            for key, batch in self._batches.items()
            if batch.waiting or batch.sent_s + GATHER_S >= now_s
        }


class BatchedCalls(DirectlyCalled):
    """The called actor's side; names its methods in `BATCHED`."""

    BATCHED: frozenset[str] = frozenset()

    async def call_many(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        """RPC: make every call of a batch, side by side; returns all outcomes in their order.

        Raises:
            ReplicaError: The method does not take batches.
        """
        if method not in self.BATCHED:
            raise ReplicaError(f"{method} does not take batches", code="unknown_method")
        made: Callable[..., Awaitable[Any]] = getattr(self, method)
        if len(calls) == 1:
            return [await outcome_of(made(*calls[0]))]
        return await asyncio.gather(*(outcome_of(made(*args)) for args in calls))
