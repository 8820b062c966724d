"""The fields that say which form an answer must have, in OpenAI's, vLLM's and our own words."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pydantic_core import from_json

from quadriga.core.grammar import COMPACT, MAX_GRAMMAR_BYTES, Grammar, check_options
from quadriga.errors import InvalidRequest
from serve_app.openai.bodies import refuse_unsupported, shown
from serve_app.openai.schema import GenerationFields
from serve_app.openai.tools import ChatTools

GUIDED = ("json", "regex", "choice", "grammar")
NOT_TOGETHER = ("ignore_eos", "min_tokens")
"""Fields that say when an answer may end, which its grammar says."""


def read_grammar(body: GenerationFields, tools: ChatTools) -> tuple[Grammar, str] | None:
    """The grammar of a request's answer and the field that it is from; None where it has none.

    Raises: InvalidRequest.
    """
    found = [*_response_format(body), *_guided(body), *_structured_outputs(body)]
    if len(found) > 1:
        names = " and ".join(field for _, field in found)
        raise InvalidRequest(
            f"{found[1][1]}: an answer has one form, and {names} give several; leave all but one "
            "out",
            param=found[1][1],
        )
    if tools.calling is not None:
        found = _beside_tools(found, tools)
    if not found:
        return None
    for name in NOT_TOGETHER:
        if getattr(body, name):
            raise InvalidRequest(
                f"{name}: not together with {found[0][1]}, which says where the answer may end; "
                "leave it out",
                param=name,
            )
    return found[0]


def _beside_tools(found: list[tuple[Grammar, str]], tools: ChatTools) -> list[tuple[Grammar, str]]:
    """The form of an answer that may call; one that is JSON holds where it does not.

    Raises: InvalidRequest: The form is another one.
    """
    if not found:
        return [] if tools.grammar is None else [(tools.grammar, "tools")]
    form, field = found[0]
    schema = _schema_of(form)
    check_options(schema, field)
    if tools.or_json is None or schema is None:
        raise InvalidRequest(
            f"{field}: beside tools that may be called, only a JSON schema may stand; it must be "
            f"an object, at most {MAX_GRAMMAR_BYTES:,} characters long. Leave one of them out, or "
            "set tool_choice to none",
            param=field,
        )
    return [(tools.or_json(schema), field)]


def _schema_of(form: Grammar) -> dict[str, Any] | None:
    """The schema of a form; None where it has none, or one that is too long to be read."""
    schema = None
    with suppress(ValueError):
        if form.kind == "json_schema" and len(form.text) <= MAX_GRAMMAR_BYTES:
            schema = from_json(form.text, allow_inf_nan=False)
    return schema if isinstance(schema, dict) else None


def _response_format(body: GenerationFields) -> list[tuple[Grammar, str]]:
    form = body.response_format
    if form is None:
        return []
    refuse_unsupported(form.model_extra or {}, form.unsupported, "response_format.")
    wanted, field = form.json_schema, "response_format.json_schema"
    if (wanted is None) is (form.type == "json_schema"):
        why = "needs it" if wanted is None else "has none; leave it out, or set type json_schema"
        raise InvalidRequest(f"{field}: type {form.type} {why}", param=field)
    if wanted is None:
        return [] if form.type == "text" else [(Grammar.json_object(), "response_format")]
    if wanted.schema_ is None:
        return [(Grammar.json_object(), "response_format.json_schema")]
    return [(Grammar.json_schema(wanted.schema_), "response_format.json_schema.schema")]


def _guided(body: GenerationFields) -> list[tuple[Grammar, str]]:
    given = {name: getattr(body, f"guided_{name}") for name in GUIDED}
    return _forms({k: v for k, v in given.items() if v is not None}, "guided_")


def _structured_outputs(body: GenerationFields) -> list[tuple[Grammar, str]]:
    form = body.structured_outputs
    if form is None:
        return []
    refuse_unsupported(form.model_extra or {}, form.unsupported, "structured_outputs.")
    given: dict[str, Any] = {
        "json": form.json_,
        "regex": form.regex,
        "choice": form.choice,
        "grammar": form.grammar,
        "json_object": form.json_object or None,
    }
    found = _forms({k: v for k, v in given.items() if v is not None}, "structured_outputs.")
    return [(_compact(g), field) for g, field in found] if form.disable_any_whitespace else found


def _compact(form: Grammar) -> Grammar:
    """The same form without blanks between the parts of JSON."""
    schema = _schema_of(form)
    if schema is None:
        return form
    return Grammar.json_schema(COMPACT | schema)


def _forms(given: dict[str, Any], place: str) -> list[tuple[Grammar, str]]:
    """Grammars by vLLM's names. Raises: InvalidRequest."""
    found = []
    for name, value in given.items():
        field = f"{place}{name}"
        if name == "json":
            if not isinstance(value, dict | str):
                raise InvalidRequest(
                    f"{field}: must be a JSON schema, as an object or as text, got {shown(value)}",
                    param=field,
                )
            found.append((Grammar.json_schema(value), field))
        elif name == "regex":
            found.append((Grammar.regex(value), field))
        elif name == "choice":
            if not value:
                raise InvalidRequest(f"{field}: needs at least one text", param=field)
            found.append((Grammar.choice(value), field))
        elif name == "grammar":
            found.append((Grammar.ebnf(value), field))
        else:
            found.append((Grammar.json_object(), field))
    return found
