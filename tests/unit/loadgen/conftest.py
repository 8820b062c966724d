"""The fake service: single captures of it, judged like a real one's, and whole runs against it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.checker import Verdict
from loadgen.checker.judge import Judgement
from loadgen.load.workload import RequestSpec
from loadgen.target import Target
from loadgen.wire.capture import Capture
from loadgen.wire.client_http import HttpClient
from tests.fake_service.grpc_server import FakeGrpcOptions, FakeGrpcServer
from tests.fake_service.server import MODEL, FakeOptions, FakeServer


class Exchange:
    """Sends one request to a fake service and judges what comes back."""

    target = Target(MODEL, 4096)

    def capture(self, spec: RequestSpec, timeout_s: float = 20.0, **options: Any) -> Capture:
        async def exchange() -> Capture:
            async with FakeServer(FakeOptions(**options)) as server:
                client = HttpClient(server.url, timeout_s=timeout_s)
                return await client.prepare(spec, MODEL, "request-1")()

        return asyncio.run(exchange())

    def judge(self, capture: Capture, spec: RequestSpec) -> Verdict:
        return Judgement(self.target)(capture, spec, "request-1")

    def __call__(self, spec: RequestSpec, timeout_s: float = 20.0, **options: Any) -> Verdict:
        return self.judge(self.capture(spec, timeout_s, **options), spec)


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


def make_spec(**changes: Any) -> RequestSpec:
    """A streamed request of 40 tokens with known prompt length."""
    fields: dict[str, Any] = {
        "index": 0,
        "arrival_s": 0.0,
        "prompt": [300, 301, 302],
        "prompt_tokens": 3,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    fields.update(changes)
    if isinstance(fields["prompt"], str):
        fields["prompt_tokens"] = None
    return RequestSpec(**fields)


Service = Callable[..., tuple[str, str]]


@contextmanager
def fakes(**options: Any) -> Iterator[tuple[str, str]]:
    """Run fakes of both transports in a thread; yields (url, grpc address)."""
    started = threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        stop = asyncio.Event()
        grpc_options = {k: v for k, v in options.items() if k == "answer"}
        async with (
            FakeServer(FakeOptions(**options)) as http,
            FakeGrpcServer(FakeGrpcOptions(**grpc_options)) as grpc,
        ):
            found.extend((http.url, grpc.address, asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(20)
    url, address, loop, stop = found
    try:
        yield url, address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive()


def run_command(
    command: str, service: tuple[str, str], tmp_path: Path, *words: str
) -> tuple[int, list[dict[str, Any]]]:
    """`loadgen run` or `ramp` against a service. Returns its exit status and results."""
    url, grpc = service
    common = ["--url", url, "--grpc", grpc, "--output", str(tmp_path / "out"), "--no-plots"]
    status = main([command, *common, *words])
    file = tmp_path / "out" / "run.jsonl"
    text = file.read_text() if file.exists() else ""
    return status, [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def service() -> Iterator[Service]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(fakes(**options))
