"""One view of the whole cluster, whichever ingress answers."""

from __future__ import annotations

import threading
import time

import httpx

from tests.e2e.conftest import Service
from tests.e2e.observe import series, total
from tests.e2e.roles import DECODE

SETTLE_S = 4.0  # every process pushes at least once in it


def is_cumulative(key: str) -> bool:
    name = key.split("{")[0]
    return name.endswith(("_total", "_bucket", "_count", "_sum"))


def test_no_counter_falls_over_fifty_scrapes(service: Service, http: httpx.Client) -> None:
    stop = threading.Event()

    def load() -> None:
        with httpx.Client(base_url=service.base_url, timeout=60) as client:
            while not stop.is_set():
                client.post("/v1/completions", json={"prompt": "copy: 1 2 3", "max_tokens": 8})

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        last: dict[str, float] = {}
        for _ in range(50):
            # A new connection each time, so that either ingress may answer.
            with httpx.Client(base_url=service.base_url, timeout=60) as client:
                now = series(client)
            for key, value in last.items():
                if is_cumulative(key):
                    assert now.get(key, 0.0) >= value, f"{key} fell"
            last = now
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    sources = {key.split('replica="')[1].split('"')[0] for key in last}
    assert sum("ingress" in source for source in sources) >= 2
    assert sum(f":{DECODE}:" in source for source in sources) >= 2  # the dead keep theirs


def settled(http: httpx.Client) -> dict[str, float]:
    """A scrape after every process that lives has pushed since the last request ended."""

    def pushes(values: dict[str, float]) -> dict[str, float]:
        return {k: v for k, v in values.items() if k.startswith("quadriga_metrics_pushes_total")}

    # What dead processes counted stays on the page, and is pushed no more.
    first, until_s = pushes(series(http)), time.monotonic() + SETTLE_S
    while True:
        values = series(http)
        grown = {k for k, v in pushes(values).items() if v > first.get(k, 0.0)}
        if time.monotonic() > until_s:
            assert sum("ingress" in key for key in grown) >= 2, "both ingresses push"
            return values


def test_counts_are_exact(http: httpx.Client) -> None:
    before = settled(http)
    body = {"prompt": [40] * 7, "max_tokens": 11, "ignore_eos": True}
    for _ in range(3):
        assert http.post("/v1/completions", json=body).status_code == 200
    after = settled(http)

    def grown(name: str) -> float:
        return total(after, name) - total(before, name)

    assert grown("vllm:generation_tokens_total") == 33
    assert grown("vllm:prompt_tokens_total") == 21
    assert grown("vllm:time_to_first_token_seconds_count") == 3
    assert grown("vllm:inter_token_latency_seconds_count") == 30
    assert grown("vllm:request_success_total") == 3
