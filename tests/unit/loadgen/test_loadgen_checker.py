"""Every rule of the strict checker is shown to fire, and none fires on a good response."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from loadgen.checker import FaultKind, Outcome
from loadgen.checker.fields import load_object, read_usage
from loadgen.checker.verdict import Verdict
from loadgen.target import Target
from loadgen.wire.capture import Capture, Transport
from tests.fake_service.faults import FAULTS
from tests.fake_service.server import MODEL
from tests.unit.loadgen.conftest import Exchange, make_spec


def test_json_that_is_nested_too_deeply_is_none() -> None:
    assert load_object(b"[" * 100_000, "body", verdict := Verdict()) is None
    assert [fault.kind for fault in verdict.faults] == [FaultKind.JSON]


CHAT = {"endpoint": "chat", "prompt": "say it"}

# What the first fault must be; the service did one thing wrong.
EXPECTED: dict[str, FaultKind] = {
    "no_done": FaultKind.DONE,
    "done_twice": FaultKind.DONE,
    "frame_after_done": FaultKind.DONE,
    "gap": FaultKind.GAP,
    "duplicate": FaultKind.DUPLICATE,
    "wrong_usage": FaultKind.USAGE,
    "usage_does_not_add_up": FaultKind.USAGE,
    "no_usage": FaultKind.USAGE,
    "usage_before_finish": FaultKind.ORDER,
    "uncounted": FaultKind.UNCOUNTED,
    "error_frame": FaultKind.ERROR_FRAME,
    "frame_after_error": FaultKind.ERROR_FRAME,
    "half_character": FaultKind.UTF8,
    "lone_surrogate": FaultKind.UTF8,
    "early_close": FaultKind.FRAMING,
    "clean_early_close": FaultKind.DONE,
    "hang": FaultKind.TIMEOUT,
    "bad_json": FaultKind.JSON,
    "not_an_object": FaultKind.JSON,
    "nan": FaultKind.JSON,
    "comment_frame": FaultKind.FRAMING,
    "crlf_frame": FaultKind.FRAMING,
    "two_line_frame": FaultKind.FRAMING,
    "no_space": FaultKind.FRAMING,
    "unfinished_frame": FaultKind.FRAMING,
    "wrong_object": FaultKind.OBJECT,
    "id_changes": FaultKind.IDENTITY,
    "model_changes": FaultKind.IDENTITY,
    "empty_id": FaultKind.IDENTITY,
    "choice_out_of_range": FaultKind.CHOICE,
    "choice_is_bool": FaultKind.CHOICE,
    "choices_missing": FaultKind.CHOICE,
    "text_missing": FaultKind.OBJECT,
    "bad_token_ids": FaultKind.OBJECT,
    "text_after_finish": FaultKind.DUPLICATE,
    "second_finish": FaultKind.DUPLICATE,
    "no_finish": FaultKind.ORDER,
    "unknown_finish": FaultKind.FINISH_REASON,
    "stop_despite_ignore_eos": FaultKind.FINISH_REASON,
    "status_500": FaultKind.STATUS,
    "plain_500": FaultKind.JSON,
    "wrong_content_type": FaultKind.HEADERS,
    "wrong_request_id": FaultKind.HEADERS,
    "one_token_less": FaultKind.LENGTH,
    "one_token_more": FaultKind.LENGTH,
    "wrong_prompt_tokens": FaultKind.USAGE,
    "other_model": FaultKind.IDENTITY,
    "reset": FaultKind.CONNECTION,
    "truncated_body": FaultKind.FRAMING,
    "refuse_without_retry_after": FaultKind.ERROR_FORMAT,
}
# Judged elsewhere: a refusal is no fault, a text is compared after the run, a role is chat's.
ELSEWHERE = {"refuse", "wrong_text", "role_only_first"}


def test_every_fault_of_the_fake_is_judged() -> None:
    assert set(EXPECTED) | ELSEWHERE == set(FAULTS)


@pytest.mark.parametrize("fault", sorted(EXPECTED))
def test_fault_fails_the_request(fault: str, exchange: Exchange) -> None:
    timeout_s = 0.2 if fault == "hang" else 20.0
    verdict = exchange(make_spec(), timeout_s=timeout_s, fault=fault)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.faults[0].kind is EXPECTED[fault], verdict.faults


def test_what_comes_too_late_fails(exchange: Exchange) -> None:
    for fault, text in {"text_after_finish": ": more for", "second_finish": ": a second"}.items():
        verdict = exchange(make_spec(), fault=fault)
        kinds = {one.kind for one in verdict.faults if text in one.detail}
        assert kinds == {FaultKind.AFTER_FINISH}, fault


@pytest.mark.parametrize("fault", ["role_only_first", "wrong_request_id"])
def test_quadriga_alone_sends_no_role_by_itself_and_echoes_ids(
    fault: str, exchange: Exchange
) -> None:
    capture = exchange.capture(spec := make_spec(**CHAT), fault=fault)
    kind = FaultKind.ORDER if fault == "role_only_first" else FaultKind.HEADERS
    assert kind in {one.kind for one in exchange.judge(capture, spec).faults}
    several = exchange(make_spec(num_choices=2, **CHAT), fault=fault).faults
    assert [f.kind for f in several] == ([] if kind is FaultKind.ORDER else [kind])
    exchange.target = Target(MODEL, 4096, is_ours=False)
    assert exchange.judge(capture, spec).faults == []


@pytest.mark.parametrize("form", [{}, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("group", [1, 3, 100])
@pytest.mark.parametrize("choices", [1, 3])
def test_good_response_passes(
    form: dict[str, str], stream: bool, group: int, choices: int, exchange: Exchange
) -> None:
    spec = make_spec(stream=stream, num_choices=choices, **form)
    verdict = exchange(spec, tokens_per_write=group)
    assert verdict.faults == []
    assert verdict.outcome is Outcome.OK
    assert [choice.num_tokens for choice in verdict.choices] == [40] * choices
    assert verdict.completion_tokens == 40 * choices
    assert len({choice.text for choice in verdict.choices}) == choices


def test_answer_that_ends_by_itself_passes(exchange: Exchange) -> None:
    spec = make_spec(prompt="ping", ignore_eos=False)
    verdict = exchange(spec, answer=lambda prompt: f"{prompt} pong 🙂")
    assert verdict.faults == []
    assert verdict.choices[0].text == "ping pong 🙂"
    assert verdict.choices[0].finish_reason == "stop"


def test_refusal_is_neither_success_nor_failure(exchange: Exchange) -> None:
    verdict = exchange(make_spec(), fault="refuse")
    assert verdict.outcome is Outcome.REFUSED
    assert verdict.retry_after_s == 1.0
    assert verdict.faults == []


def test_refused_connection_fails(exchange: Exchange) -> None:
    capture = Capture(Transport.HTTP, sent_s=0.0, fault="cannot connect: refused")
    verdict = exchange.judge(capture, make_spec())
    assert [fault.kind for fault in verdict.faults] == [FaultKind.CONNECTION]


def test_cut_at_any_byte_never_passes(exchange: Exchange) -> None:
    spec = make_spec(max_tokens=4)
    whole = exchange.capture(spec)
    data = b"".join(part for _, part in whole.reads)
    assert exchange.judge(whole, spec).outcome is Outcome.OK
    for length in range(len(data)):
        cut = Capture(Transport.HTTP, sent_s=0.0, reads=[(1.0, data[:length])], ended_s=2.0)
        assert exchange.judge(cut, spec).outcome is Outcome.FAILED, length


def test_verdict_does_not_depend_on_how_reads_fall(exchange: Exchange) -> None:
    spec = make_spec(max_tokens=8)
    whole = exchange.capture(spec)
    data = b"".join(part for _, part in whole.reads)
    reads = [(float(i), data[i : i + 1]) for i in range(len(data))]
    split = Capture(Transport.HTTP, sent_s=0.0, reads=reads, ended_s=float(len(data)))
    verdict = exchange.judge(split, spec)
    assert verdict.outcome is Outcome.OK
    # A frame is there when its last byte is: the write times point at the empty lines.
    ends = [i for i in range(1, len(data)) if data[i - 1 : i + 1] == b"\n\n"]
    assert [write.time_s for write in verdict.choices[0].writes] == [float(i) for i in ends[:8]]


def test_usage_counts_where_there_are_no_token_ids(exchange: Exchange) -> None:
    spec = make_spec()
    capture = exchange.capture(spec)
    stripped = _without_ids(capture)
    verdict = exchange.judge(stripped, spec)
    assert verdict.outcome is Outcome.OK, verdict.faults
    assert verdict.counted_by == "usage"
    assert verdict.choices[0].num_tokens == 40


def test_duplicate_is_seen_without_token_ids(exchange: Exchange) -> None:
    spec = make_spec()
    verdict = exchange.judge(_without_ids(exchange.capture(spec, fault="duplicate")), spec)
    assert verdict.faults[0].kind is FaultKind.DUPLICATE


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_calls_functions_needs_no_text(stream: bool, exchange: Exchange) -> None:
    spec = make_spec(stream=stream, ignore_eos=False, **CHAT)
    capture = exchange.capture(spec, tokens_per_write=9, answer=lambda _: "pong")
    function = {"name": "look", "arguments": '{"at": 1}'}
    called = {"content": None, "tool_calls": [{"index": 0, "id": "a", "function": function}]}
    calls = (b'"content": "pong"', json.dumps(called).encode()[1:-1])
    ends = (b'"finish_reason": "stop"', b'"finish_reason": "tool_calls"')
    verdict = exchange.judge(_edited(capture, calls, ends), spec)
    assert verdict.faults == []
    assert verdict.choices[0].calls == 'look{"at": 1}'
    assert verdict.choices[0].digest != exchange.judge(capture, spec).choices[0].digest
    wrong = {FaultKind.FINISH_REASON: [ends], FaultKind.OBJECT: [(calls[0], b'"tool_calls": [7]')]}
    for kind, pairs in wrong.items():
        assert exchange.judge(_edited(capture, *pairs), spec).faults[0].kind is kind


def _without_ids(capture: Capture) -> Capture:
    """The same response as a service without `return_token_ids` sends it."""
    return _edited(capture, (b'"token_ids"', b'"ignored"'))


def _edited(capture: Capture, *pairs: tuple[bytes, bytes]) -> Capture:
    """The same response with something else in its body."""
    raw = b"".join(part for _, part in capture.reads)
    head, body = raw.split(b"\r\n\r\n", 1)
    if b"chunked" in head:
        body = b"".join(line for line in body.split(b"\r\n") if line.startswith(b"data"))
    for old, new in pairs:
        body = body.replace(old, new)
    length = b"content-length: %d" % len(body)
    head = re.sub(rb"(transfer-encoding|content-length): \w+", length, head)
    return Capture(Transport.HTTP, sent_s=0.0, reads=[(1.0, head + b"\r\n\r\n" + body)])


@pytest.mark.parametrize(
    ("details", "cached"),
    [(None, 0), ({"cached_tokens": 7}, 7), ({"cached_tokens": 9}, None), ({}, None), (7, None)],
)
def test_no_more_prompt_tokens_are_cached_than_there_are(details: Any, cached: int | None) -> None:
    verdict = Verdict()
    counts = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
    assert read_usage(counts | {"prompt_tokens_details": details}, "a test", verdict) == (8, 1)
    assert [fault.kind for fault in verdict.faults] == [FaultKind.USAGE] * (cached is None)
    assert verdict.cached_tokens == (cached or 0)
