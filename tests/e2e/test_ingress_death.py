"""An ingress dies under its streams: another one takes them over, and clients resume there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.bench.cluster.process_cpu import service_processes
from quadriga.client import AsyncClient
from quadriga.client.wire import StreamProgress
from quadriga.core.request import AUTO_MODEL
from quadriga.observability.metrics import parse_exposition
from tests.e2e.conftest import MODEL, Service
from tests.e2e.observe import wait_until_free
from tests.e2e.roles import IS_MIXED
from tests.e2e.serve_command import serve_command
from tests.ray.choosing import spans, write_history
from tests.ray.test_helios_orders import KNOWN, S4
from tests.waiting import wait_until

NUM_STREAMS = 8
MAX_TOKENS = 400
MAX_DEATHS = 12
RESTART_S = 30.0
CHOSEN_S = 60.0
CHOOSING = (
    "deterministic=true",
    "ingress.replicas=2",
    "helios.enabled=true",
    "helios.scout=false",
    "helios.max_changed_share=1",
    "helios.reassess_requests=100000",
    "helios.breach_window_tokens=100000",
)
"""What is known at the start is chosen at once, and for good."""


def ingresses(pid: int) -> list[int]:
    """Processes of the ingress replicas below a process, the oldest first."""
    return sorted(service_processes(pid).get("ingress", ()))


async def read_http(
    client: httpx.AsyncClient, body: dict[str, Any], key: str, heard: Callable[[], None]
) -> tuple[list[int], str, int]:
    """Read as a client of any kind can: the same key, and how many tokens are there.

    Where log-probabilities are asked for, there is one of each token.

    Returns:
        Token ids, text, and how often the stream was cut after its first token.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    text = ""
    cuts = 0
    headers = {"idempotency-key": key}
    while True:
        with contextlib.suppress(httpx.TransportError):
            async with client.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as reply:
                if reply.status_code == 404:  # an orderly no: then from the beginning
                    tokens, text, logprobs = [], "", []
                    headers.pop("x-resume-index")
                    continue
                # 500: what Serve says of a replica that died before its first word.
                assert reply.status_code in (200, 500, 503), await reply.aread()
                async for line in reply.aiter_lines():
                    if line == "data: [DONE]":
                        assert len(logprobs) == (len(tokens) if "logprobs" in body else 0)
                        assert all(p <= 0.0 for p in logprobs)
                        return tokens, text, cuts
                    if line.startswith("data: ") and "error" not in line:
                        (choice,) = json.loads(line[6:])["choices"]
                        tokens += choice["token_ids"]
                        text += choice["text"]
                        logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                        heard()
        cuts += bool(tokens)
        headers["x-resume-index"] = str(len(tokens))
        await asyncio.sleep(0.1)


async def go_on_elsewhere(
    pid: int,
    model: str,
    async_sdk: AsyncClient,
    ahttp: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ingresses below a process die under streams of a model, which no client notices."""
    resumed = 0
    next_request = StreamProgress.next_request

    def counted(progress: StreamProgress) -> Any:
        nonlocal resumed
        request = next_request(progress)
        resumed += bool(request.resume_from)
        return request

    monkeypatch.setattr(StreamProgress, "next_request", counted)
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
    options["model"] = model
    prompts = [f"Sort: {i} 4 2 9\n" for i in range(NUM_STREAMS)]
    whole = await asyncio.gather(*(async_sdk.generate(p, **options) for p in prompts))
    body = options | {"stream": True, "return_token_ids": True}

    async def one_death(death: int) -> int:
        """An ingress dies under all streams; returns how many of HTTP were cut."""
        speaking: set[tuple[str, str]] = set()
        struck = asyncio.Event()

        def heard(door: str, prompt: str) -> None:
            """A stream has its first tokens; once all do, one ingress dies."""
            speaking.add((door, prompt))
            if len(speaking) == 2 * NUM_STREAMS and not struck.is_set():
                struck.set()
                os.kill(ingresses(pid)[0], signal.SIGKILL)

        async def read(prompt: str) -> tuple[list[int], str, int]:
            tokens: list[int] = []
            text = ""
            async for piece in async_sdk.stream(prompt, **options):
                assert piece.first_index == len(tokens)
                tokens += piece.token_ids
                text += piece.text
                heard("grpc", prompt)
            return tokens, text, 0

        got = await asyncio.gather(
            *(read(prompt) for prompt in prompts),
            *(
                read_http(
                    ahttp,
                    body | {"prompt": p} | ({"logprobs": 2} if i % 2 else {}),
                    f"death-{death}-{p.strip()}",
                    partial(heard, "http", p),
                )
                for i, p in enumerate(prompts)
            ),
        )
        resumed_logprobs[0] += sum(cuts for _, _, cuts in got[len(prompts) + 1 :: 2])
        for (tokens, text, _), wanted in zip(got, [*whole, *whole], strict=True):
            (choice,) = wanted.choices
            assert tokens == list(choice.token_ids)
            assert text == choice.text
        return sum(cuts for _, _, cuts in got)

    resumed_http, resumed_logprobs = 0, [0]
    for death in range(MAX_DEATHS):  # Serve may have put all streams of a door at the survivor
        await asyncio.to_thread(wait_until, lambda: len(ingresses(pid)) == 2, RESTART_S)
        resumed_http += await one_death(death)
        if resumed and resumed_http and resumed_logprobs[0]:
            break
    assert resumed, "no gRPC stream was cut"
    assert resumed_http, "no HTTP stream was cut"
    assert resumed_logprobs[0], "no stream with log-probabilities was cut"
    page = parse_exposition((await ahttp.get("/metrics")).text)
    adopted = (v for k, v in page.items() if "quadriga_recoveries_total" in k and "adopted" in k)
    assert sum(adopted) > 0, "all were computed again"


@pytest.mark.skipif(
    "QUADRIGA_E2E_HTTP" in os.environ, reason="kills a process, so it needs the service it started"
)
async def test_clients_go_on_elsewhere(
    service: Service,
    async_sdk: AsyncClient,
    http: httpx.Client,
    ahttp: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await go_on_elsewhere(os.getpid(), MODEL, async_sdk, ahttp, monkeypatch)
    wait_until_free(http, within_s=40.0)


@pytest.mark.skipif(IS_MIXED, reason="HELIOS chooses what prefill and decode replicas hold")
async def test_clients_go_on_elsewhere_with_the_model_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HELIOS serves four of the layers, which say other tokens than all of them."""
    write_history(history := tmp_path / "history.json", *KNOWN)
    with serve_command(tmp_path, *CHOOSING, f"helios.history_path={history}") as command:
        async with (
            AsyncClient(command.grpc_target, api_key=command.key, timeout_s=60) as sdk,
            httpx.AsyncClient(base_url=command.url, timeout=60) as ahttp,
        ):
            body = {"model": AUTO_MODEL, "prompt": "Sort: 4 2 9\n", "max_tokens": 9}
            until_s = time.monotonic() + CHOSEN_S
            while True:
                answer = (await ahttp.post("/v1/completions", json=body)).json()
                if spans(answer) == [(S4.model, S4.depth, answer["usage"]["completion_tokens"])]:
                    break
                assert time.monotonic() < until_s, answer
                await asyncio.sleep(0.2)
            await go_on_elsewhere(command.pid, AUTO_MODEL, sdk, ahttp, monkeypatch)
        with command.http() as http:
            wait_until_free(http, within_s=40.0)
