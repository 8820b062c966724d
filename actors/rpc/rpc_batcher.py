"""Small calls to one actor, made at about the same time, go together as one.

A call between actors costs a good half millisecond of processor time on either side taken
together, whatever it carries. Sequences that are prefilled together ask for places, rows and
commits at the same moments, so their calls travel together. What a caller sees is an ordinary
call: its own result, its own error.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.rpc.tasks import background
from quadriga.errors import QuadrigaError, ReplicaError

logger = logging.getLogger(__name__)

GATHER_S = 0.002
"""A call that follows another one sooner than this waits for the rest of it for company."""
MAX_BATCH = 64

Outcome = tuple[bool, Any]
"""(whether it returned, the result or the error)."""


class Caller(Protocol):
    """`actors.rpc.ray_rpc.call`."""

    async def __call__(self, name: str, method: str, *args: Any, timeout_s: float) -> Any: ...


@dataclass(slots=True)
class _PeerQueue:
    """Calls of one method of one actor that have not left yet.

    Attributes:
        left_s: When the last batch left, loop time.
    """

    waiting: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = field(default_factory=list)
    left_s: float = float("-inf")
    is_gathering: bool = False


class RpcBatcher:
    """The caller's side; on one event loop.

    The first call leaves at once. A call that is cancelled before it left is not made; one that
    is cancelled later may still take effect, as any call.
    """

    def __init__(self, call: Caller) -> None:
        self._call = call
        self._lines: dict[tuple[str, str], _PeerQueue] = {}

    async def call(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        """As `actors.rpc.ray_rpc.call`, of an actor that is a `BatchedCalls`.

        Raises:
            QuadrigaError: Whatever the method raised, or what befell the batch.
        """
        loop = asyncio.get_running_loop()
        line = self._lines.get((name, method))
        if line is None:
            self._forget_idle(loop.time())
            line = self._lines[name, method] = _PeerQueue()
        future: asyncio.Future[Any] = loop.create_future()
        line.waiting.append((args, future))
        if not line.is_gathering:
            line.is_gathering = True
            pause_s = line.left_s + GATHER_S - loop.time()
            if pause_s <= 0:
                # Whoever else calls in this turn of the loop comes along.
                loop.call_soon(self._leave, name, method, line, timeout_s)
            else:
                loop.call_later(pause_s, self._leave, name, method, line, timeout_s)
        return await future

    async def call_alone(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        """As `call`, for one that waits for nobody: it leaves at once, without company."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._send(name, method, [(args, future)], timeout_s)
        return await future

    def _leave(self, name: str, method: str, line: _PeerQueue, timeout_s: float) -> None:
        line.is_gathering = False
        line.left_s = asyncio.get_running_loop().time()
        waiting, line.waiting = line.waiting, []
        wanted = [(args, future) for args, future in waiting if not future.done()]
        for start in range(0, len(wanted), MAX_BATCH):
            background(self._send(name, method, wanted[start : start + MAX_BATCH], timeout_s))

    async def _send(
        self,
        name: str,
        method: str,
        batch: list[tuple[tuple[Any, ...], asyncio.Future[Any]]],
        timeout_s: float,
    ) -> None:
        try:
            payload = pickle.dumps([args for args, _ in batch], 5)
            reply = await self._call(name, "call_many", method, payload, timeout_s=timeout_s)
            outcomes: list[Outcome] = pickle.loads(reply)
        except QuadrigaError as exc:
            # An exception of its own for each: a traceback belongs to one waiter.
            outcomes = [(False, pickle.loads(pickle.dumps(exc, 5))) for _ in batch]
        except Exception as exc:  # a border: nobody awaits this task, and its callers would hang
            logger.exception("%s of %s could not be called", method, name)
            message = f"{method} of {name} could not be called: {exc!r}"
            outcomes = [(False, ReplicaError(message)) for _ in batch]
        for (_, future), (is_well, value) in zip(batch, outcomes, strict=True):
            if future.done():
                continue
            if is_well:
                future.set_result(value)
            else:
                future.set_exception(value)

    def _forget_idle(self, now_s: float) -> None:
        """Peers come and go; a line that is not in use holds nothing worth keeping."""
        for key in [
            key
            for key, line in self._lines.items()
            if not line.waiting and line.left_s + GATHER_S < now_s
        ]:
            del self._lines[key]


class BatchedCalls:
    """The called actor's side; names its methods in `BATCHED`."""

    BATCHED: frozenset[str] = frozenset()

    async def call_many(self, method: str, payload: bytes) -> bytes:
        """RPC: make every call of a batch, side by side; answers all outcomes in their order.

        Raises:
            ReplicaError: The method does not take batches.
        """
        if method not in self.BATCHED:
            raise ReplicaError(f"{method} does not take batches", code="unknown_method")
        made: Callable[..., Awaitable[Any]] = getattr(self, method)
        calls: list[tuple[Any, ...]] = pickle.loads(payload)
        if len(calls) == 1:
            return pickle.dumps([await _outcome(made(*calls[0]))], 5)
        return pickle.dumps(await asyncio.gather(*(_outcome(made(*args)) for args in calls)), 5)


async def _outcome(made: Awaitable[Any]) -> Outcome:
    try:
        return True, await made
    except QuadrigaError as exc:
        return False, exc
    except Exception as exc:  # the border of the actor: one bug must not fail its companions
        logger.exception("a call of a batch failed")
        return False, ReplicaError(f"the call failed: {exc!r}")
