"""Where a model's tokens leave, what each takes, and which of them the whole model says too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.load.task_suite import TaskPrompt
from quadriga.checkpoint.folder import Checkpoint
from quadriga.core.request import SamplingParams
from quadriga.llm import LLM

MAX_ANSWER_TOKENS = 400
ROW_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """What the whole model, served, says of a depth.

    Attributes:
        coverage: Share of the tokens that left there or before; None at full depth, where all have.
        token_s: Seconds of a token that left there; None where none did.
        unchanged: Share of the depth's own tokens that full depth says too.
    """

    coverage: float | None = None
    token_s: float | None = None
    unchanged: float | None = None


def served_exits(
    checkpoint: Checkpoint,
    prompts: Sequence[TaskPrompt],
    threads: int,
    say: Callable[[dict[str, Any]], None],
) -> dict[int, ExitRecord]:
    """Serve the prompts one after the other with every exit tested; depth → what was seen of it.

    Times are processor time of this process.
    """
    llm = LLM(
        str(checkpoint.path),
        engine={
            "threads": threads,
            "device": "cpu",
            "dtype": "float32",
            "compile": "wait",
            "max_model_len": min(ROW_TOKENS, checkpoint.max_model_len),
        },
        exits={"mode": "bounded"},
        decode={"max_slots": 1, "rebatching": "drex"},
        deterministic=True,
    )
    asked = SamplingParams(MAX_ANSWER_TOKENS, temperature=0.0)
    took_s: dict[int, list[float]] = {}
    try:
        for prompt in prompts:
            since_s: float | None = None  # the first token is the prompt's
            for news in llm.stream(prompt.token_ids, asked):
                now_s = time.process_time()
                if since_s is not None:
                    took_s.setdefault(news.checked().exit_layers[-1], []).append(now_s - since_s)
                since_s = now_s
            say({"done": 1})
    finally:
        llm.close()
    total = sum(len(times) for times in took_s.values())
    found = {}
    for depth in (*checkpoint.exits.layers, checkpoint.num_layers):
        times = took_s.get(depth)
        left = sum(len(t) for k, t in took_s.items() if k <= depth)
        found[depth] = ExitRecord(
            left / total if total and depth < checkpoint.num_layers else None,
            statistics.median(times) if times else None,
        )
    return found


def read_again(
    llm: LLM, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[int]]:
    """What a model says in the place of each token of answers: read as prompts, a pass each."""
    asked = SamplingParams(0, temperature=0.0, num_prompt_logprobs=1)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    return [
        [said.top[0][0] for said in (read.checked().prompt_logprobs or ())[len(prompt) :]]
        for prompt, read in zip(prompts, llm.generate(texts, asked, progress=False), strict=True)
    ]
