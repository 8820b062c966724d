"""How a service on this machine ends, by real signals to real process groups."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from quadriga.errors import QuadrigaError, Unavailable
from tests.e2e.serve_command import ServeCommand, serve_command
from tests.reliability.cluster.control import gcs_address
from tests.reliability.cluster.fault_agent import APP

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

PACED = ("decode.pace=steady-15ms", "lifecycle.drain_timeout_s=200")
NUM_TOKENS = 600
"""At 15 ms each: long enough for new requests to be refused meanwhile, on any machine."""
NEVER_TOKENS = 1900
GONE_S = 120.0
"""Ray's own agents of a node look once a minute for the raylet, where that was killed."""
BODY = {"model": "quadriga-s", "prompt": "Count from 1 to 40.\n", "ignore_eos": True}
DELETE = """
import sys, ray
from ray import serve
ray.init(sys.argv[1], log_to_driver=False)
serve.delete(sys.argv[2], _blocking=False)
"""
BESIDE_INTERVAL_S = 0.05
SHORT = BODY | {"max_tokens": 1}


class Streams:
    """Streams over HTTP and gRPC, each read to its end by a thread of its own."""

    def __init__(self, service: ServeCommand, num_tokens: int) -> None:
        self._service = service
        self._num_tokens = num_tokens
        self._begun = threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(3)
        self._https = [self._pool.submit(self._read_http) for _ in range(2)]
        self._grpc: Future[QuadrigaError | None] = self._pool.submit(self._read_grpc)
        for _ in range(3):
            assert self._begun.acquire(timeout=120.0)

    def http(self) -> list[str]:
        """The last event of each."""
        return [future.result(240.0) for future in self._https]

    def grpc(self) -> QuadrigaError | None:
        """What it ended in."""
        return self._grpc.result(240.0)

    def _read_http(self) -> str:
        body = BODY | {"stream": True, "max_tokens": self._num_tokens}
        last = ""
        with (
            self._service.http() as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            for line in reply.iter_lines():
                if line and not last:
                    self._begun.release()
                last = line or last
        return last

    def _read_grpc(self) -> QuadrigaError | None:
        is_first = True
        with self._service.sdk() as client:
            try:
                for _ in client.stream(
                    BODY["prompt"], model="quadriga-s", max_tokens=self._num_tokens, ignore_eos=True
                ):
                    if is_first:
                        self._begun.release()
                    is_first = False
            except QuadrigaError as exc:
                return exc
        return None


class Beside:
    """A client that goes on sending short requests until the port is closed."""

    def __init__(self, service: ServeCommand) -> None:
        self._service = service
        self.replies: list[httpx.Response] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def statuses(self, path: str) -> set[int]:
        return {r.status_code for r in list(self.replies) if r.request.url.path == path}

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        with self._service.http() as client:
            while not self._is_over.wait(BESIDE_INTERVAL_S):
                with contextlib.suppress(httpx.HTTPError):  # at the very end the port is closed
                    self.replies.append(client.post("/v1/completions", json=SHORT))
                    self.replies += [client.get(path) for path in ("/health", "/live", "/none")]


def refusals(beside: Beside) -> Iterator[httpx.Response]:
    return (
        reply
        for reply in list(beside.replies)
        if reply.request.method == "POST" and reply.status_code == 503
    )


def assert_errors(streams: Streams) -> None:
    for last in streams.http():
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert isinstance(streams.grpc(), Unavailable)


def assert_all_gone(service: ServeCommand) -> None:
    service.until(lambda: not service.left(), GONE_S)


@pytest.mark.parametrize(
    "arguments",
    [(), pytest.param(("--proxy=serve",), marks=pytest.mark.slow)],
    ids=["haproxy", "serve"],
)
def test_a_signal_to_the_process_group_lets_streams_end(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """As `timeout 60 make serve` sends it: more than once, and to all of the group."""
    with serve_command(tmp_path, *PACED, *arguments) as service:
        streams, beside = Streams(service, NUM_TOKENS), Beside(service)
        service.until(lambda: 200 in beside.statuses("/health"))
        for _ in range(3):
            service.signal_group(signal.SIGTERM)
        service.until(lambda: any(refusals(beside)) and 503 in beside.statuses("/health"))
        with service.sdk() as client, pytest.raises(Unavailable):
            client.generate("Sort: 2 1\n", model="quadriga-s", max_tokens=1)
        assert all(last == "data: [DONE]" for last in streams.http())
        assert streams.grpc() is None
        assert service.status() == 0
        beside.end()
        refused = next(refusals(beside))
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "unavailable"
        assert beside.statuses("/v1/completions") == {200, 503}, "Serve's own 404 reaches no client"
        assert beside.statuses("/live") == {200}
        assert all(reply.headers["content-type"] == "application/json" for reply in beside.replies)
        assert "stopping: waiting up to" in service.said
        assert "3 running requests" in service.said
        assert service.said.rstrip().endswith("stopped")
        assert_all_gone(service)


def test_a_second_ctrl_c_ends_streams_in_an_error_and_everything_at_once(tmp_path: Path) -> None:
    with serve_command(tmp_path, *PACED) as service:
        streams = Streams(service, NEVER_TOKENS)
        service.signal(signal.SIGINT)
        service.until(lambda: "running requests" in service.said)
        service.signal_until_over(signal.SIGINT)
        assert_errors(streams)
        assert service.status() == 128 + signal.SIGINT
        assert "stopped at once" in service.said
        assert_all_gone(service)


@pytest.mark.slow
def test_streams_that_outlast_the_drain_end_in_an_error(tmp_path: Path) -> None:
    with serve_command(tmp_path, PACED[0], "lifecycle.drain_timeout_s=1") as service:
        streams = Streams(service, NEVER_TOKENS)
        service.signal(signal.SIGHUP)
        assert_errors(streams)
        assert service.status() == 0
        assert_all_gone(service)


def test_streams_that_serve_would_cut_end_in_an_error_and_a_dying_ray_is_not_waited_for(
    tmp_path: Path,
) -> None:
    """Serve deletes the application; then each process gets SIGTERM, as by default from systemd."""
    with serve_command(tmp_path, PACED[0], "lifecycle.drain_timeout_s=4") as service:
        streams = Streams(service, NEVER_TOKENS)
        subprocess.run(
            [sys.executable, "-c", DELETE, gcs_address(service.pid), APP],
            timeout=120.0,
            check=True,
        )
        assert_errors(streams)
        began_s = time.monotonic()
        service.signal_all(signal.SIGTERM)
        assert service.status() == 0
        assert time.monotonic() - began_s < 45.0  # Ray's client waits a minute for its GCS
        assert_all_gone(service)


@pytest.mark.slow
def test_a_service_whose_ray_died_says_so_and_ends(tmp_path: Path) -> None:
    with serve_command(tmp_path) as service:
        service.signal(signal.SIGKILL, name="gcs_server")
        assert service.status() == 1
        assert "Ray's gcs_server ended" in service.said
        assert_all_gone(service)


@pytest.mark.slow
def test_nothing_is_left_of_a_service_whose_command_was_killed(tmp_path: Path) -> None:
    with serve_command(tmp_path) as service:
        service.signal(signal.SIGKILL)
        assert service.status() == -signal.SIGKILL
        assert_all_gone(service)
