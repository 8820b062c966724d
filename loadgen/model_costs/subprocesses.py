"""Start a process, wait until it is ready, and end it on every path."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from quadriga import pipes
from quadriga.errors import ConfigError

END_TIMEOUT_S = 30.0


@contextmanager
def python_process(
    arguments: Sequence[str], *, env: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python ARGUMENTS` in its own process group; interrupt it, and kill what stays.

    Args:
        env: Added to this process's environment.
        log: File for stdout and stderr, written anew; None makes stdout a pipe and leaves stderr.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with Path(log or os.devnull).open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=sink if log else subprocess.PIPE,
            stderr=sink if log else None,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process itself first, so that it can end its children in order."""
    # A shell's background job ignores SIGINT, and so do its children unless they choose otherwise.
    is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        for number in (signal.SIGTERM,) if is_deaf else (signal.SIGINT, signal.SIGTERM):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_TIMEOUT_S)
    finally:  # a second Ctrl-C ends the wait only
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


def read_line(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Return the next line of the process's stdout.

    Raises:
        ConfigError: It ended, or said nothing in time.
    """
    assert process.stdout is not None
    try:
        return pipes.read_line(process.stdout, timeout_s)
    except EOFError as exc:
        status = process.wait(END_TIMEOUT_S)
        raise ConfigError(f"the process ended with status {status}") from exc
    except TimeoutError as exc:
        raise ConfigError(str(exc)) from exc
