"""The fields that say which form an answer must have, and what is refused of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quadriga.client.wire import make_request
from quadriga.core.grammar import Grammar
from quadriga.errors import Overloaded
from serve_app.grpc.messages import generation_fields
from serve_app.openai import grammar_checker
from serve_app.openai.grammar_checker import GrammarChecker
from serve_app.openai.grammars import read_grammar
from serve_app.openai.models import ModelDirectory
from serve_app.openai.schema import CompletionBody, StructuredOutputs
from serve_app.openai.tools import NO_TOOLS
from tests.unit.serve_app.conftest import MODEL, Stand
from tests.waiting import settled

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


WITH_BLANKS = Grammar("json_schema", TEXT)
COMPACT = Grammar("json_schema", f'{{"x-guidance": {{"whitespace_pattern": ""}}, {TEXT[1:]}')


WAYS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": NAMED}, Grammar("json_schema", TEXT)),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"response_format": {"type": "text"}}, None),
    ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
    ({"guided_json": TEXT}, Grammar("json_schema", TEXT)),
    ({"guided_regex": "[ab]+"}, Grammar.regex("[ab]+")),
    ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
    ({"guided_grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, WITH_BLANKS),
    ({"structured_outputs": {"regex": "a"}}, Grammar.regex("a")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar.ebnf('start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": TEXT, "disable_any_whitespace": True}}, COMPACT),
    ({"structured_outputs": {"json": TEXT, "disable_any_whitespace": False}}, WITH_BLANKS),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, Grammar.regex("a")),
    ({"guided_json": None, "response_format": None}, None),
]


async def test_every_way_to_say_it(stand: Stand) -> None:
    for (route, body), (fields, grammar) in itertools.product(ROUTES.items(), WAYS):
        reply = await stand.http.post(route, json=body | fields)
        assert reply.status_code == 200, reply.text
        assert "x-quadriga-ignored" not in reply.headers
        assert stand.cluster.submitted[-1].sampling.grammar == grammar


DEEP = '{"items":' * 3000 + "{}" + "}" * 3000
LENIENT = {"uniqueItems": True, "x-guidance": {"lenient": True}}
HOSTILE = {"allOf": [{"type": "string", "pattern": f".*a{{{i}}}.*"} for i in range(1, 20)]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": NAMED | {"type": "json_object"}}, "response_format.json_schema"),
    ({"response_format": NAMED | {"type": "text"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": "nothing"}}, "guided_json"),
    ({"guided_json": DEEP}, "guided_json"),
    ({"guided_json": LENIENT}, "guided_json"),
    ({"guided_json": json.dumps(LENIENT)}, "guided_json"),
    (
        {"structured_outputs": {"json": LENIENT, "disable_any_whitespace": True}},
        "structured_outputs.json",
    ),
    ({"guided_json": {"$ref": "http://example.com/schema"}}, "guided_json"),
    ({"guided_json": {"enum": ["a" * 200_000]}}, "guided_json"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_regex": "(a{1000}){1000}"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a"] * 5000}, "guided_choice"),
    ({"guided_grammar": "start: nobody"}, "guided_grammar"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


async def test_what_is_refused(stand: Stand) -> None:
    for (route, body), (fields, param) in itertools.product(ROUTES.items(), REFUSED):
        reply = await stand.http.post(route, json=body | fields)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")
    assert not stand.cluster.submitted


def test_grpc_says_every_form_as_http_does() -> None:
    for form in ({"json": TEXT}, {"regex": "a"}, {"choice": ["a"]}, {"json_object": True}):
        for blanks in ({}, {"disable_any_whitespace": True}):
            message = make_request("a", None, None, {"structured_outputs": form | blanks})
            found = CompletionBody(**generation_fields(message))
            asked = CompletionBody(
                prompt="a", structured_outputs=StructuredOutputs(**form, **blanks)
            )
            assert read_grammar(found, NO_TOOLS) == read_grammar(asked, NO_TOOLS) is not None


async def test_a_grammar_that_never_ends_compiling_costs_its_process_alone(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "COMPILE_LIMIT_S", 0.5)
    stand.engine.models._checkers.clear()
    route, body = "/v1/completions", ROUTES["/v1/completions"]
    began_s = time.monotonic()
    for _ in range(2):  # the second time from memory
        reply = await stand.http.post(route, json=body | {"guided_json": HOSTILE})
        assert reply.status_code == 400
        assert "to compile" in reply.json()["error"]["message"]
    checker: Any = stand.engine.models._checkers["quadriga-s"]
    assert checker._process is None
    assert time.monotonic() - began_s < 60
    reply = await stand.http.post(route, json=body | {"guided_json": SCHEMA})
    assert reply.status_code == 200
    process = checker._process
    await stand.engine.close()
    assert process.poll() is not None, "it ends with the ingress"


async def test_a_form_is_not_blamed_for_a_process_that_ended_before_it() -> None:
    checker = GrammarChecker(MODEL.checkpoint, MODEL.tokenizer)
    try:
        await checker.check(Grammar.regex("a"), "guided_regex", "a")
        process = checker._process
        assert process is not None
        process.kill()
        process.wait()
        await checker.check(Grammar.regex("b"), "guided_regex", "a")
    finally:
        checker.close()


class Slow(GrammarChecker):
    """A checker whose process takes as long as the test says.

    Attributes:
        tried: Grammars, in the order in which they came to it.
    """

    def __init__(self) -> None:
        super().__init__(MODEL.checkpoint, MODEL.tokenizer)
        self.tried: list[str] = []
        self.may_end = threading.Semaphore(0)

    def _ask(self, grammar: Grammar) -> str | None:
        self.may_end.acquire()
        self.tried.append(grammar.text)
        return ""

    def begin(self, caller: str, text: str) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.check(Grammar.regex(text), "guided_regex", caller))


@pytest.fixture
def slow() -> Iterator[Slow]:
    checker = Slow()
    yield checker
    checker.may_end.release(1000)
    checker.close()


async def test_callers_with_new_grammars_take_turns(slow: Slow) -> None:
    tasks = [slow.begin("a", f"a{i}") for i in range(5)]
    await settled()
    tasks += [slow.begin("b", "b0"), slow.begin("c", "c0"), slow.begin("b", "b1")]
    tasks.append(slow.begin("c", "a3"))  # of which another's is tried before
    await settled()
    slow.may_end.release(len(tasks))
    await asyncio.gather(*tasks)
    assert slow.tried == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"]
    await settled()
    assert not slow._waiting and not slow._is_busy


async def test_no_more_of_a_caller_wait_than_there_is_room_for(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 2)
    tasks = [slow.begin("a", f"a{i}") for i in range(3)]
    await settled()
    with pytest.raises(Overloaded, match="2 other grammars of yours"):
        await slow.begin("a", "a3")
    tasks.append(slow.begin("b", "b"))
    slow.may_end.release(4)
    await asyncio.gather(*tasks)


async def test_who_waits_too_long_is_refused_and_who_leaves_keeps_nobody(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, gone = slow.begin("a", "a"), slow.begin("b", "b")
    await settled()
    monkeypatch.setattr(grammar_checker, "WAIT_LIMIT_S", 0.01)
    with pytest.raises(Overloaded, match="waited"):
        await slow.begin("c", "c")
    monkeypatch.undo()
    gone.cancel()
    first.cancel()  # the process is busy with it all the same
    last = slow.begin("d", "d")
    await settled()
    assert not last.done() and not slow.tried
    slow.may_end.release(2)
    await last
    await settled()
    assert slow.tried == ["a", "d"] and not slow._is_busy


async def test_a_caller_is_the_name_of_a_key(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = []

    async def check(self: GrammarChecker, grammar: Grammar, field: str, caller: str) -> None:
        callers.append(caller)
        raise Overloaded("16 other grammars", retry_after_s=1.0)

    monkeypatch.setattr(GrammarChecker, "check", check)
    for path, body in ROUTES.items():
        reply = await stand.http.post(path, json=body | {"guided_regex": "[a-f]{7}"})
        assert reply.status_code == 429
        assert "retry-after" in reply.headers
    assert callers == ["anonymous"] * len(ROUTES)


async def test_a_deadline_holds_while_a_form_waits_to_be_compiled(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ModelDirectory, "check_grammar", check)
    body = ROUTES["/v1/completions"] | {"guided_regex": "a", "deadline_ms": 20}
    reply = await stand.http.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
