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

from quadriga.core.request import FinishReason, TokenLogprob
from quadriga.errors import BodyTooLarge, InvalidRequest, QuadrigaError
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.http.tls import add_tls_port

if TYPE_CHECKING:
    from serve_app.request.request import OutputDelta, Request
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
    "exit_threshold",
    "exit_policy",
    "max_depth",
    "sla_tbt_ms",
)
_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
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
            "the request is not a valid message (text fields must be UTF-8)",
            code="invalid_message",
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
        fields["messages"] = [
            {"role": m.role, "content": m.content} | ({"name": m.name} if _set(m, "name") else {})
            for m in request.chat.messages
        ]
        if _set(request, "logprobs"):
            fields["logprobs"], fields["top_logprobs"] = True, request.logprobs
        if _set(request, "echo") and request.echo:
            raise InvalidRequest("echo: not with chat", param="echo")
        return fields
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


def _structured_outputs(message: Any) -> dict[str, Any]:
    name = message.WhichOneof("form")
    if name is None:
        return {}
    value = getattr(message, name)
    return {name: list(value.texts) if name == "choice" else value}


def _set(message: Any, field: str) -> bool:
    return bool(message.HasField(field))


def delta_message(request: Request, delta: OutputDelta) -> Any:
    """New output of one sequence as a message."""
    message = pb.ChoiceDelta(
        index=delta.choice,
        first_token_index=delta.first_index,
        token_ids=delta.token_ids,
        text=delta.text,
    )
    if delta.is_first and delta.first_index == 0 and request.echo:
        sequence = request.sequences[delta.choice]
        message.text = request.prompt_text(delta.choice) + delta.text
        message.prompt_logprobs.extend(_logprobs(sequence.prompt_logprobs or ()))
    if delta.logprobs is not None:
        message.logprobs.extend(_logprobs(delta.logprobs))
    if delta.finish is not None:
        message.finish_reason = _FINISH[delta.finish]
    return message


def choice_message(request: Request, sequence: SequenceRequest) -> Any:
    """A finished sequence as a message."""
    prompt = request.prompt_text(sequence.index) if request.echo else ""
    return pb.Choice(
        index=sequence.index,
        text=prompt + "".join(sequence.pieces) + sequence.tail,
        token_ids=sequence.state.output_ids,
        finish_reason=_FINISH[sequence.finish] if sequence.finish else None,
        logprobs=list(_logprobs(sequence.logprobs)),
        prompt_logprobs=list(_logprobs(sequence.prompt_logprobs or ())),
    )


def usage_message(request: Request) -> Any:
    prompt, output = request.num_prompt_tokens, request.num_output_tokens
    message = pb.Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)
    for sequence in request.sequences:
        for layer in sequence.state.exit_layers:
            message.exits[layer] += 1
        message.rebuilds += sequence.num_rebuilds
        for model, depth, tokens in sequence.spans:
            message.spans.add(model=model, depth=depth, tokens=tokens)
    return message


def error_message(exc: QuadrigaError) -> Any:
    return pb.Error(
        code=exc.code,
        message=exc.message,
        param=exc.param or "",
        retry_after_s=exc.retry_after_s,
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
