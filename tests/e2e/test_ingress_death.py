"""An ingress dies under its streams: the SDK takes them up at another one."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest
import ray

from quadriga.client import AsyncClient
from quadriga.client.wire import StreamProgress
from tests.e2e.conftest import Service
from tests.e2e.observe import wait_until_free

NUM_STREAMS = 8
MAX_TOKENS = 250


def an_ingress() -> int:
    """Process of one of the ingress replicas."""
    actors = ray._private.state.actors().values()
    pids = [
        int(a["Pid"])
        for a in actors
        if a["State"] == "ALIVE" and a["Name"].startswith("SERVE_REPLICA::")
    ]
    assert len(pids) == 2
    return min(pids)


@pytest.mark.skipif(
    "QUADRIGA_E2E_HTTP" in os.environ, reason="kills a process, so it needs the service it started"
)
async def test_the_sdk_goes_on_elsewhere(
    service: Service,
    async_sdk: AsyncClient,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resumed = 0
    next_request = StreamProgress.next_request

    def counted(progress: StreamProgress) -> Any:
        nonlocal resumed
        request = next_request(progress)
        resumed += bool(request.resume_from)
        return request

    monkeypatch.setattr(StreamProgress, "next_request", counted)
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
    prompts = [f"Sort: {i} 4 2 9\n" for i in range(NUM_STREAMS)]
    whole = [await async_sdk.generate(prompt, **options) for prompt in prompts]
    struck = asyncio.Event()

    async def read(prompt: str) -> tuple[list[int], str]:
        tokens: list[int] = []
        text = ""
        async for piece in async_sdk.stream(prompt, **options):
            assert piece.first_index == len(tokens)
            tokens += piece.token_ids
            text += piece.text
            if len(tokens) > 10 and not struck.is_set():
                struck.set()
                os.kill(an_ingress(), signal.SIGKILL)
        return tokens, text

    got = await asyncio.gather(*(read(prompt) for prompt in prompts))
    for (tokens, text), wanted in zip(got, whole, strict=True):
        (choice,) = wanted.choices
        assert tokens == list(choice.token_ids)
        assert text == choice.text
    assert resumed > 0
    wait_until_free(http, within_s=40.0)
