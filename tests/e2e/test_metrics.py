"""One view of the whole cluster, whichever ingress answers."""

from __future__ import annotations

import threading

import httpx

from tests.e2e.conftest import Service
from tests.e2e.observe import series, total, wait_until_told
from tests.e2e.roles import DECODE


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


def test_counts_are_exact(http: httpx.Client) -> None:
    wait_until_told(http)
    before = series(http)
    body = {"prompt": [40] * 7, "max_tokens": 11, "ignore_eos": True}
    for _ in range(3):
        assert http.post("/v1/completions", json=body).status_code == 200
    wait_until_told(http)
    after = series(http)

    def grown(name: str) -> float:
        return total(after, name) - total(before, name)

    assert grown("vllm:generation_tokens_total") == 33
    assert grown("vllm:prompt_tokens_total") == 21
    assert grown("vllm:time_to_first_token_seconds_count") == 3
    assert grown("vllm:inter_token_latency_seconds_count") == 30
    assert grown("vllm:request_success_total") == 3
