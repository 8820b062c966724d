"""Decoded JSON to body models, with errors that name the field, its value and its limit."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from quadriga.errors import InvalidRequest
from serve_app.openai.schema import Body
from serve_app.openai.unsupported import refuse_unsupported

SHOWN_CHARS = 60
SHOWN_ERRORS = 3
MAX_FIELDS = 256
"""Of a body, those that are ignored included."""

BodyModel = TypeVar("BodyModel", bound=Body)


def shown(value: object) -> str:
    """A value as an error message may quote it: short, printable ASCII."""
    text = ascii(value) if not isinstance(value, (list, dict)) else _shown_container(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _shown_container(value: list[Any] | dict[Any, Any]) -> str:
    return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"


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
            lines.append(f"{_field_name(error['loc'])}: {error['msg']}{got}")
        more = f"; and {len(errors) - SHOWN_ERRORS} more" if len(errors) > SHOWN_ERRORS else ""
        raise InvalidRequest("; ".join(lines) + more, param=_field_name(errors[0]["loc"])) from exc
    refuse_unsupported(body.model_extra or {}, body.unsupported)
    return body


def _field_name(location: tuple[int | str, ...]) -> str:
    """`stop.2`, without pydantic's names of union members such as `list[str]`."""
    parts = [str(p) for p in location if isinstance(p, int) or p.replace("_", "").isalnum()]
    known = [p for p in parts if p not in ("str", "int", "float", "bool")]
    return ".".join(known) or "body"


def ignored_fields(body: Body) -> tuple[str, ...]:
    """Fields that mean nothing here; not those that are known and ask for nothing."""
    return tuple(sorted((body.model_extra or {}).keys() - body.unsupported.keys()))
