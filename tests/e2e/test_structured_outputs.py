"""Answers of a given form from a running service: over HTTP, gRPC, openai's package and our SDK."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from pydantic import BaseModel

from quadriga.client import Client
from quadriga.errors import InvalidRequest

MESSAGES: Any = [{"role": "user", "content": "Sort: 42 7 19 3"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "order": {"enum": ["up", "down"]},
    },
    "required": ["numbers", "order"],
    "additionalProperties": False,
}


class Sorted(BaseModel):
    """What the answer is read as."""

    numbers: tuple[int, int]
    order: Literal["up", "down"]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
def test_a_schema_with_openais_package(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.create(
        model="quadriga-s",
        messages=MESSAGES,
        temperature=temperature,
        seed=4,
        n=3,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "sorted", "schema": SCHEMA, "strict": True},
        },
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_openais_parse_helper(client: openai.OpenAI) -> None:
    class Pair(BaseModel):
        first: int
        is_even: bool

    answer = client.chat.completions.parse(
        model="quadriga-s", messages=MESSAGES, response_format=Pair, temperature=0.7, seed=2
    )
    assert isinstance(answer.choices[0].message.parsed, Pair)


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "[xyz]{2}"}, ("xx", "xy", "xz", "yx", "yy", "yz", "zx", "zy", "zz")),
        ({"grammar": 'start: "a" | "b" "c"'}, ("a", "bc")),
    ],
)
def test_other_forms_over_http_and_grpc(
    http: httpx.Client, sdk: Client, form: dict[str, Any], allowed: tuple[str, ...]
) -> None:
    body = {"prompt": "Sort: 3 1\n", "max_tokens": 20, "temperature": 1.5, "seed": 3}
    old = {f"guided_{name}": value for name, value in form.items()}
    texts = {
        http.post("/v1/completions", json=body | fields).json()["choices"][0]["text"]
        for fields in ({"structured_outputs": form}, old)
    }
    answer = sdk.generate(
        "Sort: 3 1\n", max_tokens=20, temperature=1.5, seed=3, structured_outputs=form
    )
    assert texts == {answer.choices[0].text}
    assert texts <= set(allowed)


def test_the_sdk_takes_schemas(sdk: Client) -> None:
    text = "".join(
        piece.text
        for piece in sdk.stream(MESSAGES, temperature=1.0, structured_outputs={"json": SCHEMA})
    )
    jsonschema.validate(json.loads(text), SCHEMA)
    with pytest.raises(InvalidRequest, match="unclosed") as caught:
        sdk.generate(MESSAGES, structured_outputs={"regex": "["})
    assert caught.value.param == "structured_outputs.regex"
    with pytest.raises(TypeError, match="give one of json"):
        sdk.generate(MESSAGES, structured_outputs={"xml": "a"})
