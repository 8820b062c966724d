"""A client that goes away frees everything it held, everywhere, long before it was done.

Any process may stand still for a few seconds, so what proves a test is counted and not timed: the
sequences that were cancelled, exactly, and the tokens that were computed, far fewer than asked for.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from quadriga.client import AsyncClient, Client
from tests.e2e.conftest import Service
from tests.e2e.observe import (
    GIVE_UP_S,
    HELD,
    series,
    total,
    wait_until_free,
    wait_until_told,
)
from tests.waiting import wait_until

PROMPT = "count from 1 to 9:"
NUM_CHOICES, MAX_TOKENS = 16, 1900
# So many that none has ended by the time the client is gone and all processes know.
MANY: Any = {"n": NUM_CHOICES, "max_tokens": MAX_TOKENS, "ignore_eos": True}
LONG = MANY | {"prompt": PROMPT}
MOST = 0.75  # of all tokens asked for may be computed before the client's end is known
FREED_WITHIN_S = 30.0
ORPHAN_S = 5.0  # `ingress.orphan_request_s`: what only vanished is kept for so long
MAX_ATTEMPTS = 4  # the SDK waits 2 s for an ingress that stands still


@pytest.fixture(autouse=True)
def nothing_held(http: httpx.Client) -> None:
    wait_until_told(http)
    wait_until_free(http, within_s=FREED_WITHIN_S)


def cancelled(http: httpx.Client) -> float:
    return total(series(http), "quadriga_requests_cancelled_total")


def computed(http: httpx.Client) -> float:
    return total(series(http), "quadriga_emitted_tokens_total")


def counts(http: httpx.Client) -> tuple[float, float]:
    """Sequences cancelled and tokens computed so far."""
    return cancelled(http), computed(http)


def wait_until_left(
    http: httpx.Client, before: tuple[float, float], num_sequences: int, *, after_s: float = 0.0
) -> None:
    """Return once so many more than `before` are cancelled and nothing of them is held.

    The count comes first: gauges that have not been pushed yet would pass for freed ones.

    Args:
        after_s: They are kept for so long.
    """
    num_cancelled, num_computed = before
    give_up_s = time.monotonic() + after_s + FREED_WITHIN_S

    def count() -> float:
        return cancelled(http) - num_cancelled

    wait_until(lambda: count() >= num_sequences, after_s + FREED_WITHIN_S, count)
    assert count() == num_sequences
    wait_until_free(http, within_s=max(0.0, give_up_s - time.monotonic()))
    most = MOST * num_sequences * MAX_TOKENS
    assert computed(http) - num_computed < most, "they ended by themselves"


def test_in_mid_stream(http: httpx.Client) -> None:
    before = counts(http)
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
        lines = reply.iter_lines()
        for _ in range(20):
            next(lines)
    wait_until_left(http, before, NUM_CHOICES)


async def test_before_the_whole_answer(http: httpx.Client, ahttp: httpx.AsyncClient) -> None:
    before = counts(http)
    whole = asyncio.create_task(ahttp.post("/v1/completions", json=LONG))
    await asyncio.to_thread(wait_until, lambda: total(series(http), *HELD) > 0, GIVE_UP_S)
    whole.cancel()
    with pytest.raises(asyncio.CancelledError):
        await whole
    await asyncio.to_thread(wait_until_left, http, before, NUM_CHOICES)


async def test_in_the_prefill_queue(service: Service, http: httpx.Client) -> None:
    """Many long prompts at once: most are still queued or in transfer when the client goes."""
    num_requests, each = 24, {"n": 4, "max_tokens": 540}
    body = {"prompt": [40] * 1500, "ignore_eos": True, "stream": True} | each
    num_cancelled, num_computed = counts(http)
    async with httpx.AsyncClient(base_url=service.base_url, timeout=60) as client:
        tasks = [
            asyncio.create_task(client.post("/v1/completions", json=body))
            for _ in range(num_requests)
        ]
        await asyncio.to_thread(wait_until, lambda: total(series(http), *HELD) > 0, GIVE_UP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(wait_until_told, http)
    # A chunk of a long prompt that is being computed is not interrupted.
    await asyncio.to_thread(wait_until_free, http, within_s=FREED_WITHIN_S)
    assert cancelled(http) > num_cancelled
    most = MOST * num_requests * each["n"] * each["max_tokens"]
    assert computed(http) - num_computed < most, "they ended by themselves"


def test_the_sdk_leaves_a_stream(sdk: Client, http: httpx.Client) -> None:
    for _ in range(MAX_ATTEMPTS):
        before = counts(http)
        pieces = sdk.stream(PROMPT, **MANY)
        for _ in range(5):
            next(pieces)
        left_s = time.monotonic()
        pieces.close()
        wait_until_left(http, before, NUM_CHOICES)
        if time.monotonic() - left_s < ORPHAN_S:
            return
    pytest.fail("the service did not notice, and waited for a resumption")


async def test_the_async_sdk_is_cancelled(async_sdk: AsyncClient, http: httpx.Client) -> None:
    for _ in range(MAX_ATTEMPTS):
        before = counts(http)
        whole = asyncio.create_task(async_sdk.generate(PROMPT, **MANY))
        await asyncio.to_thread(wait_until, lambda: total(series(http), *HELD) > 0, GIVE_UP_S)
        left_s = time.monotonic()
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
        await asyncio.to_thread(wait_until_left, http, before, NUM_CHOICES)
        if time.monotonic() - left_s < ORPHAN_S:
            return
    pytest.fail("the service did not notice, and waited for a resumption")


def test_a_resumable_request_ends_when_nobody_comes_back(http: httpx.Client) -> None:
    def stream(name: str) -> AbstractContextManager[httpx.Response]:
        headers = {"idempotency-key": f"{name}-{time.time_ns()}"}
        return http.stream("POST", "/v1/completions", json=LONG | {"stream": True}, headers=headers)

    before = counts(http)
    with stream("left") as left, stream("right") as right:  # one would be done too soon
        for reply in (left, right):
            next(reply.iter_lines())
        left_s = time.monotonic()
    wait_until_left(http, before, 2 * NUM_CHOICES, after_s=ORPHAN_S)
    assert time.monotonic() - left_s > ORPHAN_S, "it was kept for a resumption"
