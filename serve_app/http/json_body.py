"""The bytes of a body to a JSON value, at a price that is bounded before it is paid.

Decoding holds the event loop, and with it every stream of the ingress. What is dear about it is not
the bytes but the objects that are made of them; so those are counted first, and few are allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from quadriga.errors import InvalidRequest

MAX_PIECES = 65_536
"""Strings, lists and objects in one body. 4,096 messages of parts, each with a name, have fewer."""
NAMED_BYTES = 32 << 10
"""A field with half a character in it is looked for in bodies up to this size."""

_PIECE = re.compile(rb'[^"\[{]*+(?:[\[{]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?)', re.DOTALL)


def parse_json(data: bytes) -> Any:
    """Decode JSON strictly: UTF-8, no NaN or Infinity, no lone surrogates, 201 levels at most.

    Raises: InvalidRequest.
    """
    _check_pieces(data)
    try:
        return from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as exc:
        if "hex escape" in str(exc) and len(data) <= NAMED_BYTES:
            _name_lone_surrogate(data)
        raise InvalidRequest(f"the body is not valid JSON: {exc}", code="invalid_json") from exc


def _check_pieces(data: bytes) -> None:
    # Text full of quotes and brackets has many that are no pieces; only then they are told apart.
    most = data.count(b'"') // 2 + data.count(b"[") + data.count(b"{")
    if most <= MAX_PIECES:
        return
    # The quote is where the search ends: else it would look for one from every byte of the rest.
    if _PIECE.subn(b"", data + b'"', MAX_PIECES + 2)[1] - 1 > MAX_PIECES:
        raise InvalidRequest(
            f"the body has more than {MAX_PIECES:,} strings, lists and objects, the limit; "
            "send less in one request",
            code="body_too_complex",
        )


def _name_lone_surrogate(data: bytes) -> None:
    """Raises: InvalidRequest naming the field, if there is one."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    check_unicode(value)


def check_unicode(value: object, path: str = "") -> None:
    """Refuse lone surrogates anywhere in a decoded JSON value.

    Raises: InvalidRequest naming the field.
    """
    stack: list[tuple[object, str]] = [(value, path)]
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
