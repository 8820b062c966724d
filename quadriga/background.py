"""Tasks that outlive their callers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

from quadriga.clock import Clock
from quadriga.policies.liveness import event_loop_stall_s

Result = TypeVar("Result")

_running: set[asyncio.Task[Any]] = set()


def background(
    coroutine: Coroutine[Any, Any, Result], context: Context | None = None
) -> asyncio.Task[Result]:
    """Start a coroutine that outlives its caller, and keep its task from being collected.

    Args:
        context: Of the task; None: a copy of the caller's.
    """
    task = asyncio.get_running_loop().create_task(coroutine, context=context)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


async def overslept_s(clock: Clock, pause_s: float) -> float:
    """Sleep; returns by how much longer than asked this process stood still."""
    began_s = clock.now_s()
    await asyncio.sleep(pause_s)
    return event_loop_stall_s(began_s, clock.now_s(), pause_s)
