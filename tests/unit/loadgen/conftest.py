"""Captures of the fake service, judged like a real one's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadgen.capture import Capture
from loadgen.checker import Verdict
from loadgen.client_http import HttpClient, parse_url
from loadgen.fakes.server import MODEL, FakeOptions, FakeServer
from loadgen.judge import Judgement
from loadgen.runner import now_s
from loadgen.target import Target
from loadgen.workload import RequestSpec


class Exchange:
    """Sends one request to a fake service and judges what comes back."""

    target = Target(MODEL, 4096)

    def capture(self, spec: RequestSpec, timeout_s: float = 20.0, **options: Any) -> Capture:
        async def exchange() -> Capture:
            async with FakeServer(FakeOptions(**options)) as server:
                client = HttpClient(parse_url(server.url), now_s=now_s, timeout_s=timeout_s)
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
