"""Turn a body into a `Request`, or say which field broke which limit.

Everything here runs before the request costs anything but parsing and tokenising.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from quadriga.checkpoint.exits import NEVER, ExitParams, read_exit_params
from quadriga.checkpoint.folder import SamplingDefaults
from quadriga.config.ingress import IngressConfig
from quadriga.core.request import SamplingParams
from quadriga.errors import ContextTooLong, InvalidRequest
from serve_app.openai.bodies import check_pieces, ignored_fields, refuse_unsupported, shown
from serve_app.openai.grammars import read_grammar
from serve_app.openai.models import ModelDirectory, ServedModel
from serve_app.openai.schema import (
    INT64_MIN,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationFields,
    RequestFields,
    ToolCallBody,
)
from serve_app.openai.tools import NO_TOOLS, ChatTools, read_tools
from serve_app.openai.unsupported import NO_REASONING
from serve_app.request.request import Request, in_time

DEFAULT_COMPLETION_TOKENS = 16
SLICE_TOKENS = 65_536
"""Token ids that are checked between two turns of the event loop: some milliseconds."""
PROMPTS_AT_ONCE = 8
"""Short prompts of one request that are read between two turns of the event loop."""
MAX_LOGPROBS = 1 << 22
"""Of one answer, alternatives counted: some hundreds of megabytes."""
OPENAI_DEFAULTS = SamplingDefaults()
EXIT_FIELDS = ("exit_threshold", "exit_policy", "max_depth", "sla_tbt_ms", "quality_budget")
ASK_FOR_NOTHING: dict[str, tuple[object, ...]] = {
    "exit_policy": ("lossless", "off"),
    "quality_budget": (0.0,),
}
"""Values of exit fields that every model can give."""


async def completion_request(
    body: CompletionBody,
    limits: IngressConfig,
    models: ModelDirectory,
    *,
    request_id: str,
    now_unix_s: float,
    caller: str = "",
) -> Request:
    """Build the request of a completion.

    Args:
        caller: At whose expense a new grammar is compiled.

    Raises: InvalidRequest, ContextTooLong, UnknownModel.
    """
    model, n = models.find(body.model), _choices(body.n, limits)
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest(
            f"best_of: {body.best_of} must equal n ({n}); ranking more is not supported",
            param="best_of",
        )
    echo = bool(body.echo)
    async with in_time(read_deadline_s(body, limits)):
        prompts, texts = await read_prompts(body.prompt, model, limits, models, n=n, echo=echo)
    longest = max(len(prompt_ids) for prompt_ids in prompts)
    field, wanted = _asked_length(body)
    if wanted is None:
        wanted = max(1, min(DEFAULT_COMPLETION_TOKENS, model.max_model_len - longest))
    if wanted == 0 and not echo:
        raise InvalidRequest("max_tokens: 0 needs echo", param="max_tokens")
    num_logprobs = _logprobs(body.logprobs, limits, "logprobs")
    sampling = _read_sampling(
        body,
        model,
        limits,
        max_tokens=wanted,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_logprobs if echo else None,
    )
    check_context(longest, wanted, model, "prompt", field)
    sampling = await _with_grammar(sampling, body, model, models, limits, caller)
    request = _request(
        body, model, limits, request_id, now_unix_s, prompts, texts, n, sampling, echo
    )
    request.continues = True
    return request


async def chat_request(
    body: ChatBody,
    limits: IngressConfig,
    models: ModelDirectory,
    *,
    request_id: str,
    now_unix_s: float,
    caller: str = "",
) -> Request:
    """Build the request of a chat turn.

    Args:
        caller: As of `completion_request`.

    Raises: InvalidRequest, ContextTooLong, UnknownModel.
    """
    model = models.find(body.model)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs: true", param="top_logprobs")
    num_logprobs = None
    if body.logprobs:
        num_logprobs = _logprobs(body.top_logprobs or 0, limits, "top_logprobs")
    n = _choices(body.n, limits)
    tools = read_tools(body, model) if body.tools or body.tool_choice else NO_TOOLS
    variables = body.chat_template_kwargs or {}
    if (body.model_extra or {}).get("reasoning_effort") == NO_REASONING:
        variables = {"enable_thinking": False} | variables
    text = model.tokenizer.render_chat(plain_messages(body.messages), tools.told, variables)
    async with in_time(read_deadline_s(body, limits)):
        token_ids = await models.tokenize(model, text, False, field="messages")
    if not token_ids:
        raise InvalidRequest("messages: the conversation is empty", param="messages")
    _check_vocabulary(token_ids, model, "messages")
    field, wanted = _asked_length(body)
    if wanted == 0:
        raise InvalidRequest(f"{field}: must be at least 1, not 0", param=field)
    if wanted is None:
        most = model.max_model_len - len(token_ids)
        if num_logprobs is not None:
            most = min(most, MAX_LOGPROBS // (n * (1 + num_logprobs)))
        wanted = max(1, most)
    check_context(len(token_ids), wanted, model, "messages", field)
    sampling = _read_sampling(body, model, limits, max_tokens=wanted, num_logprobs=num_logprobs)
    sampling = await _with_grammar(sampling, body, model, models, limits, caller, tools)
    request = _request(
        body, model, limits, request_id, now_unix_s, [token_ids], [text], n, sampling, False
    )
    request.tools = tools.calling
    return request


async def _with_grammar(
    sampling: SamplingParams,
    body: GenerationFields,
    model: ServedModel,
    models: ModelDirectory,
    limits: IngressConfig,
    caller: str,
    tools: ChatTools = NO_TOOLS,
) -> SamplingParams:
    """Add the grammar that the body asks for, which was tried.

    Raises: InvalidRequest, DeadlineExceeded.
    """
    found = read_grammar(body, tools)
    if found is None:
        return sampling
    grammar, field = found
    async with in_time(read_deadline_s(body, limits)):
        await models.check_grammar(model, grammar, field, caller)
    return replace(sampling, grammar=grammar)


def _asked_length(body: GenerationFields) -> tuple[str, int | None]:
    """The most tokens that the answer may have, and the field that says it."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _choices(n: int | None, limits: IngressConfig) -> int:
    if n is not None and n > largest_n(limits):
        raise InvalidRequest(f"n: {n} is above the limit of {largest_n(limits)}", param="n")
    return n or 1


def largest_n(limits: IngressConfig) -> int:
    """The most choices that one prompt may have."""
    return min(limits.max_n, limits.max_choices)


def _logprobs(wanted: int | None, limits: IngressConfig, field: str) -> int | None:
    if wanted is not None and wanted > limits.max_logprobs:
        raise InvalidRequest(
            f"{field}: {wanted} is above the limit of {limits.max_logprobs}", param=field
        )
    return wanted


def _check_num_logprobs(prompts: list[list[int]], n: int, sampling: SamplingParams) -> None:
    """Raises: InvalidRequest: The answer would have more of them than fit into memory."""
    if sampling.num_logprobs is None:
        return
    echoed = 0 if sampling.num_prompt_logprobs is None else sum(map(len, prompts))
    tokens = n * (len(prompts) * sampling.max_tokens + echoed)
    count = tokens * (1 + sampling.num_logprobs)
    if count > MAX_LOGPROBS:
        raise InvalidRequest(
            f"logprobs: {tokens} tokens with {sampling.num_logprobs} alternatives each are {count} "
            f"log-probabilities, above the limit of {MAX_LOGPROBS}; ask for fewer choices, tokens "
            "or alternatives",
            param="logprobs",
        )


def check_context(
    prompt: int, wanted: int, model: ServedModel, prompt_field: str, field: str
) -> None:
    limit = model.max_model_len
    room = limit - prompt
    if room < min(wanted, 1):
        raise ContextTooLong(
            f"{prompt_field}: the prompt has {prompt} tokens; {model.id} takes {limit} with the "
            f"answer{model.longer_remedy}; shorten it",
            param=prompt_field,
        )
    if wanted > room:
        raise ContextTooLong(
            f"prompt ({prompt} tokens) plus {field} ({wanted}) is {prompt + wanted}; {model.id} "
            f"takes {limit}{model.longer_remedy}; lower {field} to {room} or shorten the prompt",
            param=field,
        )


def _request(
    body: GenerationFields,
    model: ServedModel,
    limits: IngressConfig,
    request_id: str,
    now_unix_s: float,
    prompts: list[list[int]],
    prompt_texts: list[str],
    n: int,
    sampling: SamplingParams,
    echo: bool,
) -> Request:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream: true", param="stream_options")
    options = body.stream_options
    _check_num_logprobs(prompts, n, sampling)
    return Request(
        request_id=request_id,
        model=model.id,
        is_auto=model.is_auto,
        prompts=prompts,
        prompt_texts=prompt_texts,
        n=n,
        sampling=sampling,
        exits=read_exit_fields(body, model),
        stop=_read_stops(body.stop, limits),
        echo=echo,
        priority=body.priority or 0,
        arrival_unix_s=now_unix_s,
        deadline_unix_s=now_unix_s + read_deadline_s(body, limits),
        ignored_fields=ignored_fields(body),
        stream=bool(body.stream),
        usage_chunk=bool(options and options.include_usage),
        usage_in_chunks=bool(options and options.continuous_usage_stats),
        eta_in_chunks=bool(options and options.include_eta),
        return_token_ids=bool(body.return_token_ids),
        cache_salt=body.cache_salt or "",
    )


def read_deadline_s(body: RequestFields, limits: IngressConfig) -> float:
    """Seconds that a request may take. Raises: InvalidRequest."""
    if body.deadline_ms is None:
        return limits.default_deadline_s
    deadline_s = body.deadline_ms / 1000
    if deadline_s > limits.max_deadline_s:
        raise InvalidRequest(
            f"deadline_ms: {body.deadline_ms} is above the limit of "
            f"{int(limits.max_deadline_s * 1000)}",
            param="deadline_ms",
        )
    return deadline_s


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates want them: text content, `developer` as `system`.

    Raises: InvalidRequest for a part that is not text, and for what is not supported.
    """
    plain: list[dict[str, Any]] = []
    calls = [call for message in messages for call in message.tool_calls or ()]
    check_pieces(*(call.function.arguments.encode("utf-8", "replace") for call in calls))
    for i, message in enumerate(messages):
        refuse_unsupported(message.model_extra or {}, message.unsupported, f"messages.{i}.")
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
        elif content is None:
            content = message.refusal
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": content or ""}
        if message.tool_calls:
            if role != "assistant":
                raise InvalidRequest(
                    f"messages.{i}.tool_calls: only of the role assistant, not {role}",
                    param=f"messages.{i}.tool_calls",
                )
            entry["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                entry["reasoning_content" if name == "reasoning" else name] = value
        plain.append(entry)
    return plain


def _plain_call(call: ToolCallBody) -> dict[str, Any]:
    """A call as chat templates want it: with the arguments as an object, where they are one."""
    arguments: Any = call.function.arguments
    with suppress(ValueError):
        arguments = from_json(arguments.strip() or "{}")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


async def read_prompts(
    value: object,
    model: ServedModel,
    limits: IngressConfig,
    models: ModelDirectory,
    *,
    field: str = "prompt",
    n: int = 1,
    echo: bool = False,
) -> tuple[list[list[int]], list[str]]:
    """Read the four forms of `prompt`; returns token ids and texts.

    Args:
        field: Where it is from, for the errors.

    Raises: InvalidRequest, ContextTooLong.
    """
    items: list[Any]
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        items, names = value, [f"{field}.{i}" for i in range(len(value))]
    elif isinstance(value, str) or (isinstance(value, list) and value):
        items, names = [value], [field]
    else:
        what = "is empty" if value == [] else f"must be text or token ids, got {shown(value)}"
        raise InvalidRequest(f"{field}: {what}", param=field)
    if len(items) > limits.max_prompts:
        raise InvalidRequest(
            f"{field}: {len(items)} prompts, above the limit of {limits.max_prompts}; "
            "send them in several requests",
            param=field,
        )
    if len(items) * n > limits.max_choices:
        raise InvalidRequest(
            f"{field}: {len(items)} prompts with n = {n} make {len(items) * n} choices, above the "
            f"limit of {limits.max_choices}; lower n or send fewer prompts",
            param=field,
        )
    prompts: list[list[int]] = []
    texts: list[str] = []
    for name, item in zip(names, items, strict=True):
        if type(item) is not type(items[0]):
            raise InvalidRequest(f"{name}: prompts must all be of one kind", param=name)
        token_ids, text = await _one_prompt(item, name, model, models, echo=echo)
        prompts.append(token_ids)
        texts.append(text)
        if len(prompts) % PROMPTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return prompts, texts


async def _one_prompt(
    item: object, name: str, model: ServedModel, models: ModelDirectory, *, echo: bool
) -> tuple[list[int], str]:
    if isinstance(item, str):
        if not item:
            raise InvalidRequest(f"{name}: is empty", param=name)
        token_ids = await models.tokenize(model, item, True, field=name)
        if not token_ids:
            raise InvalidRequest(f"{name}: has no tokens", param=name)
        _check_vocabulary(token_ids, model, name)
        return token_ids, item
    if not isinstance(item, list):
        raise InvalidRequest(f"{name}: must be text or token ids, got {shown(item)}", param=name)
    if not item:
        raise InvalidRequest(f"{name}: is empty", param=name)
    check_length(len(item), model, name)
    await check_token_ids(item, name, model)
    return item, await models.detokenize(model, item, skip_special_tokens=True) if echo else ""


def check_length(num_tokens: int, model: ServedModel, field: str) -> None:
    """Refuse token ids by their number alone. Raises: ContextTooLong."""
    if num_tokens > model.max_model_len:
        raise ContextTooLong(
            f"{field}: {num_tokens} tokens; {model.id} takes {model.max_model_len} with the answer"
            f"{model.longer_remedy}; shorten it",
            param=field,
        )


async def check_token_ids(items: list[Any], field: str, model: ServedModel) -> None:
    """Check each; after every `SLICE_TOKENS` the event loop has a turn. Raises: InvalidRequest."""
    size = model.checkpoint.vocab_size
    for i, token_id in enumerate(items, 1):
        if type(token_id) is not int:
            raise InvalidRequest(
                f"{field}.{i - 1}: token ids are whole numbers, got {shown(token_id)}",
                param=f"{field}.{i - 1}",
            )
        if not 0 <= token_id < size:
            raise InvalidRequest(
                f"{field}.{i - 1}: token id {shown(token_id)} is outside the vocabulary of "
                f"{model.id} (0 to {size - 1})",
                param=f"{field}.{i - 1}",
            )
        if i % SLICE_TOKENS == 0:
            await asyncio.sleep(0)


def _check_vocabulary(token_ids: list[int], model: ServedModel, field: str) -> None:
    highest = max(token_ids)
    if highest >= model.checkpoint.vocab_size:
        raise InvalidRequest(
            f"{field}: token id {highest} is outside the vocabulary of {model.id} "
            f"(0 to {model.checkpoint.vocab_size - 1})",
            param=field,
        )


def _read_sampling(
    body: GenerationFields,
    model: ServedModel,
    limits: IngressConfig,
    *,
    max_tokens: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Check the sampling fields; what the request leaves out has the deployment's default.

    Raises: InvalidRequest.
    """
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
    is_openai = limits.default_sampling == "openai"
    defaults = OPENAI_DEFAULTS if is_openai else model.checkpoint.sampling
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_given(body.temperature, defaults.temperature),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        min_p=_given(body.min_p, defaults.min_p),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        seed=body.seed if body.seed is not None else secrets.randbits(64) + INT64_MIN,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        stop_token_ids=_stop_token_ids(body, model),
        ignore_eos=bool(body.ignore_eos),
    )


def _stop_token_ids(body: GenerationFields, model: ServedModel) -> tuple[int, ...]:
    """Each once, but for end tokens, by which an answer ends anyhow unless told otherwise."""
    is_free = body.ignore_eos or model.is_auto  # another model may have other ends
    ends = () if is_free else model.checkpoint.eos_token_ids
    return tuple(i for i in dict.fromkeys(body.stop_token_ids or ()) if i not in ends)


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


def _read_stops(stop: str | list[str] | None, limits: IngressConfig) -> tuple[str, ...]:
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
                f"{name}: {len(text)} characters; the limit is {limits.max_stop_length}", param=name
            )
    return tuple(dict.fromkeys(stops))


def read_exit_fields(body: GenerationFields, model: ServedModel) -> ExitParams:
    """Check the exit fields and fill in the model's defaults.

    Raises: InvalidRequest.
    """
    if not model.exits.layers:
        for field in EXIT_FIELDS:
            value = getattr(body, field)
            if value is not None and value not in ASK_FOR_NOTHING.get(field, ()):
                raise InvalidRequest(
                    f"{field}: {model.id} has no early exits here; leave it out", param=field
                )
    threshold, policy, exits = body.exit_threshold, body.exit_policy, model.exits
    depth, full, gap_s = model.depth, model.checkpoint.num_layers, (body.sla_tbt_ms or 0.0) / 1000
    asked = None
    if policy in ("lossless", "off"):
        threshold = NEVER if threshold is None else threshold
        asked = ExitParams(threshold, policy, body.max_depth or 0, gap_s)
    elif policy or body.max_depth or (threshold is not None and threshold < NEVER):
        threshold = exits.threshold if threshold is None else threshold
        asked = ExitParams(threshold, policy or "bounded", body.max_depth or 0, gap_s)
    elif threshold is not None and (exits.mode == "bounded" or depth < full):
        asked = ExitParams(NEVER, "bounded", 0, gap_s)
    return read_exit_params(
        asked,
        exits,
        model.id,
        depth=depth,
        full=full,
        sla_tbt_s=gap_s,
        quality_budget=body.quality_budget or 0.0,
        deterministic=model.is_deterministic,
    )
