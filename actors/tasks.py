"""Tasks that outlive whoever starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_running: set[asyncio.Task[Any]] = set()


def background(coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a coroutine that outlives its caller, and keep its task from being collected."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task
