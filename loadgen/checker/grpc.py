"""Judge gRPC responses by their token indices, usage and status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from loadgen.checker.conclude import conclude
from loadgen.checker.fields import check_finish
from loadgen.checker.http import TIMEOUT
from loadgen.checker.verdict import AnswerChoice, Expectation, FaultKind, Outcome, Verdict, Write
from loadgen.wire.capture import Capture
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb

_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
AnyMessage = TypeVar("AnyMessage", bound=Message)


def judge_grpc(capture: Capture, expect: Expectation) -> Verdict:
    """Judge one recorded gRPC call."""
    verdict = Verdict(choices=[AnswerChoice() for _ in range(expect.num_choices)])
    verdict.status = capture.status or ""
    if capture.fault is not None:
        timed_out = capture.fault.startswith(TIMEOUT)
        verdict.add(FaultKind.TIMEOUT if timed_out else FaultKind.CONNECTION, capture.fault)
        return verdict
    if capture.status == "RESOURCE_EXHAUSTED" and len(capture.reads) <= 1:
        _judge_refusal(capture, expect, verdict)
        return verdict
    if capture.status != "OK":
        connection = capture.status == "UNAVAILABLE" and not capture.reads
        kind = FaultKind.CONNECTION if connection else FaultKind.STATUS
        verdict.add(kind, f"{capture.status}: {capture.status_message}")
        if capture.reads:
            verdict.add(FaultKind.ERROR_FRAME, f"broken after {len(capture.reads)} messages")
    if expect.stream:
        _judge_stream(capture, expect, verdict)
    elif capture.status == "OK":
        _judge_once(capture, expect, verdict)
    return verdict


def _judge_refusal(capture: Capture, expect: Expectation, verdict: Verdict) -> None:
    kind: type[pb.GenerateResponse] | type[pb.GenerateOnceResponse]
    kind = pb.GenerateResponse if expect.stream else pb.GenerateOnceResponse
    value = capture.trailers.get("retry-after-ms", "")
    for _, data in capture.reads:
        message = _parse(kind, data, "the only message", verdict)
        if message is not None and (message.choices or not message.HasField("error")):
            verdict.add(FaultKind.ERROR_FORMAT, "refused, and yet an answer")
    if value.isascii() and value.isdecimal():
        verdict.retry_after_s = int(value) / 1000
    else:
        verdict.add(FaultKind.ERROR_FORMAT, f"refused with retry-after-ms {value!r}")
    if verdict.outcome is Outcome.OK:
        verdict.outcome = Outcome.REFUSED


def _parse(kind: type[AnyMessage], data: bytes, where: str, verdict: Verdict) -> AnyMessage | None:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as exc:  # strings that are not UTF-8 included
        verdict.add(FaultKind.FRAMING, f"{where}: {exc}")
        return None
    return message


def _judge_stream(capture: Capture, expect: Expectation, verdict: Verdict) -> None:
    verdict.counted_by = "token_ids"
    identity: tuple[str, str] | None = None
    ended = ""
    for number, (time_s, data) in enumerate(capture.reads):
        where = f"message {number}"
        message = _parse(pb.GenerateResponse, data, where, verdict)
        if message is None:
            continue
        if ended:
            verdict.add(FaultKind.ORDER, f"{where} comes after {ended}")
        if message.HasField("error"):
            error = message.error
            verdict.add(FaultKind.ERROR_FRAME, f"{where}: {error.code}: {error.message}")
            ended = "an error"
            continue
        found = (message.request_id, message.model)
        if identity is None:
            identity = found
            _check_identity(found, expect, verdict)
        elif found != identity:
            verdict.add(FaultKind.IDENTITY, f"{where}: {found} after {identity}")
        if not message.choices and not message.HasField("usage"):
            verdict.add(FaultKind.ORDER, f"{where} is empty")
        for delta in message.choices:
            _judge_delta(delta, time_s, where, verdict)
        if message.HasField("usage"):
            ended = "the usage"
            _read_usage(message.usage, where, verdict)
    if ended == "an error" or capture.status != "OK":
        return
    if ended != "the usage":
        verdict.add(FaultKind.USAGE, "no usage in the last message")
    for index, choice in enumerate(verdict.choices):
        if choice.finish_reason is None:
            verdict.add(FaultKind.FINISH_REASON, f"choice {index}: none")
    conclude(expect, verdict)


def _judge_delta(delta: pb.ChoiceDelta, time_s: float, where: str, verdict: Verdict) -> None:
    if not 0 <= delta.index < len(verdict.choices):
        verdict.add(FaultKind.CHOICE, f"{where}: index {delta.index}")
        return
    choice = verdict.choices[delta.index]
    num = len(delta.token_ids)
    if choice.finish_reason is not None:
        verdict.add(FaultKind.AFTER_FINISH, f"{where}: more for choice {delta.index}")
        return
    if num and delta.first_token_index != choice.num_tokens:
        is_gap = delta.first_token_index > choice.num_tokens
        verdict.add(
            FaultKind.GAP if is_gap else FaultKind.DUPLICATE,
            f"{where}: token {delta.first_token_index} where {choice.num_tokens} is next",
        )
    if num:
        choice.token_ids += delta.token_ids
        choice.num_tokens += num
        choice.writes.append(Write(time_s, num))
    if delta.text:
        choice.texts.append(delta.text)
    choice.calls += _calls(delta)
    if delta.finish_reason:
        _finish(choice, delta, where, verdict)
    elif not num and not delta.text and not delta.tool_calls:
        verdict.add(FaultKind.ORDER, f"{where}: brings neither text, tokens nor an end")


def _judge_once(capture: Capture, expect: Expectation, verdict: Verdict) -> None:
    verdict.counted_by = "token_ids"
    time_s, data = capture.reads[0]
    message = _parse(pb.GenerateOnceResponse, data, "answer", verdict)
    if message is None:
        return
    if message.HasField("error"):
        verdict.add(FaultKind.ERROR_FORMAT, f"status OK with error {message.error.code}")
        return
    _check_identity((message.request_id, message.model), expect, verdict)
    if message.HasField("usage"):
        _read_usage(message.usage, "answer", verdict)
    else:
        verdict.add(FaultKind.USAGE, "no usage")
    if not _indices_match(message.choices, expect, verdict):
        return
    for choice, found in zip(verdict.choices, message.choices, strict=True):
        choice.token_ids = list(found.token_ids)
        choice.num_tokens = len(choice.token_ids)
        choice.texts.append(found.text)
        choice.writes.append(Write(time_s, choice.num_tokens))
        choice.calls = _calls(found)
        _finish(choice, found, f"choice {found.index}", verdict)
    conclude(expect, verdict)


def _calls(found: pb.ChoiceDelta | pb.Choice) -> str:
    return "".join(call.name + call.arguments for call in found.tool_calls)


def _finish(
    choice: AnswerChoice, found: pb.ChoiceDelta | pb.Choice, where: str, verdict: Verdict
) -> None:
    choice.finish_reason = _REASONS.get(found.finish_reason, str(found.finish_reason))
    check_finish(choice, choice.finish_reason, where, verdict)


def _indices_match(choices: Sequence[pb.Choice], expect: Expectation, verdict: Verdict) -> bool:
    indices = [choice.index for choice in choices]
    if indices == list(range(expect.num_choices)):
        return True
    verdict.add(FaultKind.CHOICE, f"choices are {indices}, not {expect.num_choices} in order")
    return False


def _check_identity(found: tuple[str, str], expect: Expectation, verdict: Verdict) -> None:
    verdict.response_id, verdict.model = found
    if not found[0]:
        verdict.add(FaultKind.IDENTITY, "request_id is empty")
    if not found[1] or (expect.model is not None and found[1] != expect.model):
        verdict.add(FaultKind.IDENTITY, f"model is {found[1]!r}, not {expect.model!r}")


def _read_usage(usage: pb.Usage, where: str, verdict: Verdict) -> None:
    verdict.prompt_tokens, verdict.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens + usage.completion_tokens != usage.total_tokens:
        verdict.add(
            FaultKind.USAGE,
            f"{where}: {usage.prompt_tokens} + {usage.completion_tokens} is not total_tokens "
            f"{usage.total_tokens}",
        )
    verdict.cached_tokens = usage.cached_tokens
    if usage.cached_tokens > usage.prompt_tokens:
        verdict.add(FaultKind.USAGE, f"{where}: more cached tokens than prompt tokens")
    verdict.extension = {
        "exits": {str(k): usage.exits[k] for k in sorted(usage.exits)},
        "rebuilds": usage.rebuilds,
        "migrations": usage.migrations,
        "pauses": usage.pauses,
        "breaches": usage.breaches,
        "lowered": usage.lowered,
    }
