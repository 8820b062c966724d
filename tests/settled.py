"""What was begun on the event loop goes as far as it can."""

from __future__ import annotations

import asyncio


async def settled(num_turns: int = 5) -> None:
    """Let the tasks that can run do so, so many times one after the other."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
