"""What is sent: one `RequestSpec` per request, made from a trace, a prompt file or the tasks."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loadgen.arrivals import Arrivals
from loadgen.traces import Trace
from quadriga.errors import ConfigError

Endpoint = Literal["completions", "chat"]
MAX_PROMPT_FILE_ROWS = 1_000_000
MAX_PROMPT_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request, independent of the transport.

    Attributes:
        arrival_s: When to send it, from the start of the run; closed loops send when a place is
            free and ignore it.
        prompt: Text, or token ids (`completions` only).
        prompt_tokens: Number the service must report; None where it is not known.
        ignore_eos: The output is then exactly `max_tokens` long.
        task: Name of the task that scores the answer; None is unscored unless `answer` is set.
        answer: Expected text, for prompts of a file.
        extra: Further fields of the request body, as given on the command line.
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
    from quadriga.training.tasks import DEFAULT_MIX, TASKS, sample_examples

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
            prompt=example.prompt + "\n",
            max_tokens=max_tokens or 0,
            seed=seed + index,
            task=example.task,
        )
        for index, example in enumerate(examples)
    ]


def from_prompt_file(
    path: Path, arrivals: Arrivals, *, limit: int | None, max_tokens: int, seed: int
) -> list[RequestSpec]:
    """Requests from JSON lines (or gzip): `prompt`, and optionally `answer`, `task`, `max_tokens`.

    `completion` and other fields are ignored.

    Raises:
        ConfigError: Naming file, line, field and value.
    """
    rows = _read_rows(path, limit)
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


def shape(
    specs: Sequence[RequestSpec],
    *,
    endpoint: Literal["completions", "chat", "both"],
    stream: Literal["true", "false", "both"],
    temperature: float,
    num_choices: int,
    extra: dict[str, Any],
) -> list[RequestSpec]:
    """Set how the requests are asked; `both` alternates, so that one run covers every form."""
    endpoints: list[Endpoint] = ["completions", "chat"] if endpoint == "both" else [endpoint]
    streams = {"true": [True], "false": [False], "both": [True, False]}[stream]
    forms = list(itertools.product(streams, endpoints))
    shaped = []
    for spec in specs:
        is_stream, wanted = forms[spec.index % len(forms)]
        # Token ids have no chat form.
        chosen = wanted if isinstance(spec.prompt, str) else "completions"
        chat = chosen == "chat"
        shaped.append(
            replace(
                spec,
                endpoint=chosen,
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


def _read_rows(path: Path, limit: int | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_PROMPT_LINE_BYTES + 1):
                number += 1
                if len(rows) == (limit or MAX_PROMPT_FILE_ROWS):
                    break
                if line.strip():
                    rows.append(_check_row(line, f"{path}, line {number}"))
    except (OSError, EOFError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}", param="prompts") from exc
    if not rows:
        raise ConfigError(f"{path}: no prompts in it", param="prompts")
    return rows


def _check_row(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_PROMPT_LINE_BYTES:
        raise ConfigError(f"{where}: over {MAX_PROMPT_LINE_BYTES} bytes", param="prompts")
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise ConfigError(f"{where}: not JSON: {exc}", param="prompts") from exc
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be a JSON object", param="prompts")
    for name in ("prompt", "answer", "task"):
        value = row.get(name)
        if not (isinstance(value, str) or (value is None and name != "prompt")):
            raise ConfigError(f"{where}: {name} must be a string; got {value!r:.80}", param=name)
    if not row["prompt"]:
        raise ConfigError(f"{where}: prompt is empty", param="prompt")
    limit = row.get("max_tokens", 1)
    if type(limit) is not int or limit < 1:
        raise ConfigError(
            f"{where}: max_tokens must be a whole number of 1 or more; got {limit!r:.80}",
            param="max_tokens",
        )
    return row
