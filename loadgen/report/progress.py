"""Progress: of a load, from the live counters of its runner, and of steps done one by one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from loadgen.runner import Live

REFRESH_S = 0.5
LINE_EVERY_S = 30.0


class Steps:
    """A bar for steps that are done one by one; where there is no terminal, a line now and then.

    Args:
        what: The steps' name, in the plural.
        now_s: The time, in seconds.
        is_shown: False shows neither.
    """

    def __init__(
        self,
        console: Console,
        what: str,
        total: int,
        now_s: Callable[[], float] = time.monotonic,
        *,
        is_shown: bool = True,
    ) -> None:
        self._console = console
        self._is_shown = is_shown
        self._what = what
        self._total = total
        self._done = 0
        self._now_s = now_s
        self._began_s = self._said_s = now_s()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            disable=not (is_shown and console.is_terminal),
        )
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def describe(self, text: str) -> None:
        """Name what is being done now."""
        self._bar.update(self._task, description=text)

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self._done += count
        self._bar.advance(self._task, count)
        now_s = self._now_s()
        is_silent = self._console.is_terminal or not self._is_shown
        if is_silent or now_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now_s
        took = f"{now_s - self._began_s:,.0f} s"
        self._console.print(f"{self._what}: {self._done} of {self._total}, {took}", highlight=False)


@contextmanager
def progress_bar(console: Console, live: Live, *, enabled: bool) -> Iterator[None]:
    """Show the counters while the body runs; on a console that is no terminal show nothing.

    Nothing is awaited at its end: a Ctrl-C that came while the body computed would be raised there,
    and what the body computed would be lost.
    """
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
    progress.add_task("requests", total=None, detail="")
    loop, events, at_s = asyncio.get_running_loop(), live.num_events, time.monotonic()
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal timer, events, at_s
        now_s = time.monotonic()
        _update(progress, live, (live.num_events - events) / (now_s - at_s))
        events, at_s = live.num_events, now_s
        timer = loop.call_later(REFRESH_S, tick)

    timer = loop.call_later(REFRESH_S, tick)
    with progress:
        try:
            yield
        finally:
            timer.cancel()
            _update(progress, live, 0.0)


def _update(progress: Progress, live: Live, rate: float) -> None:
    for task in progress.task_ids:
        detail = f"{live.sent - live.ended} running  {rate:,.0f} events/s"
        if live.note:
            detail = f"{live.note}  {detail}"
        if live.broken:
            detail += f"  [red]{live.broken} broken[/red]"
        progress.update(task, total=live.num_requests or None, completed=live.ended, detail=detail)
    progress.refresh()
