"""gRPC messages to and from the fields and requests of the ingress.

`add_quadriga_to_server` is what Serve's proxy loads; this module therefore imports little. Requests
reach the ingress as raw bytes, so that what does not parse is refused there in the documented form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from pydantic_core import from_json

from quadriga.core.grammar import MAX_GRAMMAR_BYTES
from quadriga.core.request import FinishReason, TokenLogprob
from quadriga.errors import BodyTooLarge, InvalidRequest, QuadrigaError
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.http.tls import add_tls_port
from serve_app.openai.tool_output import (
    call_id,
    read_answer,
    read_news,
    stream_finish,
)

if TYPE_CHECKING:
    from serve_app.request.request import OutputDelta, OutputStream, Request
    from serve_app.request.sequence_request import SequenceRequest

SERVICE = "quadriga.v1.Quadriga"
STREAMS = ("Generate",)
MAX_DETAILS_CHARS = 1024

_SCALARS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "ignore_eos",
    "priority",
    "deadline_ms",
    "user",
    "cache_salt",
    "exit_threshold",
    "exit_policy",
    "max_depth",
    "sla_tbt_ms",
    "quality_budget",
)
_OWN_NAMES = {"top_logprobs": "logprobs", "idempotency-key": "request_id", "input": "inputs"}
"""Fields that HTTP calls otherwise, by its names."""
_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: pb.FINISH_REASON_TOOL_CALLS,
}


def add_quadriga_to_server(servicer: Any, server: grpc.Server) -> None:
    """Register the service with requests left undecoded; for `gRPCOptions`.

    Serve hands over its server here, so this is also where it gets its port with TLS.

    Raises: ConfigError: The certificate is no good, or the port with TLS is taken.
    """
    add_tls_port(server)
    methods = pb.DESCRIPTOR.services_by_name["Quadriga"].methods_by_name
    handlers = {}
    for name in methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if name in STREAMS
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[name] = make(getattr(servicer, name))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def parse_request(message_class: Any, data: bytes, max_bytes: int) -> Any:
    """Decode a request.

    Raises: BodyTooLarge; InvalidRequest when the bytes are no such message.
    """
    if len(data) > max_bytes:
        raise BodyTooLarge(
            f"the request has {len(data)} bytes, above the limit of {max_bytes} bytes"
        )
    try:
        return message_class.FromString(data)
    except DecodeError as exc:
        raise InvalidRequest(
            "the request is not a valid message (text fields must be UTF-8)", code="invalid_message"
        ) from exc


def generation_fields(request: Any) -> dict[str, Any]:
    """The fields that were set, under their HTTP names; ready for the shared validation."""
    fields: dict[str, Any] = {
        name: getattr(request, name) for name in _SCALARS if _set(request, name)
    }
    if request.model:
        fields["model"] = request.model
    if request.stop:
        fields["stop"] = list(request.stop)
    if request.stop_token_ids:
        fields["stop_token_ids"] = list(request.stop_token_ids)
    if request.logit_bias:
        fields["logit_bias"] = {str(k): v for k, v in request.logit_bias.items()}
    if _set(request, "structured_outputs"):
        fields["structured_outputs"] = _structured_outputs(request.structured_outputs)
    form = request.WhichOneof("input")
    if form == "chat":
        fields["messages"] = [_chat_message(m) for m in request.chat.messages]
        fields |= _tools(request)
        if _set(request, "logprobs"):
            fields["logprobs"], fields["top_logprobs"] = True, request.logprobs
        if _set(request, "echo") and request.echo:
            raise InvalidRequest("echo: not with chat", param="echo")
        return fields
    if request.tools or _set(request, "tool_choice") or _set(request, "tool_name"):
        raise InvalidRequest("tools: only with chat", param="tools")
    if form == "prompt":
        fields["prompt"] = request.prompt
    elif form == "prompt_token_ids":
        fields["prompt"] = list(request.prompt_token_ids.ids)
    else:
        raise InvalidRequest(
            "prompt: give one of prompt, prompt_token_ids and chat", param="prompt"
        )
    for name in ("logprobs", "echo"):
        if _set(request, name):
            fields[name] = getattr(request, name)
    return fields


def embedding_fields(request: Any) -> dict[str, Any]:
    """As `generation_fields`, of an `EmbedRequest`.

    Raises: InvalidRequest.
    """
    names = ("pooling", "normalize", "priority", "deadline_ms", "user", "cache_salt")
    fields: dict[str, Any] = {name: getattr(request, name) for name in names if _set(request, name)}
    if request.model:
        fields["model"] = request.model
    inputs: list[str | list[int]] = []
    for i, item in enumerate(request.inputs):
        form = item.WhichOneof("input")
        if form is None:
            raise InvalidRequest(f"input.{i}: give text or token_ids", param=f"input.{i}")
        inputs.append(item.text if form == "text" else list(item.token_ids.ids))
    fields["input"] = inputs
    return fields


def _chat_message(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id"):
        if _set(message, name):
            fields[name] = getattr(message, name)
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    return fields


def _tools(request: Any) -> dict[str, Any]:
    """The fields of tools. Raises: InvalidRequest."""
    fields: dict[str, Any] = {}
    if request.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": _schema(tool.parameters, f"tools.{i}.parameters"),
                    "strict": tool.strict,
                },
            }
            for i, tool in enumerate(request.tools)
        ]
    if _set(request, "tool_choice"):
        fields["tool_choice"] = request.tool_choice
    if _set(request, "tool_name"):
        named = {"type": "function", "function": {"name": request.tool_name}}
        if fields.setdefault("tool_choice", named) is not named:
            raise InvalidRequest("tool_name: not with tool_choice", param="tool_name")
    if _set(request, "parallel_tool_calls"):
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    return fields


def _schema(text: str, field: str) -> Any:
    """A JSON schema. Raises: InvalidRequest: It is no JSON."""
    if not text:
        return None
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{field}: {len(text)} bytes, above the limit of {MAX_GRAMMAR_BYTES}", param=field
        )
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as exc:
        raise InvalidRequest(f"{field}: is not JSON: {exc}", param=field) from exc


def _structured_outputs(message: Any) -> dict[str, Any]:
    name = message.WhichOneof("form")
    if name is None:
        return {}
    value = getattr(message, name)
    return {
        name: list(value.texts) if name == "choice" else value,
        "disable_any_whitespace": message.disable_any_whitespace,
    }


def _set(message: Any, field: str) -> bool:
    return bool(message.HasField(field))


def delta_message(stream: OutputStream, delta: OutputDelta) -> Any:
    """New output of one sequence as a message."""
    request, news = stream.request, read_news(stream, delta)
    message = pb.ChoiceDelta(
        index=delta.choice,
        first_token_index=delta.first_index,
        token_ids=delta.token_ids,
        text=news.text,
    )
    for call in news.calls:
        more = message.tool_calls.add(index=call.index, arguments=call.arguments)
        if call.name is not None:
            more.id, more.name = call_id(request, delta.choice, call.index), call.name
    if delta.is_first and delta.first_index == 0 and request.echo:
        sequence = request.sequences[delta.choice]
        message.text = request.prompt_text(delta.choice) + delta.text
        message.prompt_logprobs.extend(_logprobs(sequence.state.prompt_logprobs or ()))
    if delta.logprobs is not None:
        message.logprobs.extend(_logprobs(delta.logprobs))
    if request.eta_in_chunks:
        to_go = request.sequences[delta.choice].eta
        if to_go is not None:
            message.eta.CopyFrom(pb.Eta(**to_go.plain()))
    finish = stream_finish(stream, delta)
    if finish is not None:
        message.finish_reason = _FINISH[finish]
    return message


def choice_message(request: Request, sequence: SequenceRequest) -> Any:
    """A finished sequence as a message."""
    prompt = request.prompt_text(sequence.index) if request.echo else ""
    text, calls, finish = read_answer(request, sequence)
    return pb.Choice(
        index=sequence.index,
        text=prompt + text,
        token_ids=sequence.state.output_ids,
        finish_reason=_FINISH[finish] if finish else None,
        tool_calls=[pb.ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in calls],
        logprobs=list(_logprobs(sequence.state.logprobs)),
        prompt_logprobs=list(_logprobs(sequence.state.prompt_logprobs or ())),
    )


def whole_message(request: Request) -> Any:
    """The `GenerateOnceResponse` of a request that has ended."""
    return pb.GenerateOnceResponse(
        request_id=request.request_id,
        model=request.shown_model,
        choices=[choice_message(request, sequence) for sequence in request.sequences],
        usage=usage_message(request),
    )


def usage_message(request: Request) -> Any:
    prompt, output = request.num_prompt_tokens, request.num_output_tokens
    return pb.Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        cached_tokens=request.num_cached_tokens,
        **request.course(),
    )


def in_own_words(exc: QuadrigaError) -> QuadrigaError:
    """An error of what both doors share, with gRPC's name of the field at fault."""
    theirs, dot, place = (exc.param or "").partition(".")
    if (name := _OWN_NAMES.get(theirs)) is None:
        return exc
    message, param = exc.message.replace(theirs, name, 1), f"{name}{dot}{place}"
    return type(exc)(message, param=param, code=exc.code, retry_after_s=exc.retry_after_s)


def error_message(exc: QuadrigaError) -> Any:
    return pb.Error(
        code=exc.code, message=exc.message, param=exc.param or "", retry_after_s=exc.retry_after_s
    )


def set_error(context: Any, exc: QuadrigaError) -> None:
    """Put an error's status, details and trailing metadata on a gRPC context."""
    code = getattr(grpc.StatusCode, exc.grpc_code)
    message = exc.message[:MAX_DETAILS_CHARS]
    context.set_code(code)
    context.set_details(message)
    status = status_pb2.Status(code=code.value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=exc.code, domain="quadriga")
    metadata: list[tuple[str, str | bytes]] = [("quadriga-error-code", exc.code)]
    if exc.param is not None:
        param = exc.param.encode("ascii", "backslashreplace").decode()[:256]
        info.metadata["param"] = param
        metadata.append(("quadriga-error-param", param))
    status.details.add().Pack(info)
    if exc.retryable and exc.retry_after_s is not None:
        wait_ms = max(0, math.ceil(exc.retry_after_s * 1000))
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(wait_ms)
        status.details.add().Pack(retry)
        metadata.append(("retry-after-ms", str(wait_ms)))
    metadata.append(("grpc-status-details-bin", status.SerializeToString()))
    context.set_trailing_metadata(metadata)


def _logprobs(rows: Iterable[TokenLogprob]) -> Iterable[Any]:
    for row in rows:
        yield pb.TokenLogprob(
            token_id=row.token_id,
            logprob=row.logprob,
            top=[pb.Alternative(token_id=t, logprob=v) for t, v in row.top],
        )
