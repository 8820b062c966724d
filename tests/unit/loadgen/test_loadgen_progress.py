"""The progress bar shows the live counters and leaves nothing running."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console

from loadgen.progress import progress_bar
from loadgen.runner import Live


def show(*, terminal: bool, enabled: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)

    async def run() -> None:
        live = Live(num_requests=4)
        async with progress_bar(console, live, enabled=enabled):
            live.sent, live.ended, live.broken, live.note = 4, 3, 1, "step 2/8"
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    return out.getvalue()


def test_shows_counters_on_a_terminal() -> None:
    text = show(terminal=True)
    assert "3/4" in text
    assert "1 running" in text
    assert "1 broken" in text
    assert "step 2/8" in text


def test_says_nothing_elsewhere() -> None:
    assert show(terminal=False) == ""
    assert show(terminal=True, enabled=False) == ""
