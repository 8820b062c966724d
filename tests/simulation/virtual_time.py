"""An asyncio event loop whose time goes on only when nothing is left to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

UNIX_EPOCH_S = 1_000_000.0
"""What `VirtualClock.unix_s` is when a run begins."""


class _Selector(selectors.SelectSelector):
    """Waits by moving the loop's time forward."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the run waits for something that no timer will bring")
        self.loop.now_s += timeout
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
