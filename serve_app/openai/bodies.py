"""The bytes of a body to a validated model, with errors that name field, value and limit.

Decoding blocks the event loop, and with it every stream of the ingress. Its cost is not the bytes
but the objects that are made of them; so those are counted first, and only so many are allowed.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from quadriga.errors import InvalidRequest
from serve_app.openai.schema import RequestBody
from serve_app.openai.unsupported import UnsupportedField

MAX_PIECES = 65_536
"""Strings, lists and objects in one body. 4,096 messages of parts, each with a name, have fewer."""
NAMED_BYTES = 32 << 10
"""In bodies up to this size an error about half a character names the field."""

_PIECE = re.compile(rb'[^"\[{]*+(?:[\[{]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?)', re.DOTALL)
SHOWN_CHARS = 60
SHOWN_ERRORS = 3
UNION_MEMBERS = ("str", "int", "float", "bool", "NamedToolChoice", "ResponseToolChoice")
MAX_FIELDS = 256
"""Of a body, ignored ones included."""


BodyModel = TypeVar("BodyModel", bound=RequestBody)


def parse_json(data: bytes) -> Any:
    """Decode JSON strictly: UTF-8, no NaN or Infinity, no lone surrogates, 201 levels at most.

    A byte order mark before it is passed over.

    Raises: InvalidRequest.
    """
    check_pieces(data)
    data = data.removeprefix(BOM_UTF8)
    try:
        return from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as exc:
        if "hex escape" in str(exc) and len(data) <= NAMED_BYTES:
            _name_lone_surrogate(data)
        raise InvalidRequest(f"the body is not valid JSON: {exc}", code="invalid_json") from exc


def check_pieces(*texts: bytes) -> None:
    """Raises: InvalidRequest: Reading these, of one request, would take too long."""
    # Text full of quotes and brackets has many that are no pieces; only then they are counted.
    most = sum(t.count(b'"') // 2 + t.count(b"[") + t.count(b"{") for t in texts)
    if most <= MAX_PIECES:
        return
    # The quote is where the search ends: else it would look for one from every byte of the rest.
    if sum(_PIECE.subn(b"", t + b'"', MAX_PIECES + 2)[1] - 1 for t in texts) > MAX_PIECES:
        raise InvalidRequest(
            f"the body has more than {MAX_PIECES:,} strings, lists and objects, the limit; "
            "send less in one request",
            code="body_too_complex",
        )


def _name_lone_surrogate(data: bytes) -> None:
    """Raises: InvalidRequest naming the field, if there is one."""
    try:
        stack: list[tuple[object, str]] = [(json.loads(data), "")]
    except (ValueError, RecursionError):
        return
    while stack:
        item, where = stack.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as exc:
                field = where or "body"
                raise InvalidRequest(
                    f"{field}: holds a lone surrogate (character {exc.start}), which is not text",
                    param=field,
                ) from exc
        elif isinstance(item, Mapping):
            for key, child in item.items():
                stack.append((key, where or "a field name"))
                stack.append((child, f"{where}.{key}" if where else str(key)))
        elif isinstance(item, list):
            prefix = f"{where}." if where else ""
            stack.extend((child, f"{prefix}{i}") for i, child in enumerate(item))


def json_size(value: object, field: str) -> int:
    """Bytes of a decoded value as JSON. Raises: InvalidRequest: Not every number in it is one."""
    try:
        return len(json.dumps(value, allow_nan=False))
    except ValueError as exc:
        raise InvalidRequest(f"{field}: a number is above 1.8e308, the limit", param=field) from exc


def shown(value: object) -> str:
    """A value as an error message may quote it: short, printable ASCII."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = ascii(value) if not isinstance(value, (list, dict)) else _shown_container(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _shown_container(value: list[Any] | dict[Any, Any]) -> str:
    return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"


def parse_body(model: type[BodyModel], data: object) -> BodyModel:
    """Validate a decoded JSON value against a body model.

    Raises: InvalidRequest naming the first fields at fault, their values and limits, or a field
        that is not supported.
    """
    if not isinstance(data, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {shown(data)}")
    if len(data) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(data)} fields, above the limit of {MAX_FIELDS}")
    try:
        body = model.model_validate(data)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False)
        lines = []
        for error in errors[:SHOWN_ERRORS]:
            got = "" if error["type"] == "missing" else f" (got {shown(error['input'])})"
            is_object = error["type"] in ("model_type", "dict_type")
            said = "Input should be an object" if is_object else error["msg"]
            lines.append(f"{_field_name(error['loc'])}: {said}{got}")
        more = f"; and {len(errors) - SHOWN_ERRORS} more" if len(errors) > SHOWN_ERRORS else ""
        raise InvalidRequest("; ".join(lines) + more, param=_field_name(errors[0]["loc"])) from exc
    refuse_unsupported(body.model_extra or {}, body.unsupported)
    return body


def _field_name(location: tuple[int | str, ...]) -> str:
    """`stop.2`, without pydantic's names of union members: `list[str]`, classes of ours."""
    parts = [str(p) for p in location if isinstance(p, int) or p.replace("_", "").isalnum()]
    known = [p for p in parts if p not in UNION_MEMBERS]
    return ".".join(known) or "body"


def ignored_fields(body: RequestBody, place: str = "") -> tuple[str, ...]:
    """Fields that mean nothing here, those of its objects too (`stream_options.x`).

    Not those that are known and ask for nothing.
    """
    names = [f"{place}{n}" for n in (body.model_extra or {}).keys() - body.unsupported.keys()]
    for name, value in body:
        if isinstance(value, RequestBody):
            names += ignored_fields(value, f"{place}{name}.")
    return tuple(sorted(names))


def refuse_unsupported(
    fields: Mapping[str, Any], unsupported: Mapping[str, UnsupportedField], place: str = ""
) -> None:
    """Refuse the first field of a request that asks for what there is not.

    Args:
        place: What stands before the fields' names in the error.

    Raises: InvalidRequest.
    """
    for name, value in fields.items():
        found = unsupported.get(name)
        if found is not None and not found.accepts(value):
            raise found.error(f"{place}{name}")
