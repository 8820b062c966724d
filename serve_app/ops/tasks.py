"""Background tasks of the ingress, which outlive the requests that start them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from quadriga.errors import QuadrigaError

logger = logging.getLogger("quadriga.ingress")


class Tasks:
    """Owns background tasks until `close`.

    With a request Ray cancels all that was started in the request's context; so tasks run in the
    context in which this object was made.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`; what it raises is logged."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def repeat(self, turn: Callable[[], Awaitable[None]], pause_s: float) -> None:
        """Run `turn` for ever, with a pause between; a turn that fails is followed by the next."""
        self.spawn(self._forever(turn, pause_s))

    async def close(self) -> None:
        """Cancel all tasks and wait for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forever(self, turn: Callable[[], Awaitable[None]], pause_s: float) -> None:
        name = turn.__name__.strip("_")
        while True:
            try:
                await turn()
            except QuadrigaError as exc:
                logger.warning("%s: %s", name, exc.message)
            except Exception:  # the loop goes on after a failure in one turn
                logger.exception("%s failed", name)
            await asyncio.sleep(pause_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task of the ingress failed", exc_info=task.exception())
