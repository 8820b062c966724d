"""What is sent: one `RequestSpec` per request, made from a trace, a prompt file or the tasks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loadgen.load.arrivals import Arrivals
from loadgen.load.json_lines import read_objects, read_texts
from loadgen.load.traces import MAX_TOKENS, Trace
from quadriga.errors import ConfigError

Endpoint = Literal["completions", "chat"]
Form = tuple[bool, Endpoint]
"""(streamed, endpoint): how a request is asked."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request, independent of the transport.

    Attributes:
        arrival_s: When its user begins, from the start of the run; closed loops begin when a place
            is free and ignore it.
        prompt: Text, or token ids (`completions` only).
        history: (role, text) of the messages ahead of the prompt (`chat` only).
        prompt_tokens: Number the service must report; None where it is not known.
        ignore_eos: The output is then exactly `max_tokens` long.
        task: Name of the task that scores the answer; None is unscored unless `answer` is set.
        answer: Expected text, for prompts of a file.
        extra: Further fields of the request body, as given on the command line.
        session: Number of the conversation it belongs to; None for a request on its own.
        turn: Its place in the conversation, from 0.
        dropped_turns: Oldest turns that its prompt leaves out, to fit the context.
        think_s: Seconds from the end of the answer before it to its sending.
    """

    index: int
    arrival_s: float
    prompt: str | list[int]
    max_tokens: int
    prompt_tokens: int | None = None
    endpoint: Endpoint = "completions"
    stream: bool = True
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int | None = None
    num_choices: int = 1
    task: str | None = None
    answer: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    history: tuple[tuple[str, str], ...] = ()
    session: int | None = None
    turn: int = 0
    dropped_turns: int = 0
    think_s: float = 0.0


def from_trace(
    trace: Trace, arrivals: Arrivals, *, token_ids: Sequence[int], seed: int
) -> list[RequestSpec]:
    """Requests with exactly the trace's lengths: synthetic prompts, end-of-sequence ignored.

    Args:
        token_ids: Ids the prompts are drawn from, uniformly.
        seed: Same seed, same prompts and arrivals.
    """
    times = arrivals.times_s(len(trace), seed=seed, trace_times_s=trace.arrivals_s)
    pool = np.asarray(token_ids, dtype=np.int64)
    rng = np.random.default_rng([seed, 0x9407])
    specs = []
    for index in range(len(trace)):
        length = int(trace.input_tokens[index])
        specs.append(
            RequestSpec(
                index=index,
                arrival_s=float(times[index]),
                prompt=rng.choice(pool, length).tolist(),
                prompt_tokens=length,
                max_tokens=int(trace.output_tokens[index]),
                ignore_eos=True,
                seed=seed + index,
            )
        )
    return specs


def from_tasks(
    num_requests: int, arrivals: Arrivals, *, seed: int, max_tokens: int | None, tasks: str | None
) -> list[RequestSpec]:
    """Task prompts whose answers a program scores.

    Args:
        max_tokens: Limit per answer; None leaves room for the longest task answer.
        tasks: Comma-separated task names; None draws from all of them equally.

    Raises:
        ConfigError: A task of that name does not exist.
    """
    from quadriga.tasks import DEFAULT_MIX, TASKS, sample_examples

    names = tasks.split(",") if tasks else list(DEFAULT_MIX)
    if unknown := sorted(set(names) - set(TASKS)):
        raise ConfigError(
            f"--task-names: {', '.join(unknown)} unknown; there are {', '.join(TASKS)}",
            param="task-names",
        )
    mix = dict.fromkeys(names, 1.0)
    times = arrivals.times_s(num_requests, seed=seed)
    examples = itertools.islice(sample_examples(seed=seed, mix=mix), num_requests)
    return [
        RequestSpec(
            index=index,
            arrival_s=float(times[index]),
            prompt=example.text,
            max_tokens=max_tokens or 0,
            seed=seed + index,
            task=example.task,
        )
        for index, example in enumerate(examples)
    ]


def from_prompt_file(
    path: Path, arrivals: Arrivals, *, limit: int | None, max_tokens: int, seed: int
) -> list[RequestSpec]:
    """Requests from a text file of a prompt a line, or from JSON lines; either may be packed.

    JSON lines have `prompt`, and optionally `answer`, `task`, `max_tokens`; `completion` and other
    fields are ignored.

    Raises:
        ConfigError: Naming file, line, field and value.
    """
    rows: list[dict[str, Any]]
    if is_plain_text(path):
        rows = [{"prompt": text} for text in read_texts(path, param="prompts", limit=limit)]
    else:
        lines = read_objects(path, param="prompts", limit=limit)
        rows = [_check_row(row, where) for where, row in lines]
    times = arrivals.times_s(len(rows), seed=seed)
    return [
        RequestSpec(
            index=index,
            arrival_s=float(times[index]),
            prompt=row["prompt"],
            max_tokens=row.get("max_tokens", max_tokens),
            seed=seed + index,
            task=row.get("task"),
            answer=row.get("answer"),
        )
        for index, row in enumerate(rows)
    ]


def is_plain_text(path: Path) -> bool:
    """Whether the name says that each line is a prompt as it stands."""
    return path.name.removesuffix(".gz").endswith(".txt")


def forms(endpoint: str, stream: str) -> list[Form]:
    """Return the forms that requests take in turns; `both` means each of two."""
    endpoints: list[Endpoint] = ["completions", "chat"]
    if endpoint != "both":
        endpoints = [one for one in endpoints if one == endpoint]
    streams = {"true": [True], "false": [False], "both": [True, False]}[stream]
    return list(itertools.product(streams, endpoints))


def shape(
    specs: Sequence[RequestSpec],
    *,
    forms: Sequence[Form],
    temperature: float,
    num_choices: int,
    extra: dict[str, Any],
) -> list[RequestSpec]:
    """Set how the requests are asked, in turns, so that one run covers every form."""
    shaped = []
    for spec in specs:
        is_stream, endpoint = forms[spec.index % len(forms)]
        chat = endpoint == "chat"
        shaped.append(
            replace(
                spec,
                endpoint=endpoint,
                stream=is_stream,
                temperature=temperature,
                num_choices=num_choices,
                extra=extra,
                # The chat template brings its own line end and adds tokens of its own.
                prompt=spec.prompt.rstrip("\n")
                if chat and spec.task and isinstance(spec.prompt, str)
                else spec.prompt,
                prompt_tokens=None if chat else spec.prompt_tokens,
            )
        )
    return shaped


def _check_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    from quadriga.tasks import TASKS

    for name in ("prompt", "answer", "task"):
        value = row.get(name)
        if not (isinstance(value, str) or (value is None and name != "prompt")):
            raise ConfigError(f"{where}: {name} must be a string; got {value!r:.80}", param=name)
    if (task := row.get("task")) is not None and task not in TASKS:
        known = ", ".join(TASKS)
        raise ConfigError(f"{where}: task must be one of {known}; got {task!r:.80}", param="task")
    if not row["prompt"]:
        raise ConfigError(f"{where}: prompt is empty", param="prompt")
    limit = row.get("max_tokens", 1)
    if type(limit) is not int or not 1 <= limit <= MAX_TOKENS:
        raise ConfigError(
            f"{where}: max_tokens must be a whole number in 1..{MAX_TOKENS}; got {limit!r:.80}",
            param="max_tokens",
        )
    return row
