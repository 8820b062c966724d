"""Judge HTTP responses: streams, single answers, errors and refusals."""

from __future__ import annotations

import math
from typing import Any

from loadgen.checker.conclude import conclude
from loadgen.checker.fields import (
    check_error,
    check_finish,
    check_text,
    load_object,
    read_calls,
    read_token_ids,
    read_totals,
)
from loadgen.checker.identity import read_identity
from loadgen.checker.stream import StreamCheck
from loadgen.checker.verdict import AnswerChoice, Expectation, FaultKind, Outcome, Verdict, Write
from loadgen.wire.capture import Capture
from loadgen.wire.http_wire import Response, parse_response
from loadgen.wire.sse import split_frames

TIMEOUT = "timeout"  # `Capture.fault` begins with this where the client's limit was reached


def judge_http(capture: Capture, expect: Expectation) -> Verdict:
    """Judge one recorded HTTP exchange."""
    verdict = Verdict(choices=[AnswerChoice() for _ in range(expect.num_choices)])
    if capture.fault is not None:
        timed_out = capture.fault.startswith(TIMEOUT)
        verdict.add(FaultKind.TIMEOUT if timed_out else FaultKind.CONNECTION, capture.fault)
    elif not capture.reads:
        verdict.add(FaultKind.CONNECTION, "closed without an answer")
    if not capture.reads:
        return verdict
    response = parse_response(capture.reads)
    verdict.status = response.status
    for fault in response.faults:
        verdict.add(FaultKind.FRAMING, fault)
    if response.status == 0:
        return verdict
    if expect.request_id is not None:
        echoed = response.headers.get("x-request-id")
        if echoed != expect.request_id:
            verdict.add(FaultKind.HEADERS, f"x-request-id {expect.request_id!r} came as {echoed!r}")
    if response.status != 200:
        _judge_error(response, verdict)
    elif expect.stream:
        _judge_stream(response, expect, verdict)
    else:
        _judge_single(response, expect, verdict)
    return verdict


def _judge_error(response: Response, verdict: Verdict) -> None:
    """A well-formed 429 is a refusal; every other error status is a failure."""
    document = load_object(response.body.data, f"body of {response.status}", verdict)
    error = document.get("error") if document is not None else None
    shown = check_error(error, f"status {response.status}", verdict)
    if response.status != 429:
        verdict.add(FaultKind.STATUS, f"{response.status}: {shown}")
        return
    header = response.headers.get("retry-after")
    exact = response.headers.get("retry-after-ms")  # beside the other, which has whole seconds
    try:
        verdict.retry_after_s = float(header) if header is not None else math.nan
        if exact is not None:
            verdict.retry_after_s = min(verdict.retry_after_s, float(exact) / 1000.0)
    except ValueError:
        verdict.retry_after_s = math.nan
    if not 0 <= verdict.retry_after_s < math.inf:
        verdict.add(FaultKind.ERROR_FORMAT, f"429 with retry-after {header!r}")
        verdict.retry_after_s = None
    if verdict.outcome is Outcome.OK:
        verdict.outcome = Outcome.REFUSED


def _check_content_type(response: Response, wanted: str, verdict: Verdict) -> None:
    found = response.headers.get("content-type", "")
    if found.split(";")[0].strip().lower() != wanted:
        verdict.add(FaultKind.HEADERS, f"content-type {found!r}, not {wanted}")


def _judge_stream(response: Response, expect: Expectation, verdict: Verdict) -> None:
    _check_content_type(response, "text/event-stream", verdict)
    frames, faults = split_frames(response.body)
    for fault in faults:
        verdict.add(FaultKind.FRAMING, fault)
    check = StreamCheck(expect, verdict)
    for frame in frames:
        check.frame(frame)
    check.close()
    conclude(expect, verdict)


def _judge_single(response: Response, expect: Expectation, verdict: Verdict) -> None:
    _check_content_type(response, "application/json", verdict)
    document = load_object(response.body.data, "body", verdict)
    if document is None:
        return
    chat = expect.endpoint == "chat"
    wanted = "chat.completion" if chat else "text_completion"
    if document.get("object") != wanted:
        verdict.add(FaultKind.OBJECT, f"object is {document.get('object')!r}, not {wanted!r}")
    read_identity(document, expect, verdict, "body")
    read_totals(document, "body", verdict)
    choices = document.get("choices")
    if not isinstance(choices, list) or [
        c.get("index") if isinstance(c, dict) else None for c in choices
    ] != list(range(expect.num_choices)):
        verdict.add(FaultKind.CHOICE, f"choices are not {expect.num_choices} in order")
        return
    time_s = response.body.times_s[-1]
    for choice, found in zip(verdict.choices, choices, strict=True):
        _read_single_choice(choice, found, time_s, expect, verdict)
    if verdict.counted_by is None and verdict.completion_tokens is not None:
        # Without ids one choice's length can only be what the usage says.
        verdict.counted_by = "usage"
        if expect.num_choices == 1:
            verdict.choices[0].num_tokens = verdict.completion_tokens
            verdict.choices[0].writes = [Write(time_s, verdict.completion_tokens)]
    conclude(expect, verdict)


def _read_single_choice(
    choice: AnswerChoice,
    found: dict[str, Any],
    time_s: float,
    expect: Expectation,
    verdict: Verdict,
) -> None:
    where = f"choice {found['index']}"
    if expect.endpoint == "chat":
        message = found.get("message")
        if not isinstance(message, dict) or message.get("role") != "assistant":
            verdict.add(FaultKind.OBJECT, f"{where}: message is {message!r:.100}")
        message = message if isinstance(message, dict) else {}
        choice.calls = read_calls(message, where, verdict)
        text = message.get("content")
        if text is None and choice.calls:
            text = ""
    else:
        text = found.get("text")
    if isinstance(text, str):
        check_text(text, where, verdict)
        choice.texts.append(text)
    else:
        verdict.add(FaultKind.OBJECT, f"{where}: text is {text!r:.100}")
    choice.finish_reason = found.get("finish_reason")
    check_finish(choice, choice.finish_reason, where, verdict)
    if found.get("token_ids") is not None:
        choice.token_ids = read_token_ids(found["token_ids"], where, verdict)
        choice.num_tokens = len(choice.token_ids)
        choice.writes = [Write(time_s, choice.num_tokens)]
        verdict.counted_by = "token_ids"
