"""`python -m serve_app` in a process group of its own, as a shell or `timeout` starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from quadriga.client import Client, RetryPolicy
from quadriga.ports import RAY_ON_LOOPBACK, free_port
from tests.e2e.roles import argument
from tests.waiting import wait_until

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 240.0
READY = "Ctrl-C stops everything"
PROC = Path("/proc")
RAYS_OWN = ("gcs_server", "raylet")
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}


class ServeCommand:
    """The running command, what it has said, and every process of its service."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        http_port, grpc_port = free_port(), free_port()
        # Not what a service of this process has made of its environment: the command has its own.
        own = ("QUADRIGA_", "RAY_SERVE_", *RAY_ON_LOOPBACK)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        self.url = f"http://127.0.0.1:{http_port}"
        self.grpc_target = f"127.0.0.1:{grpc_port}"
        self._key_file = folder / "quadriga" / "api_key"
        self._lines: list[str] = []
        self._processes: dict[int, str] = {}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "serve_app", "model=quadriga-s", argument(1)),
                "engine.compile=off",
                *("--http-port", str(http_port), "--grpc-port", str(grpc_port), *arguments),
            ],
            env=environment
            | {
                "XDG_STATE_HOME": str(folder),
                "QUADRIGA_ADMIN_PORT": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self) -> str:
        return "".join(self._lines)

    @property
    def key(self) -> str:
        """That its gRPC port asks for."""
        return self._key_file.read_text(encoding="utf-8").strip()

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=END_TIMEOUT_S)

    def sdk(self) -> Client:
        once = RetryPolicy(max_attempts=1)
        return Client(self.grpc_target, api_key=self.key, timeout_s=END_TIMEOUT_S, retry=once)

    def until(self, is_so: Callable[[], bool], timeout_s: float = END_TIMEOUT_S) -> None:
        """Raises: AssertionError when it is not so in time; with what the command has said."""
        wait_until(is_so, timeout_s, lambda: self.said)

    def until_ready(self) -> None:
        self.until(lambda: READY in self.said or self._process.poll() is not None, START_TIMEOUT_S)
        assert self._process.poll() is None, self.said
        self._processes = {pid: _start_time(pid) for pid in _tree(self._process.pid)}
        rays = [pid for pid in self._processes if _name(pid) in RAYS_OWN]
        assert rays
        ports = [c for pid in rays for c in psutil.Process(pid).net_connections("tcp")]
        assert {c.laddr.ip for c in ports if c.status == "LISTEN"} <= LOOPBACK

    def signal(self, number: int, *, name: str = "") -> None:
        """To the command, or to those of its processes that have this name."""
        for pid in [p for p in self._processes if _name(p) == name] if name else [self.pid]:
            os.kill(pid, number)

    def signal_group(self, number: int) -> None:
        os.killpg(self.pid, number)

    def signal_all(self, number: int) -> None:
        """To every process of the service, as systemd does by default."""
        for pid in self._processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal_until_over(self, number: int) -> None:
        """To the command, again and again, as an impatient user does."""

        def is_over() -> bool:
            self._process.send_signal(number)  # to nobody once it has ended
            return self._process.poll() is not None

        self.until(is_over)

    def status(self) -> int:
        """Wait for the end and return the exit status, negative after a signal's default."""
        status = self._process.wait(END_TIMEOUT_S)
        self._reader.join(END_TIMEOUT_S)
        return status

    def left(self) -> list[str]:
        """Names of processes of the service that still run."""
        return [
            _name(pid)
            for pid, started in self._processes.items()
            if pid != self.pid and _start_time(pid) == started
        ]

    def kill(self) -> None:
        """End whatever is left, after a test that failed."""
        for pid, started in {self.pid: _start_time(self.pid), **self._processes}.items():
            if started and _start_time(pid) == started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(END_TIMEOUT_S)
        if self._process.stdout is not None:
            self._reader.join(END_TIMEOUT_S)
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)


@contextmanager
def serve_command(folder: Path, *arguments: str) -> Iterator[ServeCommand]:
    """The command, ready, until the block ends."""
    command = ServeCommand(folder, *arguments)
    try:
        command.until_ready()
        yield command
    finally:
        command.kill()


def _tree(pid: int) -> set[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (fields := _fields(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, unseen = set(), [pid]
    while unseen:
        found.add(unseen[-1])
        unseen += children.get(unseen.pop(), [])
    return found


def _start_time(pid: int) -> str:
    """When a process began, which its number alone does not show; empty once it has ended."""
    fields = _fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _fields(pid: int) -> list[str]:
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
