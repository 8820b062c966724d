"""Prompts that cannot fit are refused by their size, before they cost anything."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.serve_app.conftest import MODEL, Stand

LIMIT = MODEL.max_model_len
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("more", [{}, {"max_tokens": 5}, {"max_completion_tokens": 5}])
async def test_a_conversation_that_is_too_long_names_its_messages(
    stand: Stand, more: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "7 " * LIMIT}]
    reply = await stand.http.post(CHAT, json={"model": "quadriga-s", "messages": messages} | more)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "messages"
    assert "shorten" in error["message"]


async def test_a_completions_length_has_both_names(stand: Stand) -> None:
    """guidellm sends the two together."""
    for more in ({"max_tokens": 3}, {"max_tokens": None}, {"max_tokens": 7}):
        reply = await stand.complete(max_completion_tokens=3, **more)
        assert reply.json()["usage"]["completion_tokens"] == 3
    reply = await stand.complete(max_completion_tokens=LIMIT)
    assert reply.json()["error"]["param"] == "max_completion_tokens"


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT, LIMIT + 1])
async def test_prompts_at_the_limit(stand: Stand, length: int) -> None:
    ids = [7] * length
    reply = await stand.complete(prompt=ids, max_tokens=1)
    assert reply.status_code == (200 if length < LIMIT else 400)
    reply = await stand.complete(prompt=ids, max_tokens=None)
    assert reply.status_code == (200 if length < LIMIT else 400)
    reply = await stand.complete(prompt=ids, max_tokens=0, echo=True)
    assert reply.status_code == (200 if length <= LIMIT else 400)


@pytest.mark.parametrize("text", ["wörd 7. ", "a", "😀"])
@pytest.mark.parametrize("route", ["/v1/completions", CHAT, "/tokenize"])
async def test_a_huge_text_is_refused_at_once(stand: Stand, text: str, route: str) -> None:
    huge = text * (900_000 // len(text.encode()))
    body: dict[str, Any] = {"model": "quadriga-s", "prompt": huge}
    if route == CHAT:
        body = {"model": "quadriga-s", "messages": [{"role": "user", "content": huge}]}
    began_s = time.process_time()
    reply = await stand.http.post(route, json=body)
    assert time.process_time() - began_s < 1.5, "the whole of it takes five"
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("messages" if route == CHAT else "prompt")
    assert "shorten" in error["message"]


@pytest.mark.parametrize("route", [CHAT, "/tokenize"])
async def test_variables_reach_the_chat_template_by_their_names(stand: Stand, route: str) -> None:
    body = {"model": "quadriga-s", "messages": [{"role": "user", "content": "hi"}]}
    refused = body | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    error = (await stand.http.post(route, json=refused)).json()["error"]
    assert error["param"] == "chat_template_kwargs.chat_template"
    ignored = body | {"chat_template_kwargs": {"enable_thinking": False}}
    assert (await stand.http.post(route, json=ignored)).status_code == 200


WORDS = st.sampled_from(["seven", " sort", " 12", "ä", " ", "😀", "zz", "\n", " copy:"])


@given(st.lists(WORDS, max_size=600), st.integers(1, 600))
def test_only_what_has_more_tokens_is_called_too_long(words: list[str], limit: int) -> None:
    tokenizer, text = MODEL.tokenizer, "".join(words)
    num_tokens = len(tokenizer.encode(text))
    assert not tokenizer.exceeds(text, num_tokens, piece_chars=512)
    if tokenizer.exceeds(text, limit, piece_chars=512):
        assert num_tokens > limit
    else:
        assert num_tokens <= limit + 16 * (len(text) // 512 + 1), "refused only far above it"
