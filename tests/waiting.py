"""Waiting for what a test expects: it goes on as soon as that is so, and fails where it is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

MIN_LOOK_INTERVAL_S, MAX_LOOK_INTERVAL_S = 0.02, 0.2
PATIENCE_S = 60.0


def wait_until(
    is_true: Callable[[], bool],
    timeout_s: float = PATIENCE_S,
    explain: Callable[[], object] = lambda: "",
) -> None:
    """Wait for something to become the case. Raises: AssertionError when it does not in time.

    Only a look that begins after that time tells: a slow one shows what was the case long before.
    The longer it takes, the rarer the looks: they need the processors that others wait for, too.
    """
    began = time.monotonic()
    is_last = False
    while not is_true():
        assert not is_last, f"not within {timeout_s} s: {explain()}"
        waited = time.monotonic() - began
        time.sleep(min(MAX_LOOK_INTERVAL_S, MIN_LOOK_INTERVAL_S + waited / 20))
        is_last = time.monotonic() > began + timeout_s


async def until(is_true: Callable[[], object], *, within_s: float = PATIENCE_S) -> None:
    """As `wait_until`, of what the event loop or a thread brings about. Raises: TimeoutError."""
    async with asyncio.timeout(within_s):
        while not is_true():  # noqa: ASYNC110  (what is looked at has no event)
            await asyncio.sleep(0.001)


async def settled(num_turns: int = 5) -> None:
    """Let the tasks that can run do so, so many times one after the other."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
