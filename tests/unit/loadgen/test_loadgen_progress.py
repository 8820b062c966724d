"""The progress bar shows the live counters and leaves nothing running."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console

from loadgen.report.progress import Steps, progress_bar
from loadgen.runner import Live
from quadriga.clock import ManualClock


def show(*, terminal: bool, enabled: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)

    async def run() -> None:
        live = Live(num_requests=4)
        with progress_bar(console, live, enabled=enabled):
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


def steps(*, terminal: bool) -> str:
    """What is shown of four steps, one every twenty seconds."""
    out, clock = io.StringIO(), ManualClock(1000.0)
    console = Console(file=out, force_terminal=terminal, width=100)
    with Steps(console, "simulations", 4, clock.now_s) as bar:
        for _ in range(4):
            clock.advance(20.0)
            bar.advance()
    return out.getvalue()


def test_steps_are_a_bar_on_a_terminal() -> None:
    assert "4/4" in steps(terminal=True)


def test_steps_are_a_line_now_and_then_elsewhere() -> None:
    text = steps(terminal=False)
    assert text == "simulations: 2 of 4, 40 s\nsimulations: 4 of 4, 80 s\n"
