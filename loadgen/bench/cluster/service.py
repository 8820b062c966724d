"""A service under test: one that runs already, or one started here and stopped afterwards."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.model_costs.subprocesses import python_process
from loadgen.options import API_KEY_VARIABLE
from loadgen.wire.client_http import HttpClient
from quadriga.errors import ConfigError
from quadriga.ports import free_port, use_private_ray

START_TIMEOUT_S = 300.0
PROBE_TIMEOUT_S = 5.0
PROBE_INTERVAL_S = 0.5
SHOWN_LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class ServiceUnderLoad:
    """How to reach a service.

    Attributes:
        pid: Its main process, where it was started here.
    """

    url: str
    grpc: str
    api_key: str | None
    pid: int | None = None

    def client(self, timeout_s: float) -> HttpClient:
        """Return a client of its HTTP API."""
        return HttpClient(self.url, timeout_s=timeout_s, api_key=self.api_key)


@contextmanager
def started_service(settings: Sequence[str], *, log: Path) -> Iterator[ServiceUnderLoad]:
    """Run `python -m serve_app SETTINGS` on free ports until the block ends.

    Args:
        log: Where its output goes.

    Raises:
        ConfigError: It ended or was not healthy in time; the message ends with its last lines.
    """
    http_port, grpc_port, key = free_port(), free_port(), secrets.token_urlsafe(24)
    words = ["-m", "serve_app", "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    use_private_ray()
    # Ray's workers are nice 15 by default; the engine they are compared with is not.
    env = {API_KEY_VARIABLE: key, "RAY_worker_niceness": "0"}
    service = ServiceUnderLoad(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", key)
    with python_process([*words, *settings], env=env, log=log) as process:
        _await_health(service, process, log)
        yield replace(service, pid=process.pid)


def _await_health(service: ServiceUnderLoad, process: subprocess.Popen[bytes], log: Path) -> None:
    client = service.client(PROBE_TIMEOUT_S)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not asyncio.run(_is_healthy(client)):
        if process.poll() is not None or time.monotonic() > deadline_s:
            what = "ended" if process.poll() is not None else f"not ready in {START_TIMEOUT_S:g} s"
            lines = log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]
            raise ConfigError(f"the service {what}; it said:\n" + "\n".join(lines))
        time.sleep(PROBE_INTERVAL_S)


async def _is_healthy(client: HttpClient) -> bool:
    try:
        status, _ = await client.fetch("GET", "/health")
    except ConnectionError:
        return False
    return status == 200
