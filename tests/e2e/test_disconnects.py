"""A client that goes away frees everything it held, everywhere, within a second."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from quadriga.client import AsyncClient, Client
from tests.e2e.conftest import Service
from tests.e2e.observe import HELD, series, total, wait_until_free

LONG = {"prompt": "count from 1 to 9:", "max_tokens": 1900, "ignore_eos": True}
# Gauges reach the hub once a second; the rest is the freeing itself and the scrape.
TOLD_WITHIN_S = 2.0
FREED_WITHIN_S = 3.0


@pytest.fixture(autouse=True)
def nothing_held(http: httpx.Client) -> None:
    wait_until_free(http)
    wait_until_told(http)


def wait_until_held(http: httpx.Client) -> None:
    give_up_s = time.monotonic() + 20
    while total(series(http), *HELD) == 0:
        assert time.monotonic() < give_up_s


def cancelled(http: httpx.Client) -> float:
    return total(series(http), "quadriga_requests_cancelled_total")


def wait_until_told(http: httpx.Client) -> None:
    """Return once what was cancelled before has been counted: counters are pushed every second."""
    give_up_s = time.monotonic() + 20
    count, since_s = cancelled(http), time.monotonic()
    while time.monotonic() < since_s + TOLD_WITHIN_S:
        assert time.monotonic() < give_up_s, "cancellations go on and on"
        time.sleep(0.1)
        if (now := cancelled(http)) != count:
            count, since_s = now, time.monotonic()


def wait_until_left(http: httpx.Client, num_cancelled: float) -> None:
    """Return once so many were counted as cancelled and nothing of them is held.

    The count comes first: gauges that have not been pushed yet would pass for freed ones.
    """
    give_up_s = time.monotonic() + FREED_WITHIN_S
    while (count := cancelled(http)) < num_cancelled:
        assert time.monotonic() < give_up_s, f"{count} of {num_cancelled} were cancelled"
        time.sleep(0.1)
    assert count == num_cancelled
    wait_until_free(http, within_s=max(0.0, give_up_s - time.monotonic()))


def test_in_mid_stream(http: httpx.Client) -> None:
    before = cancelled(http)
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 4}) as reply:
        lines = reply.iter_lines()
        for _ in range(20):
            next(lines)
    wait_until_left(http, before + 4)


def test_before_the_whole_answer(service: Service, http: httpx.Client) -> None:
    before = cancelled(http)
    with (
        httpx.Client(base_url=service.base_url, timeout=0.3) as impatient,
        pytest.raises(httpx.ReadTimeout),
    ):
        impatient.post("/v1/completions", json=LONG)
    wait_until_left(http, before + 1)


async def test_in_the_prefill_queue(service: Service, http: httpx.Client) -> None:
    """Many long prompts at once: most are still queued or in transfer when the client goes."""
    body = {"prompt": [40] * 1500, "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=service.base_url, timeout=60) as client:
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(24)]
        await asyncio.to_thread(wait_until_held, http)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # A chunk of a long prompt that is being computed is not interrupted.
    await asyncio.to_thread(wait_until_free, http, within_s=FREED_WITHIN_S + 2)


def test_the_sdk_leaves_a_stream(sdk: Client, http: httpx.Client) -> None:
    before = cancelled(http)
    pieces = sdk.stream("count from 1 to 9:", max_tokens=1900, ignore_eos=True)
    for _ in range(5):
        next(pieces)
    pieces.close()
    wait_until_left(http, before + 1)


async def test_the_async_sdk_is_cancelled(async_sdk: AsyncClient, http: httpx.Client) -> None:
    before = cancelled(http)
    whole = asyncio.create_task(
        async_sdk.generate("count from 1 to 9:", max_tokens=1900, ignore_eos=True)
    )
    await asyncio.to_thread(wait_until_held, http)
    whole.cancel()
    with pytest.raises(asyncio.CancelledError):
        await whole
    await asyncio.to_thread(wait_until_left, http, before + 1)


def test_a_resumable_request_ends_when_nobody_comes_back(http: httpx.Client) -> None:
    headers = {"idempotency-key": f"left-{time.time_ns()}"}
    body = LONG | {"stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        lines = reply.iter_lines()
        next(lines)
        wait_until_held(http)
    left_s = time.monotonic()
    wait_until_free(http, within_s=15.0)
    assert time.monotonic() - left_s > 3.0, "it was kept for a resumption"  # orphan_request_s is 5
