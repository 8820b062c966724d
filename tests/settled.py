"""What was begun on the event loop goes as far as it can."""

from __future__ import annotations

import asyncio


async def settled(num_turns: int = 5) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)
