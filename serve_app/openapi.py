"""The OpenAPI page: every route, field, bound and error of the HTTP door."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from quadriga.config import IngressConfig
from quadriga.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    QuadrigaError,
    RequestTimeout,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from serve_app.openai_schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorBody,
    TokenizeBody,
)

_ERRORS: tuple[type[QuadrigaError], ...] = (
    InvalidRequest,
    Unauthenticated,
    UnknownModel,
    RequestTimeout,
    BodyTooLarge,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
)
_POSTS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("/v1/completions", CompletionBody, "Continue a prompt."),
    ("/v1/chat/completions", ChatBody, "Answer a conversation."),
    ("/tokenize", TokenizeBody, "Text or messages to token ids."),
    ("/detokenize", DetokenizeBody, "Token ids to text."),
)
_GETS = (
    ("/health", "200 while requests can be served, else 503."),
    ("/live", "200 while the process lives."),
    ("/metrics", "Prometheus text: the whole cluster, each series labelled `replica`."),
    ("/v1/models", "The models served."),
    ("/v1/models/{model}", "One model."),
)


@lru_cache(maxsize=8)
def openapi_document(limits: IngressConfig) -> dict[str, Any]:
    """Return the document for a deployment with these limits."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, text in _GETS:
        paths[path] = {"get": {"summary": text, "responses": _responses()}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    for path, body, text in _POSTS:
        operation: dict[str, Any] = {
            "summary": text,
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _schema(body, schemas)}},
            },
            "responses": _responses(),
        }
        if path.startswith("/v1/"):
            operation["parameters"] = _generation_headers()
        paths[path] = {"post": operation}
    _schema(ErrorBody, schemas)
    _state_limits(schemas, limits)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quadriga",
            "version": "1",
            "description": "OpenAI-compatible text generation. Bodies are at most "
            f"{limits.max_body_bytes} bytes; unknown fields are accepted and named in the answer's "
            "header `x-quadriga-ignored`.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _schema(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, str]:
    tree = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(tree.pop("$defs", {}))
    schemas[model.__name__] = tree
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _responses() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    responses: dict[str, Any] = {"200": {"description": "Success."}}
    for error in _ERRORS:
        text = (error.__doc__ or "").splitlines()[0]
        responses[str(error.http_status)] = {"description": text, "content": content}
    return responses


def _generation_headers() -> list[dict[str, Any]]:
    texts = {
        "Idempotency-Key": "The same key and body resume the request; it never runs twice.",
        "X-Resume-Index": "With the key: tokens already had, per choice, commas between.",
        "X-Request-Id": "Echoed; made where absent.",
    }
    return [
        {
            "name": name,
            "in": "header",
            "required": False,
            "description": text,
            "schema": {"type": "string", "maxLength": 256},
        }
        for name, text in texts.items()
    ]


def _state_limits(schemas: dict[str, Any], limits: IngressConfig) -> None:
    """Write the deployment's own bounds into the schemas of the generation bodies."""
    for body in (CompletionBody, ChatBody):
        fields = schemas[body.__name__]["properties"]
        for name, bound in (
            ("n", limits.max_choices),
            ("logprobs", limits.max_logprobs),
            ("top_logprobs", limits.max_logprobs),
            ("deadline_ms", int(limits.max_deadline_s * 1000)),
        ):
            for variant in fields.get(name, {}).get("anyOf", []):
                if variant.get("type") == "integer":
                    variant["maximum"] = bound
        for variant in fields["stop"]["anyOf"]:
            if variant.get("type") == "array":
                variant["maxItems"] = limits.max_stop_strings
                variant["items"] = {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": limits.max_stop_length,
                }
            elif variant.get("type") == "string":
                variant |= {"minLength": 1, "maxLength": limits.max_stop_length}
