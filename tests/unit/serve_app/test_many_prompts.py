"""How many prompts and choices one request may have, and all open ones together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.serve_app.conftest import MakeStand, Stand
from tests.waiting import until

FEW = {"ingress.max_prompts": 6, "ingress.max_n": 3, "ingress.max_choices": 10}


@pytest.mark.parametrize("num_prompts", [20, 128, 256])
async def test_batches_of_many_prompts_are_answered(stand: Stand, num_prompts: int) -> None:
    """LangChain sends 20 at once by default."""
    reply = await stand.complete(prompt=[f"Sort: {i}\n" for i in range(num_prompts)], max_tokens=2)
    assert reply.status_code == 200, reply.text
    assert [c["index"] for c in reply.json()["choices"]] == list(range(num_prompts))


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"prompt": ["a"] * 7}, "prompt", "7 prompts, above the limit of 6"),
        ({"n": 4}, "n", "4 is above the limit of 3"),
        ({"prompt": ["a"] * 4, "n": 3}, "prompt", "12 choices, above the limit of 10"),
        ({"prompt": ["a"] * 6, "n": 1}, None, ""),
        ({"prompt": ["a"] * 5, "n": 2}, None, ""),
    ],
)
async def test_each_limit_is_named(
    make_stand: MakeStand, fields: dict[str, Any], param: str | None, limit: str
) -> None:
    stand = await make_stand(config=FEW)
    reply = await stand.complete(**fields, max_tokens=1)
    if param is None:
        assert reply.status_code == 200
        return
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert limit in error["message"]


async def test_n_is_never_above_the_choices_in_all(make_stand: MakeStand) -> None:
    stand = await make_stand(config={"ingress.max_choices": 2})
    assert (await stand.complete(n=3)).json()["error"]["param"] == "n"
    reply = await stand.http.post("/v1/embeddings", json={"input": ["a"] * 3})
    assert reply.json()["error"]["param"] == "input"
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 3}
    reply = await stand.http.post("/v1/chat/completions", json=chat)
    assert reply.json()["error"]["param"] == "n"


async def test_open_choices_are_bounded_and_not_only_requests(make_stand: MakeStand) -> None:
    gate = asyncio.Event()
    stand = await make_stand(gate=gate, config={"ingress.max_ongoing_requests": 6})
    first = asyncio.ensure_future(stand.complete(prompt=["a"] * 4))
    await until(lambda: len(stand.cluster.submitted) == 4)
    reply = await stand.complete(prompt=["a"] * 3)
    assert reply.status_code == 429
    assert "limit of 6" in reply.json()["error"]["message"]
    second = asyncio.ensure_future(stand.complete(prompt=["a"] * 2))
    await until(lambda: len(stand.cluster.submitted) == 6)
    gate.set()
    assert [(await r).status_code for r in (first, second)] == [200, 200]


async def test_a_request_above_the_limit_of_open_choices_is_answered_alone(
    make_stand: MakeStand,
) -> None:
    """Else it would be refused for ever."""
    stand = await make_stand(config={"ingress.max_ongoing_requests": 2})
    assert (await stand.complete(prompt=["a"] * 5)).status_code == 200
