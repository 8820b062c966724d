"""A progress bar fed by the runner's live counters, cheap enough not to disturb a measurement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.runner import Live

REFRESH_S = 0.5


@asynccontextmanager
async def progress_bar(console: Console, live: Live, *, enabled: bool) -> AsyncIterator[None]:
    """Show the counters while the body runs; on a console that is no terminal show nothing."""
    if not enabled or not console.is_terminal:
        yield
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
    )
    with progress:
        ticker = asyncio.create_task(_tick(progress, live))
        try:
            yield
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
            _update(progress, live, 0.0)


async def _tick(progress: Progress, live: Live) -> None:
    progress.add_task("requests", total=None, detail="")
    events, at_s = live.num_events, time.monotonic()
    while True:
        await asyncio.sleep(REFRESH_S)
        now_s = time.monotonic()
        rate = (live.num_events - events) / (now_s - at_s)
        events, at_s = live.num_events, now_s
        _update(progress, live, rate)


def _update(progress: Progress, live: Live, rate: float) -> None:
    for task in progress.task_ids:
        detail = f"{live.sent - live.ended} running  {rate:,.0f} events/s"
        if live.note:
            detail = f"{live.note}  {detail}"
        if live.broken:
            detail += f"  [red]{live.broken} broken[/red]"
        progress.update(task, total=live.num_requests or None, completed=live.ended, detail=detail)
    progress.refresh()
