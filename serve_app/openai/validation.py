"""Turn a body into a `GenerateSpec`, or say which field broke which limit.

Everything here runs before the request costs anything but parsing and tokenising.
"""

from __future__ import annotations

from quadriga.config.ingress import IngressConfig
from quadriga.core.request import SamplingParams
from quadriga.errors import ContextTooLong, InvalidRequest
from serve_app.openai.bodies import ignored_fields
from serve_app.openai.exit_fields import read_exit_fields
from serve_app.openai.models import ServedModel
from serve_app.openai.prompts import Encode, check_vocabulary, plain_messages, read_prompts
from serve_app.openai.sampling import read_sampling, read_stops
from serve_app.openai.schema import ChatBody, CompletionBody, GenerationFields
from serve_app.request.spec import GenerateSpec, Prompt

DEFAULT_COMPLETION_TOKENS = 16


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
    n = _choices(body.n, limits)
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest(
            f"best_of: {body.best_of} must equal n ({n}); ranking more is not supported",
            param="best_of",
        )
    echo = bool(body.echo)
    prompts = await read_prompts(body.prompt, model, limits, encode, n=n, echo=echo)
    longest = max(len(p.token_ids) for p in prompts)
    wanted = body.max_tokens
    if wanted is None:
        wanted = max(1, min(DEFAULT_COMPLETION_TOKENS, model.max_model_len - longest))
    if wanted == 0 and not echo:
        raise InvalidRequest("max_tokens: 0 needs echo", param="max_tokens")
    num_logprobs = _logprobs(body.logprobs, limits, "logprobs")
    sampling = read_sampling(
        body,
        model,
        limits,
        max_tokens=wanted,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_logprobs if echo else None,
    )
    _check_context(longest, wanted, model, "prompt", "max_tokens")
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
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs: true", param="top_logprobs")
    num_logprobs = None
    if body.logprobs:
        num_logprobs = _logprobs(body.top_logprobs or 0, limits, "top_logprobs")
    n = _choices(body.n, limits)
    text = model.tokenizer.render_chat(plain_messages(body.messages))
    token_ids = await encode(model, text, False, field="messages")
    if not token_ids:
        raise InvalidRequest("messages: the conversation is empty", param="messages")
    check_vocabulary(token_ids, model, "messages")
    field, wanted = "max_completion_tokens", body.max_completion_tokens
    if wanted is None:
        field, wanted = "max_tokens", body.max_tokens
    if wanted == 0:
        raise InvalidRequest(f"{field}: must be at least 1", param=field)
    if wanted is None:
        wanted = max(1, model.max_model_len - len(token_ids))
    _check_context(len(token_ids), wanted, model, "messages", field)
    sampling = read_sampling(body, model, limits, max_tokens=wanted, num_logprobs=num_logprobs)
    prompts = (Prompt(token_ids, text),)
    return _spec(body, model, limits, request_id, now_unix_s, prompts, n, sampling, False)


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


def _check_context(
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
        is_auto=model.is_auto,
        prompts=prompts,
        n=n,
        sampling=sampling,
        exits=read_exit_fields(body, model),
        stop=read_stops(body.stop, limits),
        echo=echo,
        priority=body.priority or 0,
        arrival_unix_s=now_unix_s,
        deadline_unix_s=now_unix_s + deadline_s,
        ignored_fields=ignored_fields(body),
    )
