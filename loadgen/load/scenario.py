"""Turn the options of a load into requests for the model that is served."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadgen.load import traces, workload
from loadgen.load.arrivals import Arrivals
from loadgen.load.dialogues import Dialogues
from loadgen.load.sessions import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_THINK_S,
    DEFAULT_TURN_TOKENS,
    DEFAULT_TURNS,
    Conversation,
    SessionShape,
    make_sessions,
    read_sessions,
)
from loadgen.load.workload import RequestSpec
from loadgen.runner import Follow
from loadgen.target import POOL_TEXT, Target, fit_prompts, token_pool
from loadgen.wire.client_http import HttpClient
from quadriga.checkpoint.folder import bundled_models
from quadriga.errors import ConfigError

QUESTIONS = Path(__file__).parent / "questions.txt"
"""English questions, one a line; sent where no load is named."""
NUM_DEFAULT_TASKS = 100
"""Sent instead to a model that knows nothing but the tasks."""
_PROMPT_MAX_TOKENS = 128
_MAX_TOKENS = {
    "prompts": _PROMPT_MAX_TOKENS,
    "sessions FILE": _PROMPT_MAX_TOKENS,
    "tasks": 1024,  # longer than the longest answer of any task
}
"""Load → `--max-tokens` where it is not given."""
_SECRETS = ("api_key", "api_key_file", "ca_file")
_FILES = ("trace", "prompts", "sessions")


# Option → (its default, the loads it is for).
_ONLY_FOR: dict[str, tuple[Any, set[str]]] = {
    "limit": (None, {"trace", "prompts", "sessions FILE"}),
    "time_scale": (1.0, {"trace"}),
    "cap_input": (None, {"trace"}),
    "cap_output": (None, {"trace"}),
    "scale_lengths": (None, {"trace"}),
    "vocab_size": (None, {"trace", "sessions N"}),
    "task_names": (None, {"tasks"}),
    "fit_prompts": (False, {"prompts"}),  # token ids of a task cannot be scored
    "max_tokens": (None, {"prompts", "tasks", "sessions FILE"}),
    "turns": (DEFAULT_TURNS, {"sessions N"}),
    "turn_tokens": (DEFAULT_TURN_TOKENS, {"sessions N"}),
    "answer_tokens": (DEFAULT_ANSWER_TOKENS, {"sessions N"}),
    "think_s": (DEFAULT_THINK_S, {"sessions N", "sessions FILE"}),
}


@dataclass(frozen=True, slots=True)
class Load:
    """What a run sends.

    Attributes:
        specs: The first request of every user, in order.
        dialogues: Makes the further requests of conversations; None: one request per user.
    """

    specs: list[RequestSpec]
    dialogues: Dialogues | None = None

    @property
    def num_requests(self) -> int:
        """In all, if every conversation goes on to its end."""
        return len(self.specs) if self.dialogues is None else self.dialogues.num_requests

    @property
    def follow(self) -> Follow | None:
        return None if self.dialogues is None else self.dialogues.follow

    def cycled(self) -> Iterator[RequestSpec]:
        """Yield the first requests over and over, each as one of its own, cached apart."""
        for cycle in itertools.count():
            first, first_session = cycle * self.num_requests, cycle * len(self.specs)
            for spec in cached_apart(self.specs):
                yield replace(
                    spec,
                    index=spec.index + first,
                    seed=None if spec.seed is None else spec.seed + first,
                    session=None if spec.session is None else spec.session + first_session,
                )

    def fingerprint(self) -> str:
        """Return a hash of all that is sent: two runs with the same one had the same load."""
        digest = hashlib.sha256()
        parts: list[RequestSpec | Conversation] = [*self.specs]
        if self.dialogues is not None:
            parts += self.dialogues.sessions
        for part in parts:
            digest.update(json.dumps(asdict(part), sort_keys=True).encode())
        return digest.hexdigest()


def cached_apart(specs: Sequence[RequestSpec]) -> list[RequestSpec]:
    """Return them with a new `cache_salt`: no prefix that was sent before is cached for them."""
    salt = {"cache_salt": uuid.uuid4().hex}
    return [replace(spec, extra=spec.extra | salt) for spec in specs]


def choose_load(args: argparse.Namespace, model: str) -> None:
    """Where no load is named, name the one that suits the model; and fill in its output limit.

    Raises:
        ConfigError: An option says nothing about that load.
    """
    if _named_load(args) is None:
        if model in bundled_models():
            args.tasks, args.limit = min(args.limit or NUM_DEFAULT_TASKS, NUM_DEFAULT_TASKS), None
        else:
            args.prompts = QUESTIONS
        check_load(args)
    args.max_tokens = args.max_tokens or _MAX_TOKENS.get(str(_named_load(args)))


def check_load(args: argparse.Namespace) -> None:
    """Look at the options before a connection is opened.

    Raises:
        ConfigError: An option cannot be, or its file is not there.
    """
    _extra(args.extra)
    if _named_load(args) is None:
        return
    _refuse_unused(args)
    endpoint = endpoint_of(args)
    if endpoint != "completions" and (args.trace or args.fit_prompts):
        option = "trace" if args.trace else "fit-prompts"
        raise ConfigError(
            f"--{option}: token ids have no chat form; use --endpoint completions", param=option
        )
    if isinstance(args.sessions, Path) and endpoint != "chat":
        raise ConfigError(
            "--endpoint: conversations of a file are messages; use chat", param="endpoint"
        )
    if args.scale_lengths not in (None, "auto"):
        _factor(args.scale_lengths)
    for name in _FILES:
        if isinstance(path := vars(args)[name], Path) and not path.is_file():
            raise ConfigError(f"--{name}: there is no file {path}; mend the path", param=name)


async def build_load(
    args: argparse.Namespace, arrivals: Arrivals, client: HttpClient, target: Target
) -> Load:
    """Return the load, ready to send.

    Raises:
        ConfigError: An option, a file or the service stands in the way.
    """
    extra = _extra(args.extra)
    if args.sessions is not None:
        dialogues = await _dialogues(args, arrivals, client, target, extra)
        return Load(await dialogues.openings(), dialogues)
    if args.trace is not None:
        specs = await _from_trace(args, arrivals, client, target)
    elif args.tasks is not None:
        specs = workload.from_tasks(
            args.tasks,
            arrivals,
            seed=args.seed,
            tasks=args.task_names,
            max_tokens=args.max_tokens,
        )
        specs = [_leave_room(spec, target) for spec in specs]
    else:
        specs = workload.from_prompt_file(
            args.prompts,
            arrivals,
            limit=args.limit,
            seed=args.seed,
            max_tokens=args.max_tokens,
        )
    if args.fit_prompts:
        specs = await fit_prompts(client, target, specs)
    specs = workload.shape(
        specs,
        forms=workload.forms(endpoint_of(args), args.stream),
        temperature=args.temperature,
        num_choices=args.choices,
        extra=extra,
    )
    return Load(specs)


def endpoint_of(args: argparse.Namespace) -> str:
    """Return `--endpoint`, or what suits the load."""
    is_question = args.prompts is not None and workload.is_plain_text(args.prompts)
    is_chat = isinstance(args.sessions, Path) or is_question
    return str(args.endpoint or ("chat" if is_chat else "completions"))


def describe(args: argparse.Namespace) -> str:
    """Return a short name of the load."""
    if args.trace is not None:
        return f"trace {args.trace.name.removesuffix('.gz').removesuffix('.csv')}"
    if args.tasks is not None:
        return f"{args.tasks} tasks"
    if args.sessions is not None:
        is_file = isinstance(args.sessions, Path)
        return f"sessions {args.sessions.name}" if is_file else f"{args.sessions} sessions"
    return f"prompts {args.prompts.name}"


def title_of(args: argparse.Namespace) -> str:
    """Return what stands over tables and plots of the load."""
    return f"{describe(args)} over {args.transport}"


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options for the record, without secrets and without folders."""
    config = {k: v for k, v in vars(args).items() if k not in _SECRETS}
    names = {key: config[key].name for key in _FILES if isinstance(config[key], Path)}
    return config | names | {"endpoint": endpoint_of(args), "output": None, "same_as": None}


def _named_load(args: argparse.Namespace) -> str | None:
    if args.sessions:
        return "sessions FILE" if isinstance(args.sessions, Path) else "sessions N"
    return next((name for name in ("trace", "tasks", "prompts") if vars(args)[name]), None)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raises: ConfigError for an option that says nothing about this load: it would be ignored."""
    load = _named_load(args)
    for name, (default, loads) in _ONLY_FOR.items():
        if load not in loads and getattr(args, name) != default:
            option = name.replace("_", "-")
            fitting = " and ".join(f"--{one}" for one in sorted(loads))
            raise ConfigError(f"--{option}: not for --{load}, but for {fitting}", param=option)
    if args.vocab_size and endpoint_of(args) == "chat":
        raise ConfigError(
            "--vocab-size: not for --endpoint chat, which sends words", param="vocab-size"
        )
    if args.time_scale != 1.0 and args.arrivals not in (None, "trace"):
        raise ConfigError(
            f"--time-scale: not for --arrivals {args.arrivals}, which sets the times itself",
            param="time-scale",
        )


async def _dialogues(
    args: argparse.Namespace,
    arrivals: Arrivals,
    client: HttpClient,
    target: Target,
    extra: dict[str, Any],
) -> Dialogues:
    forms = workload.forms(endpoint_of(args), args.stream)
    if isinstance(args.sessions, Path):
        sessions = read_sessions(
            args.sessions,
            arrivals,
            limit=args.limit,
            think_s=args.think_s,
            seed=args.seed,
            max_tokens=args.max_tokens,
            streams=[stream for stream, _ in forms],
        )
    else:
        shape = SessionShape(args.turns, args.turn_tokens, args.answer_tokens, args.think_s)
        sessions = make_sessions(
            args.sessions,
            arrivals,
            shape,
            forms=forms,
            token_ids=await _pool(args, client, target),
            words=POOL_TEXT.split(),
            seed=args.seed,
        )
    template = RequestSpec(
        index=0,
        arrival_s=0.0,
        prompt="",
        max_tokens=1,
        temperature=args.temperature,
        seed=args.seed,
        num_choices=args.choices,
        extra=extra,
    )
    return Dialogues(sessions, template, target, client)


async def _pool(args: argparse.Namespace, client: HttpClient, target: Target) -> list[int]:
    if args.vocab_size:
        return list(range(args.vocab_size))
    return await token_pool(client, target.model)


async def _from_trace(
    args: argparse.Namespace, arrivals: Arrivals, client: HttpClient, target: Target
) -> list[RequestSpec]:
    trace = traces.read_trace(args.trace, limit=args.limit)
    if args.time_scale != 1.0:
        trace = traces.scale_time(trace, args.time_scale)
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
    pool = await _pool(args, client, target)
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


_LOAD_OPTIONS = "the options of the load, by which answers are checked"
_SET_ELSEWHERE = {
    "model": "--model",
    "prompt": _LOAD_OPTIONS,
    "prompt_token_ids": _LOAD_OPTIONS,
    "messages": _LOAD_OPTIONS,
    "chat": _LOAD_OPTIONS,
    "max_tokens": "--max-tokens",
    "max_completion_tokens": "--max-tokens",
    "temperature": "--temperature",
    "seed": "--seed",
    "n": "--choices",
    "stream": "--stream",
    "stream_options": "--stream",
}
"""Fields of a body that `--extra` does not set, by what sets them."""


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--extra: not JSON: {exc}", param="extra") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"--extra: must be a JSON object, got {text!r:.80}", param="extra")
    for name in value.keys() & _SET_ELSEWHERE.keys():
        raise ConfigError(f"--extra: {name}: set it with {_SET_ELSEWHERE[name]}", param="extra")
    return value
