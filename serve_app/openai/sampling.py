"""Sampling parameters and stop strings of a request, checked against model and deployment."""

from __future__ import annotations

import secrets

from quadriga.checkpoint.folder import SamplingDefaults
from quadriga.config.ingress import IngressConfig
from quadriga.core.request import SamplingParams
from quadriga.errors import InvalidRequest
from serve_app.openai.bodies import shown
from serve_app.openai.models import ServedModel
from serve_app.openai.schema import INT64_MIN, GenerationFields

OPENAI_DEFAULTS = SamplingDefaults()


def read_sampling(
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


def read_stops(stop: str | list[str] | None, limits: IngressConfig) -> tuple[str, ...]:
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
