"""Prompts that begin alike: the service gives the same answers, and says what was shared."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import httpx

from quadriga.client import Client
from tests.e2e.conftest import Service
from tests.e2e.observe import series, total
from tests.e2e.roles import PREFILL
from tests.waiting import wait_until

SETTLE_S = 60.0
QUIET_S = 3.0
PROMPT = [20 + (7 * i) % 300 for i in range(250)]
BODY = {"model": "quadriga-s", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/completions", json=BODY | {"return_token_ids": True} | fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def cached(body: dict[str, Any]) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prompt_is_computed_once_for_each_salt(http: httpx.Client) -> None:
    first = complete(http, cache_salt="one")
    again = complete(http, cache_salt="one")
    other = complete(http, cache_salt="two")
    longer = complete(http, cache_salt="one", prompt=PROMPT[:200] + [40] * 30)
    assert [cached(body) for body in (first, again, other, longer)] == [0, 192, 0, 192]
    tokens = [body["choices"][0]["token_ids"] for body in (first, again, other)]
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_router_finds_what_replicas_keep(http: httpx.Client, own: Service) -> None:
    """By the hashes that it makes itself, as docs/observability.md says."""
    with httpx.Client(base_url=own.admin_url, timeout=60) as admin:
        replicas = admin.get("/cluster").json()["replicas"]
        names = [r["name"] for r in replicas if r["role"] == PREFILL]

        def ask() -> list[dict[str, Any]]:
            asked = [{"replica": name} for name in names]
            return [admin.get("/cluster/kv_events", params=one).json() for one in asked]

        answer = ask()[0]
        root = f"{answer['fingerprint']}\0{answer['num_layers']}\0\0key:anonymous:found"
        digests, size = [blake2b(root.encode(), digest_size=32).digest()], answer["block_size"]
        for i in (0, size, 2 * size):
            ids = array("q", PROMPT[i : i + size]).tobytes()
            digests.append(blake2b(digests[-1] + ids, digest_size=32).digest())
        wanted = [digest.hex() for digest in digests[1:]]
        assert cached(complete(http, cache_salt="found")) == 0
        kept = [event.get("block_hashes", []) for one in ask() for event in one["events"]]
        assert any(hashes[:3] == wanted for hashes in kept)
        assert cached(complete(http, cache_salt="found")) == 192


def test_choices_share_their_prompt(http: httpx.Client) -> None:
    one = complete(http, cache_salt="alone", temperature=1, seed=3)
    many = complete(http, cache_salt="together", temperature=1, seed=3, n=4)
    assert cached(one) == cached(many) == 0, "the prompt was computed"
    found = [choice["token_ids"] for choice in many["choices"]]
    assert found[0] == one["choices"][0]["token_ids"]
    assert len({tuple(ids) for ids in found}) > 1


def test_the_prompt_of_several_choices_is_computed_once(http: httpx.Client) -> None:
    """The first choice computes it; each of the others finds its whole blocks."""

    def hits() -> float:
        return total(series(http), "vllm:prefix_cache_hits_total")

    before, num_choices = settled(hits), 5
    many = complete(http, cache_salt="n at once", temperature=1, seed=3, n=num_choices)
    assert len(many["choices"]) == num_choices
    wanted = before + (num_choices - 1) * 192
    wait_until(lambda: hits() >= wanted, SETTLE_S, hits)
    assert settled(hits) == wanted, "no more either: nothing else asks here"


def settled(count: Callable[[], float]) -> float:
    """A counter of the service, once it stands still: replicas report every second."""
    seen, since_s = count(), time.monotonic()
    while time.monotonic() - since_s < QUIET_S:
        time.sleep(0.2)
        if (now := count()) != seen:
            seen, since_s = now, time.monotonic()
    return seen


def test_conversations_and_responses_report_it(http: httpx.Client) -> None:
    words = " ".join(str(i) for i in range(100))
    said = [{"role": "user", "content": f"Reverse: {words}"}]
    chat = {"model": "quadriga-s", "messages": said, "max_tokens": 4, "cache_salt": "chat"}
    replies = [http.post("/v1/chat/completions", json=chat).json() for _ in range(2)]
    assert cached(replies[0]) == 0 < cached(replies[1])
    body = {"model": "quadriga-s", "input": said, "max_output_tokens": 4, "cache_salt": "chat"}
    usage = http.post("/v1/responses", json=body).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == cached(replies[1])


def test_keys_share_nothing_unless_they_say_so(http: httpx.Client, sdk: Client) -> None:
    """Over HTTP this service asks for no key; over gRPC it does."""
    complete(http, cache_salt="both")
    results = [sdk.generate(PROMPT, max_tokens=4, cache_salt="both").usage for _ in range(2)]
    assert [usage.cached_tokens for usage in results if usage] == [0, 192]


def test_metrics_count_tokens_that_were_asked_for_and_found(http: httpx.Client) -> None:
    for _ in range(2):
        complete(http, cache_salt="counted")
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    wait_until(lambda: total(series(http), names[1]) >= 192, SETTLE_S)
    values = series(http)
    queries, hits = (total(values, name) for name in names)
    assert queries >= 500 and 192 <= hits <= queries
    assert total(values, "quadriga_prefix_cache_tokens") >= 192
