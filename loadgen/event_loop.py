"""Run a coroutine on the fastest event loop that is installed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_event_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end; uvloop where it is installed, for a cheaper generator.

    The cyclic garbage collector is held off meanwhile: captures are many small objects without
    cycles, and its passes would show up as latency.
    """
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())
