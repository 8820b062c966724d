"""What the service holds, as its own metrics say."""

from __future__ import annotations

import time

import httpx

from quadriga.observability.metrics import parse_exposition

GIVE_UP_S = 30.0
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


def wait_until_told(http: httpx.Client) -> None:
    """Return once every ingress has pushed its counters; they push every second."""

    def pushes() -> dict[str, float]:
        values = series(http)
        alive = [key for key in values if key.startswith("quadriga_ingress_open_requests{")]
        labels = [key.removeprefix("quadriga_ingress_open_requests") for key in alive]
        return {label: values[f"quadriga_metrics_pushes_total{label}"] for label in labels}

    give_up_s = time.monotonic() + GIVE_UP_S
    first = last = pushes()
    # Twice, as the next one may have been on its way already.
    while any(value < first.get(key, 0.0) + 2 for key, value in last.items()):
        assert time.monotonic() < give_up_s, f"not pushed: {first}, {last}"
        time.sleep(0.1)
        last = pushes()
