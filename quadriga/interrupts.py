"""Ctrl-C that waits for the end of a pass."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the context; a second one at once.

    Only where Python's own handler would raise it: on the main thread. Contexts may be nested.
    """
    own, came = signal.default_int_handler, list[int]()

    def note(number: int, _: object) -> None:
        signal.signal(signal.SIGINT, own)
        came.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    if is_own := is_main and signal.getsignal(signal.SIGINT) is own:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if is_own:
            signal.signal(signal.SIGINT, own)
        if came:
            raise KeyboardInterrupt
