"""An asyncio event loop whose time goes on only when nothing is left to do."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

UNIX_EPOCH_S = 1_000_000.0
"""What `VirtualClock.unix_s` is when a run begins."""


MAX_S = 3600.0
"""A run that takes longer waits for something that will not come."""


class _Selector(selectors.SelectSelector):
    """Waits by moving the loop's time forward."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the run waits for something that no timer will bring")
        self.loop.now_s += timeout
        if self.loop.now_s > MAX_S:
            raise RuntimeError(f"the run is not over after {MAX_S:.0f} virtual seconds")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in the order of asyncio's own loop; waiting costs no real time.

    Attributes:
        now_s: Virtual seconds since the loop was made.
        failures: What tasks raised that nobody awaited.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.failures: list[BaseException] = []
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self.now_s

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
