"""Turn a request body into a `GenerateSpec`, or say which field broke which limit.

Everything here runs before the request costs anything but parsing and tokenising.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quadriga.config import IngressConfig
from quadriga.errors import ContextTooLong, InvalidRequest
from quadriga.types import SamplingParams
from serve_app.models import ServedModel
from serve_app.openai_schema import (
    INT64_MIN,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationFields,
)
from serve_app.spec import GenerateSpec, Prompt

DEFAULT_COMPLETION_TOKENS = 16
SHOWN_CHARS = 60
SHOWN_ERRORS = 3

Encode = Callable[[ServedModel, str, bool], Awaitable[list[int]]]
BodyModel = TypeVar("BodyModel", bound=BaseModel)

_EXIT_FIELDS = ("exit_threshold", "exit_policy", "max_depth", "sla_tbt_ms")


def shown(value: object) -> str:
    """A value as an error message may quote it: short, printable ASCII."""
    text = ascii(value) if not isinstance(value, (list, dict)) else _shown_container(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _shown_container(value: list[Any] | dict[Any, Any]) -> str:
    return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"


def parse_body(model: type[BodyModel], data: object) -> BodyModel:
    """Validate a decoded JSON value against a body model.

    Raises: InvalidRequest naming the first fields at fault, their values and limits.
    """
    if not isinstance(data, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {shown(data)}")
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False)
        lines = []
        for error in errors[:SHOWN_ERRORS]:
            got = "" if error["type"] == "missing" else f" (got {shown(error['input'])})"
            lines.append(f"{_field_name(error['loc'])}: {error['msg']}{got}")
        more = f"; and {len(errors) - SHOWN_ERRORS} more" if len(errors) > SHOWN_ERRORS else ""
        raise InvalidRequest("; ".join(lines) + more, param=_field_name(errors[0]["loc"])) from exc


def _field_name(location: tuple[int | str, ...]) -> str:
    """`stop.2`, without pydantic's names of union members such as `list[str]`."""
    parts = [str(p) for p in location if isinstance(p, int) or p.replace("_", "").isalnum()]
    known = [p for p in parts if p not in ("str", "int", "float", "bool")]
    return ".".join(known) or "body"


def ignored_fields(body: BaseModel) -> tuple[str, ...]:
    return tuple(sorted((body.model_extra or {}).keys()))


async def completion_spec(
    body: CompletionBody,
    model: ServedModel,
    limits: IngressConfig,
    encode: Encode,
    *,
    request_id: str,
    now_unix_s: float,
) -> GenerateSpec:
    """Build the spec of a completion.

    Raises: InvalidRequest, ContextTooLong.
    """
    if body.suffix:
        raise InvalidRequest("suffix: not supported by this server", param="suffix")
    n = _choices(body.n, limits)
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest(
            f"best_of: {body.best_of} must equal n ({n}); ranking more is not supported",
            param="best_of",
        )
    echo = bool(body.echo)
    prompts = await _prompts(body.prompt, model, limits, encode, n=n, echo=echo)
    longest = max(len(p.token_ids) for p in prompts)
    wanted = body.max_tokens
    if wanted is None:
        wanted = max(1, min(DEFAULT_COMPLETION_TOKENS, model.max_model_len - longest))
    if wanted == 0 and not echo:
        raise InvalidRequest("max_tokens: 0 needs echo", param="max_tokens")
    num_logprobs = _logprobs(body.logprobs, limits, "logprobs")
    sampling = _sampling(
        body,
        model,
        max_tokens=wanted,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_logprobs if echo else None,
    )
    _check_context(longest, wanted, model, "max_tokens")
    return _spec(body, model, limits, request_id, now_unix_s, prompts, n, sampling, echo)


async def chat_spec(
    body: ChatBody,
    model: ServedModel,
    limits: IngressConfig,
    encode: Encode,
    *,
    request_id: str,
    now_unix_s: float,
) -> GenerateSpec:
    """Build the spec of a chat turn.

    Raises: InvalidRequest, ContextTooLong.
    """
    _refuse_tools(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs: true", param="top_logprobs")
    num_logprobs = None
    if body.logprobs:
        num_logprobs = _logprobs(body.top_logprobs or 0, limits, "top_logprobs")
    n = _choices(body.n, limits)
    text = model.tokenizer.render_chat(plain_messages(body.messages))
    token_ids = await encode(model, text, False)
    if not token_ids:
        raise InvalidRequest("messages: the conversation is empty", param="messages")
    _check_vocabulary(token_ids, model, "messages")
    field, wanted = "max_completion_tokens", body.max_completion_tokens
    if wanted is None:
        field, wanted = "max_tokens", body.max_tokens
    if wanted == 0:
        raise InvalidRequest(f"{field}: must be at least 1", param=field)
    if wanted is None:
        wanted = max(1, model.max_model_len - len(token_ids))
    _check_context(len(token_ids), wanted, model, field)
    sampling = _sampling(body, model, max_tokens=wanted, num_logprobs=num_logprobs)
    prompts = (Prompt(token_ids, text),)
    return _spec(body, model, limits, request_id, now_unix_s, prompts, n, sampling, False)


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: text content, `developer` as `system`.

    Raises: InvalidRequest for a part that is not text.
    """
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        extra = message.model_extra or {}
        if extra.get("tool_calls") or extra.get("function_call"):
            field = f"messages.{i}.tool_calls"
            raise InvalidRequest(f"{field}: tools are not supported", param=field)
        content = message.content
        if isinstance(content, list):
            texts = []
            for j, part in enumerate(content):
                value = part.refusal if part.type == "refusal" else part.text
                if part.type not in ("text", "refusal") or value is None:
                    raise InvalidRequest(
                        f"messages.{i}.content.{j}: only text parts are supported, "
                        f"got {shown(part.type)}",
                        param=f"messages.{i}.content.{j}",
                    )
                texts.append(value)
            content = "".join(texts)
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": content or ""}
        if message.name is not None:
            entry["name"] = message.name
        plain.append(entry)
    return plain


def check_unicode(value: object, path: str = "") -> None:
    """Refuse lone surrogates anywhere in a decoded JSON value.

    Raises: InvalidRequest naming the field.
    """
    stack: list[tuple[object, str]] = [(value, path)]
    while stack:
        item, where = stack.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as exc:
                field = where or "body"
                raise InvalidRequest(
                    f"{field}: holds a lone surrogate (character {exc.start}), which is not text",
                    param=field,
                ) from exc
        elif isinstance(item, Mapping):
            for key, child in item.items():
                stack.append((key, where or "a field name"))
                stack.append((child, f"{where}.{key}" if where else str(key)))
        elif isinstance(item, list):
            prefix = f"{where}." if where else ""
            stack.extend((child, f"{prefix}{i}") for i, child in enumerate(item))


def _refuse_tools(body: ChatBody) -> None:
    for field in ("tools", "functions", "audio"):
        if getattr(body, field):
            raise InvalidRequest(f"{field}: not supported by this server", param=field)
    for field in ("tool_choice", "function_call"):
        if getattr(body, field) not in (None, "none", "auto"):
            raise InvalidRequest(f"{field}: tools are not supported", param=field)
    if body.modalities not in (None, [], ["text"]):
        raise InvalidRequest('modalities: only ["text"] is supported', param="modalities")


def _choices(n: int | None, limits: IngressConfig) -> int:
    if n is not None and n > limits.max_choices:
        raise InvalidRequest(f"n: {n} is above the limit of {limits.max_choices}", param="n")
    return n or 1


def _logprobs(wanted: int | None, limits: IngressConfig, field: str) -> int | None:
    if wanted is not None and wanted > limits.max_logprobs:
        raise InvalidRequest(
            f"{field}: {wanted} is above the limit of {limits.max_logprobs}", param=field
        )
    return wanted


def _check_context(prompt: int, wanted: int, model: ServedModel, field: str) -> None:
    limit = model.max_model_len
    room = limit - prompt
    if room < min(wanted, 1):
        raise ContextTooLong(
            f"the prompt has {prompt} tokens; {model.id} takes {limit} with the answer",
            param="prompt" if field == "max_tokens" else "messages",
        )
    if wanted > room:
        raise ContextTooLong(
            f"prompt ({prompt} tokens) plus {field} ({wanted}) is {prompt + wanted}; {model.id} "
            f"takes {limit}; lower {field} to {room} or shorten the prompt",
            param=field,
        )


def _check_vocabulary(token_ids: list[int], model: ServedModel, field: str) -> None:
    highest = max(token_ids)
    if highest >= model.checkpoint.vocab_size:
        raise InvalidRequest(
            f"{field}: token id {highest} is outside the vocabulary of {model.id} "
            f"(0 to {model.checkpoint.vocab_size - 1})",
            param=field,
        )


async def _prompts(
    value: object, model: ServedModel, limits: IngressConfig, encode: Encode, *, n: int, echo: bool
) -> tuple[Prompt, ...]:
    """Read the four forms of `prompt`."""
    items: list[Any]
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        items, names = value, [f"prompt.{i}" for i in range(len(value))]
    elif isinstance(value, str) or (isinstance(value, list) and value):
        items, names = [value], ["prompt"]
    else:
        what = "is empty" if value == [] else f"must be text or token ids, got {shown(value)}"
        raise InvalidRequest(f"prompt: {what}", param="prompt")
    if len(items) * n > limits.max_choices:
        raise InvalidRequest(
            f"prompt: {len(items)} prompts with n = {n} make {len(items) * n} choices; "
            f"the limit is {limits.max_choices}",
            param="prompt",
        )
    prompts = []
    for name, item in zip(names, items, strict=True):
        if type(item) is not type(items[0]):
            raise InvalidRequest(f"{name}: prompts must all be of one kind", param=name)
        prompts.append(await _one_prompt(item, name, model, encode, echo=echo))
    return tuple(prompts)


async def _one_prompt(
    item: object, name: str, model: ServedModel, encode: Encode, *, echo: bool
) -> Prompt:
    if isinstance(item, str):
        if not item:
            raise InvalidRequest(f"{name}: is empty", param=name)
        token_ids = await encode(model, item, True)
        if not token_ids:
            raise InvalidRequest(f"{name}: has no tokens", param=name)
        _check_vocabulary(token_ids, model, name)
        return Prompt(token_ids, item)
    if not isinstance(item, list):
        raise InvalidRequest(f"{name}: must be text or token ids, got {shown(item)}", param=name)
    if not item:
        raise InvalidRequest(f"{name}: is empty", param=name)
    if len(item) > model.max_model_len:
        raise ContextTooLong(
            f"{name}: {len(item)} tokens; {model.id} takes {model.max_model_len} with the answer",
            param=name,
        )
    for i, token_id in enumerate(item):
        if type(token_id) is not int:
            raise InvalidRequest(
                f"{name}.{i}: token ids are whole numbers, got {shown(token_id)}",
                param=f"{name}.{i}",
            )
        if not 0 <= token_id < model.checkpoint.vocab_size:
            raise InvalidRequest(
                f"{name}.{i}: token id {shown(token_id)} is outside the vocabulary of {model.id} "
                f"(0 to {model.checkpoint.vocab_size - 1})",
                param=f"{name}.{i}",
            )
    return Prompt(item, model.tokenizer.decode(item) if echo else "")


def _sampling(
    body: GenerationFields,
    model: ServedModel,
    *,
    max_tokens: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    for field in _EXIT_FIELDS:
        if getattr(body, field) is not None:
            raise InvalidRequest(
                f"{field}: this deployment has no early exits; leave it out", param=field
            )
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            f"response_format: only 'text' is supported, got {shown(body.response_format.type)}",
            param="response_format",
        )
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {min_tokens} is above max_tokens ({max_tokens})", param="min_tokens"
        )
    vocab_size = model.checkpoint.vocab_size
    for i, token_id in enumerate(body.stop_token_ids or ()):
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"stop_token_ids.{i}: {token_id} is outside the vocabulary (0 to {vocab_size - 1})",
                param=f"stop_token_ids.{i}",
            )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        seed=body.seed if body.seed is not None else secrets.randbits(64) + INT64_MIN,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        ignore_eos=bool(body.ignore_eos),
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= 12
        if not is_id or int(key) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: {shown(key)} is not a token id (0 to {vocab_size - 1})",
                param="logit_bias",
            )
        pairs[int(key)] = value
    return tuple(sorted(pairs.items()))


def _stops(stop: str | list[str] | None, limits: IngressConfig) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > limits.max_stop_strings:
        raise InvalidRequest(
            f"stop: {len(stops)} strings; the limit is {limits.max_stop_strings}", param="stop"
        )
    for i, text in enumerate(stops):
        name = "stop" if isinstance(stop, str) else f"stop.{i}"
        if not text:
            raise InvalidRequest(f"{name}: a stop string must not be empty", param=name)
        if len(text) > limits.max_stop_length:
            raise InvalidRequest(
                f"{name}: {len(text)} characters; the limit is {limits.max_stop_length}",
                param=name,
            )
    return tuple(dict.fromkeys(stops))


def _spec(
    body: GenerationFields,
    model: ServedModel,
    limits: IngressConfig,
    request_id: str,
    now_unix_s: float,
    prompts: tuple[Prompt, ...],
    n: int,
    sampling: SamplingParams,
    echo: bool,
) -> GenerateSpec:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream: true", param="stream_options")
    deadline_s = limits.default_deadline_s
    if body.deadline_ms is not None:
        deadline_s = body.deadline_ms / 1000
        if deadline_s > limits.max_deadline_s:
            raise InvalidRequest(
                f"deadline_ms: {body.deadline_ms} is above the limit of "
                f"{int(limits.max_deadline_s * 1000)}",
                param="deadline_ms",
            )
    return GenerateSpec(
        request_id=request_id,
        model=model.id,
        prompts=prompts,
        n=n,
        sampling=sampling,
        stop=_stops(body.stop, limits),
        echo=echo,
        priority=body.priority or 0,
        arrival_unix_s=now_unix_s,
        deadline_unix_s=now_unix_s + deadline_s,
        ignored_fields=ignored_fields(body),
    )
