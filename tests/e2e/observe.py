"""What the service holds, as its own metrics say."""

from __future__ import annotations

import httpx

from quadriga.observability.metrics import parse_exposition
from tests.reliability.cluster.baseline import HELD
from tests.waiting import wait_until

GIVE_UP_S = 30.0


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

    def held() -> dict[str, float]:
        return {k: v for k, v in series(http).items() if v and k.split("{")[0] in HELD}

    wait_until(lambda: not held(), within_s, held)


def wait_until_told(http: httpx.Client) -> None:
    """Return once every ingress has pushed its counters; they push every second."""

    def pushes() -> dict[str, float]:
        values = series(http)
        alive = [key for key in values if key.startswith("quadriga_ingress_open_requests{")]
        labels = [key.removeprefix("quadriga_ingress_open_requests") for key in alive]
        return {label: values[f"quadriga_metrics_pushes_total{label}"] for label in labels}

    first = pushes()

    def has_each_pushed() -> bool:  # twice, as the next one may have been on its way already
        return all(value >= first.get(key, 0.0) + 2 for key, value in pushes().items())

    wait_until(has_each_pushed, GIVE_UP_S, pushes)
