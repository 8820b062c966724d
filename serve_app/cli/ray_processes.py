"""The processes of a Ray that was started here: out of our process group, and ended for sure.

Ray starts its processes in the process group of its caller. A signal to that group (from `timeout`,
a shell, a service manager) would end Ray's GCS before we have ended anything in order, and a driver
without its GCS waits for a minute and then ends its own process with status 1. So every process
that `ray.init` starts gets a session of its own, which all processes below it inherit.

`ray.init` also takes SIGTERM from its caller, twice: in Python, to end in its own way and with
status 1; and below Python, with a handler that prints a stack, passes the signal on, and aborts the
process some seconds later, whatever it does by then. Here the caller keeps it.

Ray gives its node 30 s to come up, which a busy machine may not keep; here it has
`NODE_PATIENCE_S`.

Ray's log monitor, a process that reads every log for drivers that print them, is not started: here
nobody prints them.

Ray's own tie stays: a process of Ray's is killed with the process that started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

VITAL = ("gcs_server", "raylet")
"""Without these nothing of Ray works, and calls to it hang."""
LOOK_INTERVAL_S = 0.05
NODE_PATIENCE_S = 240.0
"""For a node to report to Ray's GCS after its processes were started."""
_PROC = Path("/proc")


class RayProcesses:
    """Every process that Ray started within `starting`, and all below them."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def starting(self) -> Iterator[None]:
        """In this block a process that Ray starts has a session of its own; SIGTERM stays ours."""
        from ray._private import parameter, services, utils

        def start(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
            process: subprocess.Popen[bytes] = popen(*words, start_new_session=True, **options)
            self._started.append(process)
            return process

        def get_node(*words: Any) -> Any:
            give_up_s = time.monotonic() + NODE_PATIENCE_S
            while True:
                try:
                    return get_node_once(*words)
                except RuntimeError:  # it has not reported yet
                    if self.ended() or time.monotonic() > give_up_s:
                        raise
                time.sleep(LOOK_INTERVAL_S)

        quieter = partial(parameter.RayParams, include_log_monitor=False)  # type: ignore[arg-type]
        with (
            _replaced(parameter, "RayParams", quieter),
            _replaced(services, "ConsolePopen", start) as popen,
            _replaced(services, "get_node", get_node) as get_node_once,
            _replaced(utils, "set_sigterm_handler", lambda handler: None),
        ):
            try:
                yield
            finally:  # sets the system's handler again, which Ray's took the place of
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)

    @property
    def has_started(self) -> bool:
        return bool(self._started)

    def ended(self) -> str:
        """Name of a vital process that is not running any more; empty where all run."""
        for process in self._started:
            name = _name(process)
            if name in VITAL and process.poll() is not None:
                return name
        return ""

    def kill(self, *, within_s: float = 5.0) -> bool:
        """Kill all that are left. Returns whether none is left."""
        return self.await_end(0.0, kill_for_s=within_s)

    def await_end(self, within_s: float, *, kill_for_s: float = 5.0) -> bool:
        """Wait until all have ended; kill what has not within `within_s`.

        Returns:
            Whether none is left after a further `kill_for_s` seconds.
        """
        began_s = time.monotonic()
        while pids := self.pids():
            waited_s = time.monotonic() - began_s
            if waited_s > within_s + kill_for_s:
                return False
            if waited_s >= within_s:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK_INTERVAL_S)
        return True

    def pids(self) -> list[int]:
        """All that run: those of their sessions, as far as the system lists processes."""
        for process in self._started:
            process.poll()  # one that has ended stays in the list of processes until then
        sessions = {process.pid for process in self._started}
        if not _PROC.is_dir():
            return [process.pid for process in self._started if process.returncode is None]
        return [pid for pid, session in _sessions() if session in sessions]


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[Any]:
    """Another value of a module's name in this block; yields the module's own."""
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield own
    finally:
        setattr(module, name, own)


def _name(process: subprocess.Popen[bytes]) -> str:
    words: Any = process.args
    return Path(os.fsdecode(words[0])).name


def _sessions() -> Iterator[tuple[int, int]]:
    """(process, session) of every process that has not ended."""
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it ended meanwhile
        state, _, _, session, *_ = stat.rpartition(")")[2].split()
        if state not in "ZX":
            yield int(folder.name), int(session)
