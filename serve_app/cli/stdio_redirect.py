"""A terminal for our own lines only: what libraries and their processes print goes to a file."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

LOG_NAME = "serve_app.log"


class StdioRedirect:
    """While it is entered, only what is printed to `terminal` reaches the terminal.

    Ray and Serve print and log from threads of their own, and the native code below them writes
    to the file descriptors 1 and 2; so it is these that are turned over to a file.

    Attributes:
        path: The file; it stays unless it is empty.
        terminal: What standard output was before. Writing to it never fails: where the terminal
            was closed, or the reader of a pipe is gone, the service still ends in order.
    """

    terminal: TextIO

    def __init__(self) -> None:
        self.path = Path()

    def __enter__(self) -> StdioRedirect:
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor, name = tempfile.mkstemp(prefix="quadriga-", suffix=".log")
        self.path = Path(name)
        self._saved = (os.dup(1), os.dup(2))
        raw = io.BufferedWriter(_Unfailing(os.dup(1), "w"))
        self.terminal = io.TextIOWrapper(raw, encoding="utf-8", line_buffering=True)
        self._turn_to(descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.terminal.close()
        for target, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, target)
            os.close(saved)
        if self.path.stat().st_size == 0:
            self.path.unlink()

    def move_to(self, folder: Path) -> None:
        """Go on writing in `folder`, beside the logs of the processes, with what was written."""
        sys.stdout.flush()
        sys.stderr.flush()
        path = folder / LOG_NAME
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, self.path.read_bytes())
        self.path.unlink()
        self.path = path
        self._turn_to(descriptor)

    def _turn_to(self, descriptor: int) -> None:
        for target in (1, 2):
            os.dup2(descriptor, target)
        os.close(descriptor)


class _Unfailing(io.FileIO):
    """A file that drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes
