"""Turn the options of `run` into requests for the model that is served."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from loadgen import traces, workload
from loadgen.arrivals import Arrivals
from loadgen.client_http import HttpClient
from loadgen.target import Target, fit_prompts, token_pool
from loadgen.workload import RequestSpec
from quadriga.errors import ConfigError

PROMPT_MAX_TOKENS = 128
TASK_MAX_TOKENS = 1024  # longer than the longest answer of any task
_SECRETS = ("api_key", "api_key_file", "ca_file")


async def build_specs(
    args: argparse.Namespace, arrivals: Arrivals, client: HttpClient, target: Target
) -> list[RequestSpec]:
    """Return the requests, ready to send.

    Raises:
        ConfigError: An option, a file or the service stands in the way.
    """
    if args.trace is not None:
        specs = await _from_trace(args, arrivals, client, target)
    elif args.tasks is not None:
        specs = workload.from_tasks(
            args.tasks,
            arrivals,
            seed=args.seed,
            max_tokens=args.max_tokens or TASK_MAX_TOKENS,
            tasks=args.task_names,
        )
        specs = [_leave_room(spec, target) for spec in specs]
    else:
        specs = workload.from_prompt_file(
            args.prompts,
            arrivals,
            limit=args.limit,
            max_tokens=args.max_tokens or PROMPT_MAX_TOKENS,
            seed=args.seed,
        )
    if args.fit_prompts:
        if args.endpoint != "completions":
            raise ConfigError(
                "--fit-prompts: token ids have no chat form; use --endpoint completions",
                param="fit-prompts",
            )
        specs = await fit_prompts(client, target, specs)
    return workload.shape(
        specs,
        endpoint=args.endpoint,
        stream=args.stream,
        temperature=max(0.0, args.temperature),
        num_choices=args.choices,
        extra=_extra(args.extra),
    )


def describe(args: argparse.Namespace) -> str:
    """Return a short name of the load."""
    if args.trace is not None:
        return f"trace {args.trace.name.removesuffix('.gz').removesuffix('.csv')}"
    if args.tasks is not None:
        return f"{args.tasks} tasks"
    return f"prompts {args.prompts.name}"


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options for the record, without secrets and without folders."""
    config = {k: v for k, v in vars(args).items() if k not in _SECRETS}
    return (
        config
        | {key: config[key].name for key in ("trace", "prompts") if config[key] is not None}
        | {"output": None}
    )


async def _from_trace(
    args: argparse.Namespace, arrivals: Arrivals, client: HttpClient, target: Target
) -> list[RequestSpec]:
    trace = traces.read_trace(args.trace, limit=args.limit)
    if trace.arrivals_s is not None:
        trace = traces.scale_time(trace, args.time_scale)
    elif args.time_scale != 1.0:
        raise ConfigError(
            f"--time-scale: {trace.name} has lengths only; set the rate in --arrivals",
            param="time-scale",
        )
    if args.scale_lengths == "auto":
        if target.max_model_len is None:
            raise ConfigError(
                "--scale-lengths auto: the service states no max_model_len; give a factor",
                param="scale-lengths",
            )
        trace = traces.scale_lengths(trace, traces.context_factor(trace, target.max_model_len))
    elif args.scale_lengths is not None:
        trace = traces.scale_lengths(trace, _factor(args.scale_lengths))
    trace = traces.cap_lengths(trace, max_input=args.cap_input, max_output=args.cap_output)
    if target.max_model_len is not None:
        trace = traces.fit_context(trace, target.max_model_len)
    pool = (
        list(range(args.vocab_size)) if args.vocab_size else await token_pool(client, target.model)
    )
    return workload.from_trace(trace, arrivals, token_ids=pool, seed=args.seed)


def _leave_room(spec: RequestSpec, target: Target) -> RequestSpec:
    """Lower the output limit so that prompt and output fit; a token is a byte at least."""
    if target.max_model_len is None:
        return spec
    room = target.max_model_len - len(spec.prompt)
    return replace(spec, max_tokens=max(1, min(spec.max_tokens, room)))


def _factor(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--scale-lengths: {text!r} must be a number or `auto`", param="scale-lengths"
        ) from None


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"--extra: not JSON: {exc}", param="extra") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"--extra: must be a JSON object, got {text!r:.80}", param="extra")
    return value
