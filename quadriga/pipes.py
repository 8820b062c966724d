"""Lines from another process, each with a deadline."""

from __future__ import annotations

import os
import select
import time
from typing import IO


def read_line(pipe: IO[bytes], timeout_s: float) -> str:
    """Return the next line of a pipe, without its end.

    Nothing is read beyond it: a reader with a buffer takes two lines that came together at once,
    and whoever then waits for the pipe to be readable waits for a third.

    Raises:
        EOFError: The pipe ended before the line did.
        TimeoutError: There was no whole line in time.
    """
    deadline_s = time.monotonic() + timeout_s
    poll = select.poll()  # `select.select` takes no descriptor above 1,023
    poll.register(pipe, select.POLLIN)
    data = b""
    while not data.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if not poll.poll(1000.0 * max(0.0, left_s)):
            raise TimeoutError(f"the process said nothing within {timeout_s:g} s")
        byte = os.read(pipe.fileno(), 1)
        if not byte:
            raise EOFError("the process has ended")
        data += byte
    return data.decode().rstrip("\n")
