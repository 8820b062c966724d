"""What the service holds, as its own metrics say."""

from __future__ import annotations

import time

import httpx

from quadriga.observability.metrics import parse_exposition

HELD = (
    "quadriga_running_sequences",
    "quadriga_waiting_sequences",
    "quadriga_kv_reserved_tokens",
    "quadriga_kv_used_tokens",
    "quadriga_ingress_open_requests",
)


def series(http: httpx.Client) -> dict[str, float]:
    """All series of one scrape."""
    reply = http.get("/metrics")
    reply.raise_for_status()
    return parse_exposition(reply.text)


def total(values: dict[str, float], *names: str) -> float:
    """Sum of every series of these metrics, over all replicas."""
    return sum(value for key, value in values.items() if key.split("{")[0] in names)


def wait_until_free(http: httpx.Client, *, within_s: float = 10.0) -> None:
    """Return once nothing is held anywhere. Raises: AssertionError after `within_s`."""
    give_up_s = time.monotonic() + within_s
    while True:
        values = series(http)
        if total(values, *HELD) == 0:
            return
        if time.monotonic() > give_up_s:
            left = {k: v for k, v in values.items() if v and k.split("{")[0] in HELD}
            raise AssertionError(f"still held after {within_s} s: {left}")
        time.sleep(0.1)
