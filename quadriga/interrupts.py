"""Ctrl-C that waits until what it would tear is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the context; a second one at once.

    Only where Python's own handler would raise it: on the main thread. Contexts may be nested.
    """
    own = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not own:
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, own)
        came.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
        if came:
            raise KeyboardInterrupt
