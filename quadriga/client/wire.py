"""Requests and answers of the SDK as messages; shared by the two clients."""

from __future__ import annotations

import hashlib
import json
import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, TypeGuard, cast

import grpc

from quadriga.client.results import (
    Choice,
    Completion,
    DepthSpan,
    Embeddings,
    Eta,
    Message,
    Model,
    Piece,
    PredictedTokens,
    Role,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from quadriga.core.request import FinishReason, TokenLogprob, token_digest
from quadriga.errors import InvariantViolation
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb

Prompt = str | Sequence[int] | Sequence[Message | Mapping[str, Any]]

EmbedInputs = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 150_000),
]
"""A server that is pinged more often than every 5 minutes counts it, and ends all calls in the
end: at 30 s a silent call broke after 241 s; at 150 s one of 595 s came through."""
_FINISH = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}


class CallOptions(TypedDict, total=False):
    """Sampling and limits of one request; what is left out has the server's default.

    `structured_outputs` says the form of the answer, by one of `json` (a JSON Schema, as a
    dictionary or as text), `regex`, `choice` (texts), `grammar` (Lark or GBNF) and `json_object`;
    beside it may stand `disable_any_whitespace`: no blank between the parts of JSON.
    `tools` and `tool_choice` have OpenAI's form.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    echo: bool
    priority: int
    user: str
    cache_salt: str
    exit_threshold: float
    exit_policy: Literal["lossless", "bounded", "strict", "off"]
    max_depth: int
    sla_tbt_ms: float
    quality_budget: float
    structured_outputs: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    include_eta: bool


class EmbedOptions(TypedDict, total=False):
    """Options of one call of `embed`; what is left out has the server's default."""

    pooling: Literal["mean", "last"]
    normalize: bool
    priority: int
    user: str
    cache_salt: str


def affinity(request_id: str) -> list[tuple[str, str]]:
    """Metadata by which Serve's proxy and HAProxy send all calls of a request to one ingress."""
    check_sendable("request_id", request_id)
    return [("session_id", request_id), ("idempotency-key", request_id)]


def check_sendable(name: str, value: str) -> None:
    """Raises: ValueError: gRPC would call a value that it cannot send a broken connection."""
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"{name}: only printable ASCII can be sent; is there a line end in it?")


def credentials(
    *,
    tls: bool,
    root_certificates: bytes | None,
    client_certificate: bytes | None,
    client_key: bytes | None,
) -> grpc.ChannelCredentials | None:
    """What the channel is secured with, or None. Raises: ValueError on half a client identity."""
    if (client_certificate is None) != (client_key is None):
        raise ValueError("client_certificate and client_key go together; one is missing")
    if not tls and root_certificates is None and client_certificate is None:
        return None
    return grpc.ssl_channel_credentials(root_certificates, client_key, client_certificate)


def make_request(
    prompt: Prompt, model: str | None, request_id: str | None, options: CallOptions
) -> Any:
    """Build the message of a request; it can always be resumed, as it has an id and a seed.

    A seed that was not given follows from the id, so that a request sent again is the same one.

    Raises: TypeError for an unknown option, or a prompt of another kind; ValueError where a value
        fits no field.
    """
    unknown = set(options) - set(CallOptions.__annotations__)
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = pb.GenerateRequest(request_id=request_id or uuid.uuid4().hex, model=model or "")
    _set_prompt(request, prompt)
    _set_options(request, options)
    if not request.HasField("seed"):
        digest = hashlib.sha256(request.request_id.encode()).digest()
        request.seed = int.from_bytes(digest[:8], "big") >> 1
    return request


def make_embed_request(
    inputs: EmbedInputs, model: str | None, request_id: str | None, options: EmbedOptions
) -> Any:
    """Build the message of a call of `embed`.

    Raises: TypeError for an unknown option, or an input of another kind; ValueError where a value
        fits no field.
    """
    unknown = set(options) - set(EmbedOptions.__annotations__)
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = pb.EmbedRequest(request_id=request_id or uuid.uuid4().hex, model=model or "")
    is_one = isinstance(inputs, str | bytes | bytearray) or bool(_token_ids(inputs))
    items: Iterable[Any] = [inputs] if is_one else inputs
    for i, item in enumerate(items):
        if isinstance(item, str):
            request.inputs.add(text=item)
        elif (ids := _token_ids(item)) is not None:
            request.inputs.add(token_ids=pb.TokenIds(ids=ids))
        else:
            raise TypeError(f"inputs[{i}]: give text or a list of token ids, not {_kind(item)}")
    _set_options(request, options)
    return request


def _set_options(request: Any, options: Mapping[str, Any]) -> None:
    """Raises: TypeError or ValueError, naming the option."""
    for name, value in options.items():
        try:
            if value is not None:
                _set_option(request, name, value)
        except (AttributeError, TypeError, ValueError) as exc:
            if str(exc).startswith((f"{name}:", f"{name}[")):
                raise
            kind = ValueError if isinstance(exc, ValueError) else TypeError
            raise kind(f"{name}: {value!r:.80} cannot be sent: {exc}") from exc


def _set_option(request: Any, name: str, value: Any) -> None:
    if name in ("stop", "stop_token_ids"):
        getattr(request, name).extend([value] if isinstance(value, str) else value)
    elif name == "logit_bias":
        request.logit_bias.update(value)
    elif name == "structured_outputs":
        _set_form(request.structured_outputs, value)
    elif name == "tools":
        for tool in value:
            _add_tool(request, tool)
    elif name == "tool_choice" and isinstance(value, Mapping):
        request.tool_name = _tool_name(value)
    else:
        setattr(request, name, value)


def embeddings(reply: Any) -> Embeddings:
    """The vectors of an answer."""
    vectors = tuple(tuple(item.values) for item in reply.embeddings)
    return Embeddings(reply.request_id, reply.model, vectors, reply.prompt_tokens)


def _tool_name(choice: Mapping[str, Any]) -> str:
    """Raises: TypeError, showing what the choice of one tool looks like."""
    function = choice.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TypeError(
            'tool_choice: give "auto", "none", "required" or {"type": "function", "function": '
            f'{{"name": NAME}}}}, not {dict(choice)!r:.80}'
        )
    return str(function["name"])


def _set_form(message: Any, form: Mapping[str, Any]) -> None:
    """Raises: TypeError, naming what the form of an answer may be."""
    known = [field.name for field in pb.StructuredOutputs.DESCRIPTOR.oneofs_by_name["form"].fields]
    given = [name for name in form if name != "disable_any_whitespace"]
    if len(given) != 1 or given[0] not in known:
        raise TypeError(
            f"structured_outputs: give one of {', '.join(known)}, not {', '.join(given) or 'none'}"
        )
    if "disable_any_whitespace" in form:
        message.disable_any_whitespace = form["disable_any_whitespace"]
    name, value = given[0], form[given[0]]
    if name == "choice":
        if isinstance(value, str):
            raise TypeError("structured_outputs.choice: give a list of texts, not one text")
        message.choice.texts.extend(value)
    elif name == "json" and not isinstance(value, str):
        message.json = json.dumps(value)
    else:
        setattr(message, name, value)


def _add_tool(request: Any, tool: Mapping[str, Any]) -> None:
    """Raises: TypeError: It has not OpenAI's form."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TypeError(
            'tools: give {"type": "function", "function": {"name": …, "parameters": …}}, not '
            f"{tool!r:.80}"
        )
    parameters = function.get("parameters")
    request.tools.add(
        name=function["name"],
        description=function.get("description") or "",
        parameters="" if parameters is None else json.dumps(parameters),
        strict=bool(function.get("strict")),
    )


def _set_prompt(request: Any, prompt: Any) -> None:
    """Raises: TypeError, naming what a prompt may be; ValueError for a token id out of range."""
    if isinstance(prompt, str):
        request.prompt = prompt
        return
    if _is_list(prompt) and prompt and all(isinstance(p, Message | Mapping) for p in prompt):
        for i, item in enumerate(prompt):
            message = item if isinstance(item, Message) else _message(item, f"messages[{i}]")
            request.chat.messages.add(
                role=message.role,
                content=message.content,
                name=message.name,
                tool_calls=[
                    pb.ToolCall(id=c.id, name=c.name, arguments=c.arguments)
                    for c in message.tool_calls
                ],
                tool_call_id=message.tool_call_id,
            )
        return
    ids = _token_ids(prompt)
    if ids is None:
        raise TypeError(
            "prompt: give text, a list of token ids, or a list of messages (Message, or a dict "
            f"with role and content), not {_kind(prompt)}"
        )
    request.prompt_token_ids.ids.extend(ids)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _token_ids(value: Any) -> list[int] | None:
    """Token ids, of a list or an array; None where it is neither, or holds others."""
    if not _is_list(value) and not hasattr(value, "tolist"):
        return None
    try:
        return [operator.index(item) for item in value]
    except TypeError:
        return None


def _message(item: Mapping[str, Any], place: str) -> Message:
    """A message of OpenAI's form. Raises: TypeError, naming the field at fault."""
    known = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal"}
    unknown = {key for key, value in item.items() if value is not None} - known
    if unknown:
        raise TypeError(
            f"{place}: {', '.join(sorted(map(str, unknown)))} not supported; a message has role, "
            "content, name, tool_calls and tool_call_id"
        )
    role, content, name = item.get("role"), item.get("content"), item.get("name")
    calls = item.get("tool_calls") or ()
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if content is None and calls:
        content = ""
    named = item.get("tool_call_id")
    fields = {"role": role, "content": content, "name": name or "", "tool_call_id": named or ""}
    for key, value in fields.items():
        if not isinstance(value, str):
            raise TypeError(f"{place}.{key}: must be text, not {_kind(value)}")
    made = tuple(_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls))
    return Message(cast(Role, role), cast(str, content), name, made, named)


def _call(item: object, place: str) -> ToolCall:
    """A call of OpenAI's form. Raises: TypeError."""
    if isinstance(item, ToolCall):
        return item
    function = item.get("function") if isinstance(item, Mapping) else None
    if isinstance(item, Mapping) and isinstance(function, Mapping):
        made = item.get("id"), function.get("name"), function.get("arguments")
        if all(isinstance(value, str) for value in made):
            return ToolCall(*map(str, made))
    raise TypeError(
        f'{place}: give {{"id": …, "function": {{"name": …, "arguments": TEXT}}}}, not '
        f"{_kind(item)}"
    )


def _kind(value: object) -> str:
    if _is_list(value) and value:
        return f"a {type(value).__name__} with {_kind(value[0])}"
    return type(value).__name__


def completion(reply: Any) -> Completion:
    """A whole answer. Raises: InvariantViolation: A choice has not ended."""
    if any(c.finish_reason not in _FINISH for c in reply.choices):
        raise InvariantViolation("the server answers with a choice that has not ended")
    return Completion(
        request_id=reply.request_id,
        model=reply.model,
        choices=tuple(
            Choice(
                index=c.index,
                text=c.text,
                token_ids=tuple(c.token_ids),
                finish_reason=_FINISH[c.finish_reason],
                logprobs=_logprobs(c.logprobs),
                prompt_logprobs=_logprobs(c.prompt_logprobs),
                tool_calls=tuple(ToolCall(t.id, t.name, t.arguments) for t in c.tool_calls),
            )
            for c in reply.choices
        ),
        usage=_usage(reply.usage),
    )


def to_model(message: Any) -> Model:
    return Model(
        message.id, message.root, message.max_model_len, message.created_unix_s, message.parent
    )


@dataclass(slots=True, eq=False)
class StreamProgress:
    """How much of a stream has arrived, so that it can be taken up again without loss.

    Attributes:
        received: Tokens had so far, per choice.
        digests: Of those tokens, per choice: who begins the request anew says the same ones.
    """

    request: Any
    received: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    is_complete: bool = False
    num_choices: int = 1

    def __post_init__(self) -> None:
        self.num_choices = self.request.n if self.request.HasField("n") else 1
        self.received = [0] * self.num_choices
        self.digests = [0] * self.num_choices

    def next_request(self) -> Any:
        """The request as it stands now: from the beginning, or from what is still missing."""
        del self.request.resume_from[:]
        del self.request.resume_digest[:]
        if any(self.received):
            self.request.resume_from.extend(self.received)
            self.request.resume_digest.extend(self.digests)
        return self.request

    def take(self, message: Any) -> list[Piece]:
        """Turn a message into pieces.

        Raises: InvariantViolation on a gap, a step back, or a choice that there is not.
        """
        pieces = []
        for delta in message.choices:
            index, first = delta.index, delta.first_token_index
            if not 0 <= index < self.num_choices:
                raise InvariantViolation(
                    f"the server names choice {index}, there are {self.num_choices}"
                )
            if first > self.received[index]:
                raise InvariantViolation(
                    f"tokens {self.received[index]} to {first - 1} of choice {index} are missing"
                )
            if index in self.finished:
                continue
            if first < self.received[index]:  # its text could not be told from what was read
                raise InvariantViolation(
                    f"choice {index} goes back to token {first}, {self.received[index]} are there"
                )
            self.digests[index] = token_digest(delta.token_ids, self.digests[index])
            self.received[index] += len(delta.token_ids)
            finish = _FINISH.get(delta.finish_reason)
            if finish is not None:
                self.finished.add(index)
            pieces.append(
                Piece(
                    request_id=message.request_id,
                    model=message.model,
                    index=index,
                    text=delta.text,
                    token_ids=tuple(delta.token_ids),
                    first_index=first,
                    finish_reason=finish,
                    logprobs=_logprobs(delta.logprobs),
                    prompt_logprobs=_logprobs(delta.prompt_logprobs),
                    tool_calls=tuple(
                        ToolCallDelta(t.index, t.id, t.name, t.arguments) for t in delta.tool_calls
                    ),
                    eta=_eta(delta.eta) if delta.HasField("eta") else None,
                )
            )
        if message.choices and message.HasField("usage"):
            if not pieces:  # a choice that had ended before a break ends again, as the last
                end, at = _FINISH.get(delta.finish_reason), self.received[index]
                pieces = [Piece(message.request_id, message.model, index, "", (), at, end)]
            pieces[-1] = replace(pieces[-1], usage=_usage(message.usage))
        self.is_complete = len(self.finished) == self.num_choices and message.HasField("usage")
        return pieces


def _usage(message: Any) -> Usage:
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        dict(message.exits),
        message.rebuilds,
        tuple(DepthSpan(s.model, s.depth, s.tokens) for s in message.spans),
        message.migrations,
        message.pauses,
        message.breaches,
        tuple(PredictedTokens(p.choice, p.tokens, p.lower, p.upper) for p in message.predicted),
        message.cached_tokens,
        message.lowered,
        tuple(message.depth_pools),
        message.expected_layers if message.HasField("expected_layers") else None,
    )


def _eta(message: Any) -> Eta:
    return Eta(
        message.tokens,
        message.lower,
        message.upper,
        message.seconds if message.HasField("seconds") else None,
        message.upper_seconds if message.HasField("upper_seconds") else None,
    )


def _logprobs(rows: Iterable[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            row.token_id,
            row.logprob if row.HasField("logprob") else None,
            tuple((a.token_id, a.logprob) for a in row.top),
        )
        for row in rows
    )
