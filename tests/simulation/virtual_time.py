"""An asyncio event loop whose time goes on only when nothing is left to do."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any
from unittest.mock import patch

UNIX_EPOCH_S = 1_000_000.0
"""What `VirtualClock.unix_s` is when a run begins."""


MAX_S = 3600.0
"""A run that takes longer waits for something that will not come."""


class VirtualHandle:
    """Something that is due, as `asyncio.Handle`; without a callback where it is cancelled."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Any, args: Any, context: Context | None) -> None:
        self.callback, self.args = callback, args
        self.context = copy_context() if context is None else context

    def cancel(self) -> None:
        self.callback = self.args = None

    def cancelled(self) -> bool:
        return self.callback is None


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in their order; waiting costs no real time, and there is nothing to select.

    What is due at one moment runs in the order in which it was asked for.

    Args:
        max_s: See `MAX_S`.

    Attributes:
        now_s: Virtual seconds since the loop was made.
        failures: What tasks raised that nobody awaited.
        owner: Says in a callback's context whose it is, where there are processes.
    """

    owner: ContextVar[Any] = ContextVar("owner", default=None)

    def __init__(self, max_s: float = MAX_S) -> None:
        super().__init__()
        self._max_s = max_s
        self.now_s = 0.0
        self.failures: list[BaseException] = []
        self.num_callbacks = 0
        self._due: deque[VirtualHandle] = deque()
        self._later: list[tuple[float, int, VirtualHandle]] = []
        self._number = 0
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        handle = VirtualHandle(callback, args, context)
        self._due.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        handle = VirtualHandle(callback, args, context)
        self._number += 1
        heappush(self._later, (when, self._number, handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        handle = VirtualHandle(callback, args, context)
        self._number += 1
        heappush(self._later, (self.now_s + delay, self._number, handle))
        return handle

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def _run_once(self) -> None:
        """Run until the loop is stopped."""
        due, later, owner = self._due, self._later, self.owner
        while not self._stopping:  # type: ignore[attr-defined]
            if not due:
                while later and later[0][2].callback is None:
                    heappop(later)
                if not later:
                    raise RuntimeError("the run waits for something that no timer will bring")
                self.now_s = max(self.now_s, later[0][0])
                if self.now_s > self._max_s:
                    why = f"the run is not over after {self._max_s:.0f} virtual seconds"
                    raise RuntimeError(why)
            now_s = self.now_s
            while later and later[0][0] <= now_s:
                due.append(heappop(later)[2])
            for _ in range(len(due)):
                handle = due.popleft()
                callback, context = handle.callback, handle.context
                process = context.get(owner)
                if callback is None or not (process is None or process.takes(handle)):
                    continue
                self.num_callbacks += 1
                try:
                    context.run(callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as exc:  # as asyncio's own handles
                    self.failures.append(exc)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if (error := context.get("exception")) is not None:
            self.failures.append(error)


class VirtualClock:
    """The machine's clocks, by the running loop's time."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def unix_s(self) -> float:
        return UNIX_EPOCH_S + self.now_s()


async def in_line(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`asyncio.to_thread`, without a thread."""
    await asyncio.sleep(0)
    return function(*args, **kwargs)


@contextmanager
def virtual_clocks() -> Iterator[None]:
    """Have whatever runs inside read the running loop's time, and start no thread to wait for."""
    clock = VirtualClock()
    with (
        patch.object(time, "monotonic", clock.now_s),
        patch.object(time, "time", clock.unix_s),
        patch.object(asyncio, "to_thread", in_line),
    ):
        yield


def run_virtually(main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine on a loop of its own, and end whatever it leaves behind.

    Raises:
        BaseException: What the coroutine raised, or a task that nobody awaited.
    """
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        for error in loop.failures:
            raise error
    finally:
        asyncio.set_event_loop(None)
        loop.close()
