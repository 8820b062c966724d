"""The OpenAPI page is complete, and real answers have the forms it shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from quadriga.config.loader import load_config
from quadriga.errors import QuadrigaError
from serve_app.http.server import HttpServer
from serve_app.openai.answers import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk
from serve_app.openai.openapi import OPERATIONS, Operation, openapi_document
from serve_app.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.unit.serve_app.conftest import Stand

DOCUMENT = openapi_document(load_config({}).ingress)


def application(stand: Stand) -> FastAPI:
    return HttpServer(stand.engine).application()


async def test_every_route_is_on_the_page(stand: Stand) -> None:
    served = {
        (method, route.path.replace(":path", ""))
        for route in application(stand).routes
        if isinstance(route, Route) and not route.path.startswith(("/docs", "/openapi"))
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {(op.method.upper(), op.path) for op in OPERATIONS}


@pytest.mark.parametrize("name", DOCUMENT["components"]["schemas"])
def test_every_field_is_described(name: str) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    assert schema.get("description"), f"{name} says nothing of itself"
    for field, tree in schema["properties"].items():
        assert tree.get("description") or "$ref" in tree, f"{name}.{field} has no description"


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody])
def test_every_field_of_a_body_is_bounded(body: type[Any]) -> None:
    """Numbers have limits; lists and texts too, unless the size of the body is the limit."""
    for field, tree in DOCUMENT["components"]["schemas"][body.__name__]["properties"].items():
        for variant in tree.get("anyOf", [tree]):
            if variant.get("type") in ("integer", "number"):
                lower = variant.keys() & {"minimum", "exclusiveMinimum"}
                assert lower, f"{field} has no lower bound"
                assert "maximum" in variant, f"{field} has no upper bound"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.path)
def test_every_answer_has_an_example_of_its_form(operation: Operation) -> None:
    rendered = DOCUMENT["paths"][operation.path][operation.method]
    for status, response in rendered["responses"].items():
        for content in response["content"].values():
            assert "example" in content, status
    if not isinstance(operation.answer, str):
        operation.answer.model_validate(operation.example)
    if operation.body is not None:
        examples = rendered["requestBody"]["content"]["application/json"]["examples"]
        assert examples
        for example in examples.values():
            operation.body.model_validate(example["value"])
    assert {e.http_status for e in operation.errors} <= {int(s) for s in rendered["responses"]}


async def test_the_examples_are_answered(stand: Stand) -> None:
    for operation in OPERATIONS:
        for example in (operation.requests or {}).values():
            reply = await stand.http.post(operation.path, json=example)
            assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2, "echo": True}, {"n": 2, "return_token_ids": True}]
)
async def test_completions_have_the_form_on_the_page(stand: Stand, fields: dict[str, Any]) -> None:
    CompletionAnswer.model_validate((await stand.complete(**fields)).json())
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await stand.complete(stream=True, stream_options=options, **fields)
    for frame in reply.text.split("\n\n")[:-2]:
        CompletionChunk.model_validate(json.loads(frame.removeprefix("data: ")))


@pytest.mark.parametrize(
    "fields", [{}, {"top_logprobs": 0}, {"logprobs": True, "top_logprobs": 2, "n": 2}]
)
async def test_chats_have_the_form_on_the_page(stand: Stand, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 50} | fields
    reply = await stand.http.post("/v1/chat/completions", json=body)
    ChatAnswer.model_validate(reply.json())
    reply = await stand.http.post("/v1/chat/completions", json=body | {"stream": True})
    for frame in reply.text.split("\n\n")[:-2]:
        ChatChunk.model_validate(json.loads(frame.removeprefix("data: ")))


async def test_small_answers_have_the_form_on_the_page(stand: Stand) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [40, 41]}),
    ):
        operation = next(op for op in OPERATIONS if op.path == path)
        assert not isinstance(operation.answer, str)
        operation.answer.model_validate((await stand.http.post(path, json=body)).json())
    for path in ("/live", "/health", "/v1/models"):
        operation = next(op for op in OPERATIONS if op.path == path)
        reply = await stand.http.get(path)
        if reply.status_code == 200 and not isinstance(operation.answer, str):
            operation.answer.model_validate(reply.json())


def test_every_error_a_client_can_meet_is_on_the_page() -> None:
    """Classes that no answer of HTTP carries are named here, so that none is forgotten."""

    def tree(cls: type[QuadrigaError]) -> set[type[QuadrigaError]]:
        return {cls}.union(*(tree(sub) for sub in cls.__subclasses__()))

    documented = {e.http_status for op in OPERATIONS for e in op.errors}
    elsewhere = {405, 499}  # the router's, named in the description; and what a client cancels
    assert {cls.http_status for cls in tree(QuadrigaError)} <= documented | elsewhere


def test_keys_are_asked_for_where_they_are_on() -> None:
    limits = load_config({}).ingress
    assert {} in openapi_document(limits)["security"]
    assert openapi_document(limits, needs_key=True)["security"] == [{"key": []}]
