"""Calls of functions out of an answer's text, as it comes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quadriga.text.tool_formats import ToolFormat, is_bare_text

MAX_HELD_CHARS = 4096
"""Of what may be a call but has no name yet; longer, it is text."""
MAX_HEAD_CHARS = 256
"""Before the arguments of `NAME[CALL_ID]ID[ARGS]`; names have at most 64."""
TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    type(None): "null",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
}
ANY = frozenset(TYPES.values())
PYTHON = {"True": "true", "False": "false", "None": "null"}
BLANKS = " \n\r\t"
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
"""Models mix up the key of their own form with the other one."""
Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class CallNews:
    """What is new of one call.

    Attributes:
        index: Its place among the answer's calls.
        name: Of the function, with the call's first news; else None.
        arguments: More of its arguments, JSON as the model writes it.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class ToolNews:
    """What is new of an answer.

    Attributes:
        pieces: Texts and calls, in order.
        text, calls: All of each.
        max_calls: Later calls of the answer are left out.
    """

    pieces: list[str | CallNews] = field(default_factory=list)
    text: str = ""
    calls: list[CallNews] = field(default_factory=list)
    max_calls: float = math.inf

    def add(self, piece: str | CallNews) -> None:
        """What comes next."""
        if isinstance(piece, str):
            self.text += piece
        elif piece.index < self.max_calls:
            self.calls.append(piece)
        else:
            return
        self.pieces.append(piece)


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """What the answer of a request with tools is read by.

    Attributes:
        parameters: A JSON schema by the name of each tool.
        marks: Special tokens that have a text here, as they open or close calls.
        max_calls: See `ToolNews`.
    """

    form: ToolFormat
    parameters: Schemas
    marks: Mapping[int, str]
    max_calls: float = math.inf

    def parser(self) -> ToolParser:
        """For one answer."""
        return ToolParser(self.form, self.parameters, self.max_calls)


class ToolParser:
    """Splits one answer into text and calls; feed it text in pieces of any length.

    A call is shown from its name on, if that is the name of a tool; its arguments follow as they
    come. What only looks like a call is text in the end, and so are marks without one.

    Attributes:
        num_calls: Calls whose name was seen.
    """

    def __init__(self, form: ToolFormat, parameters: Schemas, max_calls: float = math.inf) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._form = form
        self._parameters = parameters
        self._opening = form.opening.strip()
        self._closing = form.closing.strip()
        self._skipped = ""  # before what is held: the mark and the blanks before a call, as written
        self._held = ""  # text that may be the beginning of a mark, or of a call
        self._inside = False  # behind an opening mark, or behind a call before the closing one
        self._call: _Call | None = None
        self._num_read = 0  # characters of what is held that the call has read
        self._said = False  # text, since the last call

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended within the arguments of a call that was shown."""
        call, is_left_out = self._call, self.num_calls > self._max_calls
        return call is not None and call.is_shown and call.is_cut and not is_left_out

    def push(self, text: str) -> ToolNews:
        """Take in more of the answer."""
        news = ToolNews(max_calls=self._max_calls)
        self._held += text
        while self._advance(news):
            pass
        return news

    def flush(self) -> ToolNews:
        """The answer is over: what was held back is text, unless it is the end of calls."""
        news = ToolNews(max_calls=self._max_calls)
        if self._call is not None:
            is_cut = self._call.is_shown
        else:
            end = self._closing if self._inside else ""
            is_behind = self.num_calls and not self._said and not self._skipped
            is_cut = bool(is_behind) and end.startswith(self._held.strip(BLANKS + ",;]"))
        if is_cut:
            self._held = ""
        self._say(news, len(self._held))
        return news

    def _advance(self, news: ToolNews) -> bool:
        """One step; returns whether another may follow at once."""
        if self._call is not None:
            return self._read_call(news)
        if self._inside:
            return self._between(news)
        return self._outside(news)

    def _outside(self, news: ToolNews) -> bool:
        """Look for the mark that opens calls; where there is none, for a brace before any text."""
        held = self._held
        if not self._opening:
            start = held.lstrip(BLANKS + ";")
            if not self._said and not start:
                return False
            if not self._said and start[0] == "{":
                self._inside = True
                return True
            self._say(news, len(held))
            return False
        at = held.find(self._opening)
        free = held[: at if at >= 0 else len(held) - _overlap(held, self._opening)]
        if free.strip() or self._said or not self.num_calls:
            self._say(news, len(free))
        if at >= 0:
            self._skip(self._held.index(self._opening) + len(self._opening))
            self._inside = True
        return at >= 0

    def _skip(self, count: int) -> None:
        """Go past the beginning of what is held; it is text if no call follows."""
        self._skipped += self._held[:count]
        self._held = self._held[count:]

    def _say(self, news: ToolNews, count: int) -> None:
        """What was skipped is text, and so are so many characters of what is held."""
        self._skip(count)
        if self._skipped:
            news.add(self._skipped)
        self._said = self._said or bool(self._skipped.strip())
        self._skipped = ""

    def _between(self, news: ToolNews) -> bool:
        """Behind the opening mark: the next call, or the closing mark."""
        start = self._held.lstrip(BLANKS + (",;" if self._form.style == "named" else "[,;"))
        if not start:
            return False
        reader = _READERS[self._form.style]
        if start.startswith(reader.opening):
            self._skip(len(self._held) - len(start))
            self._call = reader(self._parameters)
            return True
        if reader.opening.startswith(start):
            return False
        if not self._skipped:  # behind a call
            rest = start.lstrip(BLANKS + "]") if self._closing else start
            closing = self._closing or "]"
            if rest.startswith(closing):
                self._held, self._inside = rest[len(closing) :], False
                return True
            if closing.startswith(rest):
                return False
        # No call after all: the mark was text, and this is as what stands outside.
        self._say(news, 0)
        self._inside = False
        return True

    def _read_call(self, news: ToolNews) -> bool:
        call = self._call
        assert call is not None
        most = None if call.is_known else MAX_HELD_CHARS
        self._num_read += call.read(self._held[self._num_read : most])
        if not call.is_known:
            if not (call.is_over or call.is_wrong or len(self._held) >= MAX_HELD_CHARS):
                return False
            self._say(news, self._num_read)  # no call
            self._call, self._inside, self._num_read = None, False, 0
            return True
        more = call.take()
        if not call.is_shown:
            news.add(CallNews(self.num_calls, call.name, more))
            self.num_calls += 1
            call.is_shown, self._skipped, self._said = True, "", False
        elif more:
            news.add(CallNews(self.num_calls - 1, None, more))
        self._held, self._num_read = self._held[self._num_read :], 0
        if call.is_over or call.is_wrong:
            self._call = None
            self._inside = bool(self._closing) or self._form.is_list
            return True
        return most is not None  # there may be more than was read


class _Call:
    """Reads `{"name": …, "arguments": …}` character by character, its fields in any order.

    The first of `ARGUMENT_KEYS` has the arguments, whichever the model's own form says.
    """

    opening = "{"

    def __init__(self, parameters: Schemas) -> None:
        self._parameters = parameters
        self.name: str | None = None
        self.has_arguments = self.in_arguments = False
        self.is_over = self.is_wrong = self.is_shown = False
        self.is_known = False  # it calls a tool: its name stands, and arguments begin or it is over
        self._depth = 0
        self._in_text = self._escaped = False
        self._next = ""  # behind the arguments: characters that may follow; empty: all may
        self._key: str | None = None
        self._value: list[str] = []
        self._news: list[str] = []  # of the arguments

    @property
    def is_cut(self) -> bool:
        """Whether its arguments are not whole yet."""
        return not self.has_arguments or (self.in_arguments and not self._next)

    def take(self) -> str:
        """The arguments that were not taken yet, but for blanks that may stand behind them."""
        written = "".join(self._news)
        news = written.rstrip()
        self._news = [written[len(news) :]]
        return news

    def _know(self) -> None:
        self.is_known = self.is_known or self.name in self._parameters

    def read(self, text: str) -> int:
        """Read on; returns how many characters were of the call."""
        for at, char in enumerate(text):
            if self._next and char not in self._next + BLANKS:  # its own last brace is missing
                self.is_over = True
                self._know()
                return at
            self._step(char)
            if self.is_over or self.is_wrong:
                return at + 1
        return len(text)

    def _step(self, char: str) -> None:
        if self._in_text:
            self._note(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_text = False
            return
        if self._depth == 1 and char in ":,}":
            if char == ":":
                self._key, self._value = _text("".join(self._value)), []
                self.in_arguments = self._key in ARGUMENT_KEYS and not self.has_arguments
                self.is_wrong = self._key is None
                if self.in_arguments:
                    self._know()
                return
            self._end_value()
            self._next = '"}' if self.has_arguments else ""
            if char == "}":
                self._depth, self.is_over = 0, True
                self._news.extend("" if self.has_arguments else "{}")
                self._know()
            return
        if self._depth == 1 and char in BLANKS and not self._value:
            return
        if char in "{[":
            self._depth += 1
            if self._depth == 1:
                return
        elif char in "}]":
            self._depth -= 1
            self._next = ",}" if self._depth == 1 and self.in_arguments else ""
        elif char == '"':
            self._in_text, self._next = True, ""
        self._note(char)

    def _note(self, char: str) -> None:
        self._value.append(char)
        if self.in_arguments:
            self._news.append(char)
            self.has_arguments |= not char.isspace()

    def _end_value(self) -> None:
        if self._key == "name" and not self.is_known:
            self.name = _text("".join(self._value))
            self.is_wrong = self.name is None
        if self.in_arguments:
            self._news = ["".join(self._news).rstrip()]
        self.in_arguments, self._key, self._value = False, None, []


class _NamedCall(_Call):
    """Reads `NAME[ARGS]{…}`, as the call that it says; an id may stand before `[ARGS]`."""

    opening = ""

    def __init__(self, parameters: Schemas) -> None:
        super().__init__(parameters)
        self._head = ""

    def read(self, text: str) -> int:
        for at, char in enumerate(text):
            if not self._depth:
                self._head += char
                head = re.fullmatch(r"([\w.-]+)\s*(\[CALL_ID\]\w*)?\[ARGS\]\s*\{", self._head)
                if head:
                    name = json.dumps(head[1])
                    super().read(f'{{"name": {name}, "arguments": {{')
                elif len(self._head) > MAX_HEAD_CHARS or not re.fullmatch(
                    r"[\w.-]+\s*(\[[A-Z_]*\]?\w*\s*){0,2}", self._head
                ):
                    self.is_wrong = True
            else:
                self._step(char)
                if self._depth == 1 and char == "}":
                    self._step(char)
            if self.is_over or self.is_wrong:
                return at + 1
        return len(text)


class _TagCall(_Call):
    """Reads `<function=NAME><parameter=KEY>…</parameter></function>`, an argument at its end."""

    opening = "<function="
    is_cut = True

    def read(self, text: str) -> int:
        left = text
        while not self.is_over and not self.is_wrong:
            rest = self._advance(left)
            if len(rest) == len(left):
                break
            left = rest
        if self.is_over or (self.is_wrong and self.is_known):
            self._news.append("}" if self.has_arguments else "{}")
        return len(text) - len(left)

    def _advance(self, text: str) -> str:
        """Read the next tag, if all of it is there; returns what is left."""
        if self.name is None:
            name, end, rest = text.removeprefix(self.opening).partition(">")
            if end:
                self.name = name
            return rest if end else text
        tag = text.lstrip()
        if tag.startswith("</function>"):
            self.is_over = True
            self._know()
            return tag.removeprefix("</function>")
        if not tag.startswith("<parameter="):
            self.is_wrong = not any(t.startswith(tag) for t in ("</function>", "<parameter="))
            return text
        self._know()
        if empty := re.match(r"<parameter=[^<>]*>\s*(?=</tool_call>)", tag):
            self.is_wrong = True
            return tag[empty.end() :]
        written, end, rest = tag.removeprefix("<parameter=").partition("</parameter>")
        if end:
            key, _, value = written.partition(">")
            value = value.removeprefix("\n").removesuffix("\n")
            self._news.append(", " if self.has_arguments else "{")
            self._news.append(f"{json.dumps(key, ensure_ascii=False)}: {self._json(key, value)}")
            self.has_arguments = True
        return rest if end else text

    def _json(self, key: str, value: str) -> str:
        """An argument in JSON: as it is written where that is JSON and may be, else as a text."""
        properties = self._parameters.get(self.name or "", {}).get("properties") or {}
        schema = properties.get(key)
        if not is_bare_text(schema):
            types = _types(schema)
            said = value if types == ANY else PYTHON.get(value, value)
            kind = _json_type(said)
            if kind == "string" or (kind and (kind in types or "string" not in types)):
                return said
        return json.dumps(value, ensure_ascii=False)


_READERS: dict[str, type[_Call]] = {"object": _Call, "named": _NamedCall, "tags": _TagCall}


def _text(written: str) -> str | None:
    """A JSON text; None if it is none."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _json_type(written: str) -> str | None:
    """Of what is written; None if it is no JSON."""
    try:
        return TYPES[type(json.loads(written, parse_constant=_refuse_constant))]
    except (ValueError, RecursionError):
        return None


def _types(schema: Any, depth: int = 8) -> frozenset[str]:
    """What a schema allows: as far as it says so at its top, else anything."""
    if not isinstance(schema, Mapping) or not depth:
        return ANY
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    parts, named = schema.get("anyOf") or schema.get("oneOf"), schema.get("type")
    if isinstance(values, list):
        return frozenset(TYPES.get(type(value), "string") for value in values)
    if isinstance(named, str | list):
        found = frozenset([named] if isinstance(named, str) else map(str, named))
        return found | {"integer"} if "number" in found else found
    if isinstance(parts, list):
        return frozenset[str]().union(*(_types(part, depth - 1) for part in parts))
    return ANY


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text that may begin a mark."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0
