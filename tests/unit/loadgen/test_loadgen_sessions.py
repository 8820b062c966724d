"""Conversations: what is sent, when, how it fits the context, and what ends one early."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from loadgen.checker import Outcome
from loadgen.checker.judge import Judgement
from loadgen.load.arrivals import parse_arrivals
from loadgen.load.dialogues import Dialogues
from loadgen.load.scenario import Load
from loadgen.load.sessions import Conversation, SessionShape, Turn, WholeRange, make_sessions
from loadgen.load.workload import RequestSpec, forms
from loadgen.runner import Live, LoadOptions, RunResult, run_load
from loadgen.target import Target
from loadgen.wire.client_grpc import encode_request
from loadgen.wire.client_http import HttpClient
from quadriga.errors import ConfigError
from tests.fake_service.generation import FakeOptions
from tests.fake_service.model import END_ID, tokenize
from tests.fake_service.server import MODEL, FakeServer
from tests.unit.loadgen.conftest import Service, run_command

TEMPLATE = RequestSpec(index=0, arrival_s=0.0, prompt="", max_tokens=1, seed=0)


def tokens_session(num_turns: int, *, said: int = 5, answer: int = 7, think_s: float = 0.0) -> Any:
    turns = [
        Turn([300 + turn] * said, answer, think_s if turn else 0.0) for turn in range(num_turns)
    ]
    return Conversation(0.0, tuple(turns), ignore_eos=True)


def chat_session(*texts: str, answer: int = 7, system: str | None = None) -> Conversation:
    turns = tuple(Turn(text, answer, 0.0) for text in texts)
    return Conversation(0.0, turns, system, ignore_eos=True)


def talk(
    sessions: list[Conversation],
    *,
    context: int | None = 4096,
    options: LoadOptions | None = None,
    **fake: Any,
) -> tuple[RunResult, list[Any], Dialogues]:
    """Run conversations; returns the result, the bodies sent and the dialogues."""

    async def run() -> tuple[RunResult, list[Any], Dialogues]:
        async with FakeServer(FakeOptions(**fake)) as server:
            http = HttpClient(server.url, timeout_s=20.0)
            target = Target(MODEL, context)
            dialogues = Dialogues(sessions, TEMPLATE, target, http)
            load = Load(await dialogues.openings(), dialogues)
            how = options or LoadOptions(concurrency=len(sessions))
            result = await run_load(
                load.specs, http, MODEL, Judgement(target), how, Live(), follow=load.follow
            )
            return result, server.bodies, dialogues

    return asyncio.run(run())


def test_a_turn_holds_all_that_was_said_before() -> None:
    result, bodies, dialogues = talk([tokens_session(3)])
    assert [record.verdict.outcome for record in result.records] == [Outcome.OK] * 3
    told: list[int] = []
    for turn, (record, body) in enumerate(zip(result.records, bodies, strict=True)):
        told += [300 + turn] * 5
        assert body["prompt"] == told
        assert record.spec.prompt_tokens == record.verdict.prompt_tokens == len(told)
        told += record.verdict.choices[0].token_ids
    assert [record.spec.turn for record in result.records] == [0, 1, 2]
    assert dialogues.unsent == {}


def test_chat_holds_the_answers_as_messages() -> None:
    result, bodies, _ = talk([chat_session("one", "two", "three", system="Be brief.")])
    texts = [record.verdict.choices[0].text for record in result.records]
    assert bodies[2]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": texts[0]},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": texts[1]},
        {"role": "user", "content": "three"},
    ]
    # The fake's /tokenize and its usage agree, and the checker has compared them.
    assert all(r.spec.prompt_tokens == r.verdict.prompt_tokens for r in result.records)
    assert all(record.verdict.outcome is Outcome.OK for record in result.records)


def test_wrong_prompt_tokens_of_a_chat_are_noticed() -> None:
    result, _, _ = talk([chat_session("one")], fault="wrong_prompt_tokens")
    assert "prompt_tokens" in str(result.records[0].verdict.faults[0])


def test_history_travels_over_grpc() -> None:
    spec = replace(
        TEMPLATE, endpoint="chat", prompt="b", history=(("user", "a"), ("assistant", "x"))
    )
    request = encode_request(spec, "m")
    found = [(message.role, message.content) for message in request.chat.messages]
    assert found == [("user", "a"), ("assistant", "x"), ("user", "b")]


def test_the_next_turn_waits_for_the_answer_and_the_thinking() -> None:
    result, _, _ = talk([tokens_session(3, think_s=0.08)], step_s=0.002)
    for before, after in itertools.pairwise(result.records):
        assert after.scheduled_s >= before.ended_s + 0.08
        assert after.sent_s >= after.scheduled_s
        assert after.lag_s < 5.0


def test_a_closed_loop_has_so_many_conversations_at_a_time() -> None:
    sessions = [tokens_session(3) for _ in range(4)]
    result, _, _ = talk(sessions, options=LoadOptions(concurrency=1))
    spans = [
        (min(r.sent_s for r in of), max(r.ended_s for r in of))
        for session in range(4)
        if (of := [r for r in result.records if r.spec.session == session])
    ]
    assert len(spans) == 4
    for before, after in itertools.pairwise(sorted(spans)):
        assert before[1] <= after[0]


@pytest.mark.parametrize("is_chat", [False, True])
def test_old_turns_are_left_out_to_fit_the_context(is_chat: bool) -> None:
    session = tokens_session(6, said=10, answer=12)
    if is_chat:
        session = chat_session(*("x" * 10 for _ in range(6)), answer=12, system="S")
    result, bodies, dialogues = talk([session], context=60)
    assert dialogues.unsent == {}
    sizes = [record.spec.prompt_tokens for record in result.records]
    assert all(size is not None and size + 12 <= 60 for size in sizes)
    dropped = [record.spec.dropped_turns for record in result.records]
    assert dropped[0] == 0 and dropped[-1] > 0 and dropped == sorted(dropped)
    # No more is left out than must be: the turn that was dropped last would not have fitted.
    assert max(size for size in sizes if size is not None) + 12 > 60 - 22 - 2 * is_chat
    if is_chat:
        assert all(body["messages"][0]["role"] == "system" for body in bodies)


def test_a_turn_that_cannot_fit_is_named_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match="exceed the context of 10 even alone"):
        talk([tokens_session(1)], context=10)


def test_a_later_turn_that_cannot_fit_ends_its_conversation() -> None:
    turns = tuple(Turn([300] * size, 5, 0.0) for size in (5, 90, 5))
    sessions = [Conversation(0.0, turns, ignore_eos=True)] * 2
    result, _, dialogues = talk(sessions, context=60)
    assert [record.spec.turn for record in result.records] == [0, 0]
    assert dialogues.unsent == {"a turn and its answer exceed the context even alone": 4}


def test_a_conversation_without_an_answer_is_broken_off() -> None:
    result, _, dialogues = talk([tokens_session(4), tokens_session(4)], fault="no_done")
    assert len(result.records) == 2
    assert dialogues.unsent == {"a request before failed": 6}
    result, _, dialogues = talk([tokens_session(4)], refuse_first=1)
    assert [record.verdict.outcome for record in result.records] == [Outcome.REFUSED]
    assert dialogues.unsent == {"a request before was refused": 3}


def test_a_refusal_that_is_honoured_breaks_nothing_off() -> None:
    options = LoadOptions(concurrency=1, honour_refusals=1)
    result, _, dialogues = talk([tokens_session(2)], options=options, refuse_first=1)
    assert [record.attempts for record in result.records] == [2, 1]
    assert dialogues.unsent == {}


def test_the_end_token_is_no_part_of_what_was_said() -> None:
    session = tokens_session(2, answer=50)
    session = replace(session, ignore_eos=False)
    _, bodies, _ = talk([session], answer=lambda prompt: "fine")
    assert END_ID not in bodies[1]["prompt"]
    assert bodies[1]["prompt"] == [300] * 5 + tokenize("fine") + [301] * 5


def test_made_up_conversations_follow_the_seed_and_the_ranges() -> None:
    shape = SessionShape(WholeRange(2, 4), WholeRange(3, 9), WholeRange(5, 6), 0.5)

    def make(
        seed: int, endpoint: str = "both", ids: Sequence[int] = range(300, 400)
    ) -> list[Conversation]:
        return make_sessions(
            40,
            parse_arrivals("poisson:10"),
            shape,
            forms=forms(endpoint, "both"),
            token_ids=ids,
            words=["red", "blue"],
            seed=seed,
        )

    first = make(1)
    assert first == make(1) != make(2)
    assert {len(session.turns) for session in first} == {2, 3, 4}
    assert {session.is_chat for session in first} == {True, False}
    assert {session.stream for session in first} == {True, False}
    for session in first:
        assert session.turns[0].think_s == 0.0
        assert all(turn.think_s > 0 for turn in session.turns[1:])
        for turn in session.turns:
            length = len(turn.content.split() if isinstance(turn.content, str) else turn.content)
            assert 3 <= length <= 9 and 5 <= turn.max_tokens <= 6
    assert {session.is_chat for session in make(1, "chat", ids=[])} == {True}, "it draws words"
    ids = [7, 8]
    with patch.object(np, "asarray", wraps=np.asarray) as read:
        assert {session.is_chat for session in make(1, "completions", ids)} == {False}
    assert sum(call.args[0] is ids for call in read.call_args_list) == 1, "not for every turn"
    times = [session.arrival_s for session in first]
    assert times == sorted(times) and times[0] == 0.0 < times[-1]


def test_sessions_can_be_used_again_as_others() -> None:
    async def run() -> tuple[Load, RunResult]:
        async with FakeServer() as server:
            http = HttpClient(server.url, timeout_s=20.0)
            target = Target(MODEL, 4096)
            sessions = [tokens_session(2), tokens_session(3)]
            dialogues = Dialogues(sessions, TEMPLATE, target, http)
            load = Load(await dialogues.openings(), dialogues)
            specs = list(itertools.islice(load.cycled(), 5))
            options = LoadOptions(concurrency=2)
            judgement = Judgement(target)
            return load, await run_load(
                specs, http, MODEL, judgement, options, Live(), follow=load.follow
            )

    load, result = asyncio.run(run())
    assert load.num_requests == 5
    assert [record.spec.index for record in result.records] == list(range(12))
    assert [r.spec.session for r in result.records] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4]
    # A conversation finds its own turns in the cache, and nobody those of the time before.
    salts = [record.spec.extra.get("cache_salt") for record in result.records]
    assert salts == [salts[0]] * 5 + [salts[5]] * 5 + [salts[10]] * 2 and len(set(salts)) == 3
    assert all(record.verdict.outcome is Outcome.OK for record in result.records)


def test_the_fingerprint_tells_loads_apart() -> None:
    def of(*sessions: Conversation) -> str:
        async def run() -> Load:
            async with FakeServer() as server:
                http = HttpClient(server.url, timeout_s=20.0)
                dialogues = Dialogues(sessions, TEMPLATE, Target(MODEL, 4096), http)
                return Load(await dialogues.openings(), dialogues)

        return asyncio.run(run()).fingerprint()

    # The second differs in its third turn only, which no first request shows.
    assert of(tokens_session(2)) == of(tokens_session(2)) != of(tokens_session(3))
    assert of(tokens_session(2)) != of(tokens_session(2, think_s=1.0))


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_the_command_drives_conversations(
    transport: str, service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sessions", "4", "--turns", "3", "--transport", transport, "--endpoint", "both"]
    words += ["--think-s", "0.01"]
    status, (head, *requests, summary) = run_command("run", service(), tmp_path, *words)
    assert status == 0
    assert [fault for request in requests for fault in request["faults"]] == []
    assert head["scenario"] == "4 sessions" and len(head["load_sha256"]) == 64
    turns = list(itertools.product(range(4), range(3)))
    assert [(r["session"], r["turn"]) for r in requests] == turns
    for session in range(4):
        sizes = [r["prompt_tokens"] for r in requests if r["session"] == session]
        assert sizes == sorted(sizes) and sizes[0] < sizes[1] < sizes[2]
    assert {r["endpoint"] for r in requests} == {"completions", "chat"}
    assert summary["sessions"] == 4 and summary["unsent"] == {}
    found = [(turn["first"], turn["requests"]) for turn in summary["turns"]]
    assert found == [(0, 4), (1, 4), (2, 4)]
    assert "turns of 4 conversations" in capsys.readouterr().out


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_the_command_drives_recorded_conversations(
    transport: str, service: Service, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [
        [("system", "Be kind."), ("user", "hello"), ("assistant", "recorded"), ("user", "bye")],
        [("user", "one"), ("user", "two"), ("user", "three")],
    ]
    path.write_text(
        "\n".join(
            json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) for row in rows
        )
    )
    words = ["--sessions", str(path), "--max-tokens", "9", "--transport", transport]
    words += ["--think-s", "0.01"]
    status, (_, *requests, _) = run_command("run", service(), tmp_path, *words)
    assert status == 0
    turns = [(r["session"], r["turn"]) for r in requests]
    assert turns == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert {r["endpoint"] for r in requests} == {"chat"}
    # The service's answer of 9 tokens stands where the recorded one was.
    first, second = requests[0], requests[1]
    assert second["prompt_tokens"] > first["prompt_tokens"] + len(tokenize("\nbye"))
    assert second["prompt_tokens"] != first["prompt_tokens"] + len(tokenize("\nrecorded\nbye"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[]", "must be a JSON object"),
        ("{}", "messages must be a list"),
        ('{"messages": []}', "0 messages of role user"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "0 messages of role user"),
        ('{"messages": [{"role": "user", "content": ""}]}', "messages.0: content must be text"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "messages.0: role must be"),
        ('{"messages": ["hello"]}', "messages.0: content must be text"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
            "messages.1: role must be",
        ),
        ("[" * 100_000, "not JSON"),
        ("", "no rows in it"),
    ],
)
def test_bad_conversations_are_named(
    row: str, message: str, service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(row)
    assert run_command("run", service(), tmp_path, "--sessions", str(path))[0] == 2
    assert message in capsys.readouterr().err


def test_conversations_longer_than_the_context_are_named(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sessions", "2", "--turn-tokens", "90", "--answer-tokens", "20"]
    assert run_command("run", service(max_model_len=100), tmp_path, *words)[0] == 2
    assert "exceed the context of 100 even alone; lower --turn-tokens" in capsys.readouterr().err
