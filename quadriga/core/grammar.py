"""What an answer must look like, as a request says it and as it travels."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quadriga.errors import InvalidRequest

WHITESPACE = r" |\n {0,32}"
"""Between two parts of a JSON text: bounded, as small models may else write nothing but blanks."""

MAX_GRAMMAR_BYTES = 128 << 10
"""Of its text, and of the schemas of all tools together."""

ESCAPES = 'nrbtf"\\'
"""Behind a backslash in JSON; and `u` where a schema has control characters, which need it."""
_CONTROL = re.compile(r"\\u00(?:[01]|7[fF])|\\x(?:[01]|7[fF])|\x7f")

OPTIONS = "x-guidance"
"""In a schema: how the parser reads it."""
COMPACT = {OPTIONS: {"whitespace_pattern": ""}}
"""Of a schema: no blank may stand between two parts of the JSON."""

GrammarKind = Literal["json_schema", "regex", "lark", "ebnf"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Grammar:
    """The form of an answer: a language that its text must be in, in the words of its author.

    Equal grammars are compiled once in each process; see `quadriga.text.grammar`.

    Attributes:
        kind: `json_schema`, `regex` (Rust's syntax, the whole answer must match), `lark` (with
            llguidance's extensions), or `ebnf`, where GBNF is recognised and turned into Lark.
        text: The schema as JSON, the expression, or the rules.
    """

    kind: GrammarKind
    text: str

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str) -> Grammar:
        """JSON that a schema allows; given as a dictionary or as JSON text."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that an expression matches from its beginning to its end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of some texts. Raises: InvalidRequest: They are no list of texts, or none."""
        if isinstance(texts, str) or not texts or not all(isinstance(t, str) for t in texts):
            raise InvalidRequest(
                f"choice: {texts!r:.80} must be a list of at least one text", param="grammar"
            )
        return cls("lark", f"start: {' | '.join(map(quoted, texts))}")

    @classmethod
    def ebnf(cls, rules: str) -> Grammar:
        """Text that a context-free grammar derives, in Lark's syntax or as GBNF."""
        return cls("ebnf", rules)


def json_options(schema: str) -> dict[str, str]:
    r"""How JSON that a schema (given as JSON) allows is written.

    Without `\u`, by which a name that is not listed could be one that is (`\u0061` is `a`), or
    no character at all.
    """
    escapes = ESCAPES + ("u" if _CONTROL.search(schema) else "")
    return {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": escapes}


def check_options(schema: object, field: str = "") -> None:
    """Raises: InvalidRequest: A schema has options by which it would allow what it does not say."""
    if isinstance(schema, Mapping) and schema.get(OPTIONS, COMPACT[OPTIONS]) != COMPACT[OPTIONS]:
        raise InvalidRequest(
            f"{field and field + ': '}schemas may not hold {OPTIONS}, by which answers would not "
            f"fit the schema; leave it out, or say {json.dumps(COMPACT[OPTIONS])}: no blanks",
            param=field or None,
            code="invalid_grammar",
        )


def quoted(text: str) -> str:
    """A text as Lark writes it: as JSON, in which no control character may stand as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
