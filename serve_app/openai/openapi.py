"""The OpenAPI page: every route, field, bound, answer and error of the HTTP API."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from quadriga import errors
from quadriga.config.ingress import IngressConfig
from quadriga.observability.metrics import CONTENT_TYPE
from serve_app.embeddings.answers import EmbeddingsAnswer
from serve_app.embeddings.body import EmbeddingsBody
from serve_app.openai import openapi_examples as examples
from serve_app.openai.answers import (
    Alive,
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    DetokenizeAnswer,
    Health,
    LoadAnswer,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    Version,
)
from serve_app.openai.errors import error_headers, error_object
from serve_app.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorBody,
    TokenizeBody,
)
from serve_app.openai.validation import largest_n
from serve_app.responses.answers import ResponsesAnswer
from serve_app.responses.body import ResponsesBody

Errors = tuple[type[errors.QuadrigaError], ...]

_ALWAYS: Errors = (errors.InvalidRequest, errors.HeadersTooLarge, errors.InvariantViolation)
_KEYED: Errors = (*_ALWAYS, errors.Unauthenticated, errors.Overloaded)
_POSTED: Errors = (*_KEYED, errors.UnknownModel, errors.RequestTimeout, errors.BodyTooLarge)
_GENERATED: Errors = (*_POSTED, errors.Unavailable, errors.DeadlineExceeded, errors.TakenOver)
HEADER_TEXTS = {
    "retry-after": "Seconds after which a retry may succeed.",
    "retry-after-ms": "The same in milliseconds.",
    "x-should-retry": "`false`: the same request cannot succeed.",
    "www-authenticate": "Always `Bearer`.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One route as the page shows it.

    Attributes:
        answer: Body of a success; a string is the content type of plain text.
        body: Of the request.
        chunk: What a streamed answer is made of; a string says it of events of many forms.
    """

    method: str
    path: str
    tag: str
    summary: str
    answer: type[BaseModel] | str
    errors: Errors
    body: type[BaseModel] | None = None
    chunk: type[BaseModel] | str | None = None

    @property
    def example(self) -> Any:
        """An answer."""
        return examples.ANSWERS[self.path]

    @property
    def requests(self) -> dict[str, Any]:
        """Bodies of requests, by name."""
        return examples.REQUESTS.get(self.path, {})


_READY = (*_ALWAYS, errors.Unavailable)
_PING = "As /health, with an empty answer; SageMaker's name for it."
_METRICS = (
    "Prometheus text: the whole cluster, each series labelled `replica`. With keys on, for keys "
    "with `admin`; the admin port has it too."
)
_ENDPOINT_METRICS = (
    "Prometheus text for a gateway's endpoint picker: the load of the whole cluster as that of one "
    "model server, a series each. `ingress.open_endpoint_metrics`: without a key."
)
_RESPONSES = (
    "Answer a conversation, in the form of OpenAI's Responses API; nothing is stored. With "
    "`stream: true` the answer is `text/event-stream`, its events those of that API."
)
_RESPONSES_EVENTS = (
    "With `stream: true`; the events of that API. The last one has the whole answer, or is `error`."
)
_EMBEDDINGS = "Make vectors of texts, of the whole model's last hidden states."
_OPS, _GENERATION = "operation", "generation"
# fmt: off
OPERATIONS = (
    Operation(
        "get", "/health", _OPS, "200 while requests can be served, else 503.", Health, _READY),
    Operation("get", "/live", _OPS, "200 while the process lives.", Alive, _ALWAYS),
    Operation("get", "/ping", _OPS, _PING, "text/plain", _READY),
    Operation("post", "/ping", _OPS, _PING, "text/plain", _READY),
    Operation("get", "/version", _OPS, "Which version runs.", Version, _ALWAYS),
    Operation("get", "/load", _OPS, "How much there is to do now.", LoadAnswer, _KEYED),
    Operation(
        "get", "/metrics", _OPS, _METRICS, CONTENT_TYPE,
        (*_KEYED, errors.Forbidden, errors.Unavailable)),
    Operation(
        "get", "/metrics/endpoint", _OPS, _ENDPOINT_METRICS, CONTENT_TYPE,
        (*_KEYED, errors.Unavailable)),
    Operation("get", "/v1/models", "models", "The models served.", ModelList, _KEYED),
    Operation(
        "get", "/v1/models/{model}", "models", "One model.", ModelCard,
        (*_KEYED, errors.UnknownModel)),
    Operation(
        "post", "/v1/completions", _GENERATION, "Continue a prompt.", CompletionAnswer,
        _GENERATED, CompletionBody, CompletionChunk),
    Operation(
        "post", "/v1/chat/completions", _GENERATION, "Answer a conversation.", ChatAnswer,
        _GENERATED, ChatBody, ChatChunk),
    Operation(
        "post", "/v1/responses", _GENERATION, _RESPONSES, ResponsesAnswer, _GENERATED,
        ResponsesBody, _RESPONSES_EVENTS),
    Operation(
        "post", "/v1/embeddings", _GENERATION, _EMBEDDINGS, EmbeddingsAnswer, _GENERATED,
        EmbeddingsBody),
    Operation(
        "post", "/tokenize", "tokens", "Text or messages to token ids.", TokenizeAnswer, _POSTED,
        TokenizeBody),
    Operation(
        "post", "/detokenize", "tokens", "Token ids to text.", DetokenizeAnswer, _POSTED,
        DetokenizeBody),
)
# fmt: on


@lru_cache(maxsize=8)
def openapi_document(limits: IngressConfig, *, needs_key: bool = False) -> dict[str, Any]:
    """Return the document for a deployment with these limits.

    Args:
        needs_key: HTTP asks for an API key.
    """
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        rendered = _operation(operation, schemas)
        if errors.Unauthenticated not in operation.errors:
            rendered["security"] = []
        paths.setdefault(operation.path, {})[operation.method] = rendered
    _schema(ErrorBody, schemas, mode="serialization")
    _state_limits(schemas, limits)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quadriga",
            "version": "1",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "OpenAI-compatible text generation. Bodies are at most "
            f"{limits.max_body_bytes} bytes, headers {limits.max_headers} with "
            f"{limits.max_header_bytes} bytes; unknown fields are accepted and named in the "
            "answer's header `x-quadriga-ignored`. A route that is not here answers 404, a method "
            "that is not here 405, both as any other error.",
        },
        "tags": [
            {"name": "generation", "description": "Text and vectors from a model."},
            {"name": "models", "description": "What is served."},
            {"name": "tokens", "description": "The models' tokenizers."},
            {"name": "operation", "description": "For those who run it."},
        ],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key."}
            },
        },
        "security": [{"key": []}] if needs_key else [{"key": []}, {}],
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters = [_header_parameter("X-Request-Id", "Echoed; made where absent.", {})]
    if "{model}" in operation.path:
        parameters.append(
            {
                "name": "model",
                "in": "path",
                "required": True,
                "description": "A model's id, or `quadriga-auto`.",
                "schema": {"type": "string", "minLength": 1},
                "example": "quadriga-auto",
            }
        )
    if operation.chunk is not None:
        parameters += _generation_headers()
    rendered: dict[str, Any] = {
        "operationId": f"{operation.method}{operation.path.replace('{', '').replace('}', '')}",
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": parameters,
        "responses": _responses(operation, schemas),
    }
    if operation.body is not None:
        rendered["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _schema(operation.body, schemas, mode="validation"),
                    "examples": {k: {"value": v} for k, v in operation.requests.items()},
                }
            },
        }
    return rendered


def _schema(model: type[BaseModel], schemas: dict[str, Any], *, mode: Any) -> dict[str, str]:
    tree = model.model_json_schema(ref_template="#/components/schemas/{model}", mode=mode)
    schemas.update(tree.pop("$defs", {}))
    schemas[model.__name__] = tree
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _responses(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        content: dict[str, Any] = {
            operation.answer: {"schema": {"type": "string"}, "example": operation.example}
        }
    else:
        schema = _schema(operation.answer, schemas, mode="validation")
        content = {"application/json": {"schema": schema, "example": operation.example}}
    success: dict[str, Any] = {"description": "Success.", "content": content}
    if isinstance(operation.chunk, str):
        properties = {"event": {"type": "string"}, "data": {"type": "string"}}
        event = {"type": "object", "required": ["event", "data"], "properties": properties}
        success["content"]["text/event-stream"] = {
            "schema": event | {"description": operation.chunk},
            "example": examples.EVENTS,
        }
    elif operation.chunk is not None:
        chunk = _schema(operation.chunk, schemas, mode="validation")
        success["content"]["text/event-stream"] = {
            "schema": {
                "type": "object",
                "description": "With `stream: true`; each event has this form. The last one's data "
                "is `[DONE]`. A failure under way is an event with an `ErrorBody`, after which "
                "the stream closes.",
                "required": ["data"],
                "properties": {
                    "data": {
                        "type": "string",
                        "anyOf": [
                            {"const": "[DONE]"},
                            {
                                "contentMediaType": "application/json",
                                "contentSchema": {
                                    "anyOf": [chunk, {"$ref": "#/components/schemas/ErrorBody"}]
                                },
                            },
                        ],
                    }
                },
            },
            "example": examples.STREAM,
        }
    if operation.chunk is not None:
        success["headers"] = {
            "x-quadriga-ignored": _header("Fields of the request that mean nothing here.")
        }
    return {"200": success} | {
        str(error.http_status): _error_response(error)
        for error in sorted(set(operation.errors), key=lambda e: e.http_status)
    }


def _error_response(error: type[errors.QuadrigaError]) -> dict[str, Any]:
    sample = error(examples.ERRORS[error], retry_after_s=1.0)
    names = {name.decode() for name, _ in error_headers(sample)}
    content = {
        "schema": {"$ref": "#/components/schemas/ErrorBody"},
        "example": error_object(sample),
    }
    return {
        "description": (error.__doc__ or "").splitlines()[0],
        "headers": {name: _header(HEADER_TEXTS[name]) for name in sorted(names)},
        "content": {"application/json": content},
    }


def _header(text: str) -> dict[str, Any]:
    return {"description": text, "required": False, "schema": {"type": "string"}}


def _generation_headers() -> list[dict[str, Any]]:
    key = {"minLength": 1, "maxLength": 256, "pattern": "^[ -~]*$"}
    cursors = {"pattern": "^[0-9]{1,9}( *, *[0-9]{1,9})*$"}
    return [
        _header_parameter(
            "Idempotency-Key", "The same key and body resume the request; it never runs twice.", key
        ),
        _header_parameter(
            "X-Resume-Index",
            "With the key: tokens already had, per choice, commas between.",
            cursors,
        ),
    ]


def _header_parameter(name: str, text: str, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": text,
        "schema": {"type": "string"} | more,
    }


def _state_limits(schemas: dict[str, Any], limits: IngressConfig) -> None:
    """Write the deployment's own bounds into the schemas of the generation bodies."""
    for body in (CompletionBody, ChatBody, EmbeddingsBody):
        fields = schemas[body.__name__]["properties"]
        for name, bound in (
            ("n", largest_n(limits)),
            ("logprobs", limits.max_logprobs),
            ("top_logprobs", limits.max_logprobs),
            ("deadline_ms", int(limits.max_deadline_s * 1000)),
        ):
            for variant in _variants(fields, name, "integer"):
                variant["maximum"] = bound
        text = {"minLength": 1, "maxLength": limits.max_stop_length}
        for variant in _variants(fields, "stop", "array"):
            variant |= {"maxItems": limits.max_stop_strings, "items": {"type": "string"} | text}
        for variant in _variants(fields, "stop", "string"):
            variant |= text
    for body, name in ((CompletionBody, "prompt"), (EmbeddingsBody, "input")):
        fields = schemas[body.__name__]["properties"]
        fields[name] = deepcopy(fields[name])  # pydantic hands out the model's own
        for form in fields[name]["anyOf"]:
            if form["type"] == "array" and form["items"]["type"] != "integer":
                form["maxItems"] = limits.max_prompts
    for variant in _variants(schemas["ChatBody"]["properties"], "max_tokens", "integer"):
        variant["minimum"] = 1


def _variants(fields: dict[str, Any], name: str, kind: str) -> Sequence[dict[str, Any]]:
    return [v for v in fields.get(name, {}).get("anyOf", []) if v.get("type") == kind]
