"""A field that would change the answer and is not supported is refused, wherever it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quadriga.config.loader import load_config
from serve_app.openai.openapi import openapi_document
from serve_app.openai.unsupported import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGE,
    RESPONSE_FORMAT,
    RESPONSES,
    STRUCTURED_OUTPUTS,
    TOKENIZE,
    UnsupportedField,
)
from tests.unit.serve_app.conftest import MODEL, Stand

MESSAGES = [{"role": "user", "content": "a"}]
THINK_NOT = {"enable_thinking": False}
ROUTES: dict[str, tuple[dict[str, UnsupportedField], dict[str, Any]]] = {
    "/v1/completions": (COMPLETIONS, {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (CHAT, {"messages": MESSAGES, "max_tokens": 1}),
    "/tokenize": (TOKENIZE, {"messages": MESSAGES}),
    "/v1/embeddings": (EMBEDDINGS, {"input": "a"}),
    "/v1/responses": (RESPONSES, {"input": "a", "max_output_tokens": 1}),
}
WANTED = ["x", 7, 0.25, True, False, ["x"], {"a": 1}]
"""Values of every kind; those that a field takes as neutral are left out."""
DOCS = Path(__file__).resolve().parents[3] / "docs" / "clients.md"


@pytest.mark.parametrize("route", ROUTES)
async def test_each_field_is_refused_unless_it_asks_for_nothing(stand: Stand, route: str) -> None:
    table, body = ROUTES[route]
    for name, field in table.items():
        for value in [value for value in WANTED if not field.accepts(value)]:
            reply = await stand.http.post(route, json=body | {name: value})
            assert reply.status_code == 400, (name, value, reply.text)
            error = reply.json()["error"]
            assert error["param"] == name
            assert error["code"] == "unsupported_parameter"
        for value in (None, *field.neutral):
            reply = await stand.http.post(route, json=body | {name: value})
            assert reply.status_code == 200, (name, value, reply.text)
            assert "x-quadriga-ignored" not in reply.headers


async def test_each_field_of_a_message_is_refused(stand: Stand) -> None:
    for name in MESSAGE:
        messages = [*MESSAGES, {"role": "assistant", "content": "b", name: [{"id": "1"}]}]
        reply = await stand.http.post("/v1/chat/completions", json={"messages": messages})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == f"messages.1.{name}"


async def test_fields_that_change_nothing_are_accepted_and_named(stand: Stand) -> None:
    harmless = {"metadata": {}, "store": True, "service_tier": "a"}
    inside = {"structured_outputs": {"jsn": {}}, "stream": True, "stream_options": {"usage": True}}
    reply = await stand.complete(**harmless, **inside)
    assert reply.status_code == 200
    named = {*harmless, "structured_outputs.jsn", "stream_options.usage"}
    assert set(reply.headers["x-quadriga-ignored"].split(",")) == named


def test_true_is_not_one() -> None:
    assert COMPLETIONS["num_beams"].accepts(1)
    assert COMPLETIONS["num_beams"].accepts(1.0)
    assert not COMPLETIONS["num_beams"].accepts(True)
    assert not COMPLETIONS["use_beam_search"].accepts(0)


def test_the_openapi_document_and_the_docs_name_each_field() -> None:
    schemas = openapi_document(load_config({}).ingress)["components"]["schemas"]
    text = DOCS.read_text(encoding="utf-8")
    for body, table in (
        ("CompletionBody", COMPLETIONS),
        ("ChatBody", CHAT),
        ("ChatMessage", MESSAGE),
        ("TokenizeBody", TOKENIZE),
        ("StructuredOutputs", STRUCTURED_OUTPUTS),
        ("ResponseFormat", RESPONSE_FORMAT),
        ("ResponsesBody", RESPONSES),
        ("EmbeddingsBody", EMBEDDINGS),
    ):
        for name, field in table.items():
            assert schemas[body]["properties"][name]["enum"] == [None, *field.neutral]
            assert f"`{name}`" in text, f"docs/clients.md does not name {name}"


async def test_no_reasoning_is_told_to_the_template(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking is false %} do not think{% endif %}"
    monkeypatch.setattr(MODEL.tokenizer._fast, "chat_template", template)
    num_tokens = []
    for more in ({}, {"reasoning_effort": "none"}, {"chat_template_kwargs": THINK_NOT}):
        body = {"messages": MESSAGES, "max_tokens": 1} | more
        reply = await stand.http.post("/v1/chat/completions", json=body)
        num_tokens.append(reply.json()["usage"]["prompt_tokens"])
    for more in ({}, {"reasoning": {"effort": "none"}}):
        body = {"input": "a", "max_output_tokens": 1} | more
        reply = await stand.http.post("/v1/responses", json=body)
        num_tokens.append(reply.json()["usage"]["input_tokens"])
    plain, told = len(MODEL.tokenizer.encode("a")), len(MODEL.tokenizer.encode("a do not think"))
    assert num_tokens == [plain, told, told, plain, told]
