"""Through both doors an answer that was drafted is the one that full depth gives."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quadriga.client import Client
from tests.e2e.observe import series, total
from tests.e2e.roles import DECODE
from tests.e2e.test_replica_death import replicas
from tests.random_drafter import draft_as_it_pays, draft_at_random
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(
    "QUADRIGA_E2E_HTTP" in os.environ, reason="reaches into replicas of the service it started"
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Sort: 42 7 19 3 88\n", "max_tokens": 40, "temperature": 0},
    "sampled": {"prompt": "Count from 3 to 40.\n", "max_tokens": 90, "temperature": 1.1, "seed": 4},
    "penalties": {
        "prompt": "Repeat old brown milk.\n",
        "max_tokens": 60,
        "temperature": 0.8,
        "seed": 5,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    },
    "stop strings": {
        "prompt": "Count from 3 to 40.\n",
        "max_tokens": 200,
        "temperature": 0,
        "stop": ["17 1", " 30"],
    },
    "log-probabilities": {
        "prompt": "Add 7 2 and 1 1.\n",
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": 2,
    },
    "a form": {
        "prompt": "Ann is 31.\n",
        "max_tokens": 120,
        "temperature": 0.9,
        "seed": 8,
        "structured_outputs": {"json": PERSON},
    },
    "choices": {
        "prompt": "Copy: cake ship rice\n",
        "max_tokens": 30,
        "temperature": 1.0,
        "seed": 9,
        "n": 3,
    },
}


@pytest.fixture
def drafting(http: httpx.Client) -> Iterator[None]:
    """Live replicas draft at random, whether it pays or not."""
    names = replicas(DECODE)
    for seed, name in enumerate(names):
        draft_at_random(name, seed)
    yield
    for name in set(names) & set(replicas(DECODE)):
        draft_as_it_pays(name)


def ask(http: httpx.Client, body: dict[str, Any], policy: str | None) -> list[dict[str, Any]]:
    """The choices of an answer."""
    said = body if policy is None else body | {"exit_policy": policy}
    reply = http.post("/v1/completions", json=said)
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    for choice in choices:
        if choice.get("logprobs"):
            values = choice["logprobs"]["token_logprobs"]
            choice["logprobs"] = choice["logprobs"] | {
                "token_logprobs": [round(v, 3) for v in values],
                "top_logprobs": [list(top) for top in choice["logprobs"]["top_logprobs"]],
            }
    return choices


@pytest.mark.parametrize("kind", ASKED)
def test_by_default_an_answer_is_full_depths(http: httpx.Client, drafting: None, kind: str) -> None:
    wanted = ask(http, ASKED[kind], "off")
    assert ask(http, ASKED[kind], None) == ask(http, ASKED[kind], "lossless") == wanted


def test_over_grpc_as_well(sdk: Client, drafting: None) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "seed": 2, "logprobs": 1}
    wanted, drafted = (
        sdk.generate("Count from 3 to 40.\n", exit_policy=policy, **fields)
        for policy in ("off", "lossless")
    )
    assert drafted.choices[0].token_ids == wanted.choices[0].token_ids
    assert dict(drafted.usage.exits) == {8: drafted.usage.completion_tokens}


async def test_beside_answers_that_may_be_others(
    ahttp: httpx.AsyncClient, http: httpx.Client, drafting: None
) -> None:
    """One batch with requests that draft, that leave early, and that do neither."""
    before = total(series(http), "quadriga_accepted_drafts_total")
    plain = {k: b for k, b in ASKED.items() if "logprobs" not in b}
    policies = ("lossless", "bounded", "off")
    alone = {(k, p): ask(http, body, p) for k, body in plain.items() for p in policies}

    async def one(kind: str, policy: str) -> None:
        body = plain[kind] | {"exit_policy": policy}
        reply = await ahttp.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"] == alone[kind, policy], (kind, policy)

    for _ in range(2):
        await asyncio.gather(*(one(kind, policy) for kind, policy in alone))
    for kind in plain:
        assert alone[kind, "lossless"] == alone[kind, "off"]
    wait_until(lambda: total(series(http), "quadriga_accepted_drafts_total") > before, 20.0)


def test_the_running_usage_counts_what_was_passed_on(http: httpx.Client, drafting: None) -> None:
    """Tokens that came together and are passed on one by one are not counted before that."""
    body = ASKED["sampled"] | {
        "stream": True,
        "sla_tbt_ms": 40.0,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    counted = 0
    with http.stream("POST", "/v1/completions", json=body) as reply:
        for line in filter(None, reply.iter_lines()):
            said = line.removeprefix("data: ")
            if said == "[DONE]":
                break
            chunk = json.loads(said)
            counted += sum(len(choice["token_ids"]) for choice in chunk["choices"])
            assert chunk["usage"]["completion_tokens"] == counted
    assert counted > 20
