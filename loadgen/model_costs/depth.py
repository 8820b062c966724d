"""One model at one depth, measured in a process of its own: memory, load, times, answers.

Run by `loadgen.profile`: takes a job as JSON on the command line, says how far it is in JSON lines
on stdout, and writes its answers to a file, for the full depth to read them again.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from loadgen.load.task_suite import TaskPrompt, TaskSuite
from loadgen.model_costs.engine import engine_spec, resident_bytes
from loadgen.model_costs.exits import ExitRecord, read_again, served_exits
from loadgen.model_costs.timing import decode_step_s, prefill_s
from quadriga.catalogue.energy import EnergyMeter
from quadriga.catalogue.records import DepthRecord
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SamplingParams
from quadriga.interfaces import ModelRunner
from quadriga.llm import LLM
from quadriga.scheduling.calibration import Dummies

CONTEXT_TOKENS = 128
PROMPT_TOKENS = 64
MAX_ANSWER_TOKENS = 400
ROW_TOKENS = 1024
ENERGY_S = 0.5
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class DepthJob:
    """What to measure.

    Attributes:
        examples: Task prompts to answer; 0 leaves out accuracy, perplexity and what the full depth
            says of the others.
        answers: Folder; each depth writes `<depth>.json`, and the full one reads the others'.
    """

    model: str
    depth: int
    batches: tuple[int, ...]
    examples: int
    repeats: int
    threads: int
    watts: float
    seed: int
    answers: str


@dataclass(slots=True)
class DepthAnswers:
    """What a depth made of the prompts.

    Attributes:
        token_ids: Per prompt.
        nll: Sum of −log p over all of them.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    nll: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)


def main() -> int:
    """Measure the job on the command line."""
    raw = json.loads(sys.argv[1])
    job = DepthJob(**(raw | {"batches": tuple(raw["batches"])}))
    record, exits = measure(job, _say)
    _say({"record": asdict(record), "exits": {k: asdict(seen) for k, seen in exits.items()}})
    return 0


def measure(
    job: DepthJob, say: Callable[[dict[str, Any]], None]
) -> tuple[DepthRecord, dict[int, ExitRecord]]:
    """Measure one depth; at full depth also where tokens leave, and what it shares with the others.

    Returns:
        The record, and for the full depth {depth: what it says of it}.
    """
    from quadriga.engine import load_runner
    from quadriga.engine.compiled import find_kernels

    checkpoint = read_checkpoint(job.model)
    import torch  # here, so that its own size is not counted as the model's

    torch.set_num_threads(job.threads)
    find_kernels(spec_of(checkpoint, job))  # or the first to be loaded here would take minutes
    before_bytes = resident_bytes()
    started_s = time.perf_counter()
    runner = load_runner(spec_of(checkpoint, job))
    load_s = time.perf_counter() - started_s
    memory_bytes = max(0, resident_bytes() - before_bytes)
    say({"done": 1})
    meter = EnergyMeter("cpu", time.process_time, watts=job.watts)
    steps = dict.fromkeys(job.batches, math.inf)
    for number in range(ROUNDS):  # interleaved: what disturbs the machine hits all alike
        for batch in job.batches:
            found_s = decode_step_s(runner, batch, CONTEXT_TOKENS, job.repeats)
            steps[batch] = min(steps[batch], found_s)
            say({"done": int(number == ROUNDS - 1)})
    joules = joules_per_token(runner, meter, max(job.batches))
    ttft_s = prefill_s(runner, PROMPT_TOKENS, job.repeats)
    accuracy = perplexity = None
    exits: dict[int, ExitRecord] = {}
    if job.examples:
        suite = TaskSuite.make(checkpoint, job.examples, seed=job.seed)
        llm = LLM.over(runner)
        answers = generate(llm, suite.prompts, say)
        right = suite.right(dict(enumerate(answers.token_ids)))
        accuracy = sum(right) / len(right)
        perplexity = math.exp(answers.nll / max(1, answers.num_tokens))
        folder = Path(job.answers)
        (folder / f"{job.depth}.json").write_text(json.dumps(answers.token_ids))
        if job.depth == checkpoint.num_layers:
            if checkpoint.exits.layers:
                exits = served_exits(checkpoint, suite.prompts, job.threads, say)
            for file in sorted(folder.glob("*.json")):
                depth = int(file.stem)
                if depth != job.depth:
                    share = unchanged_share(llm, suite.prompts, json.loads(file.read_text()))
                    exits[depth] = replace(exits[depth], unchanged=share)
    record = DepthRecord(
        depth=job.depth,
        step_s=tuple(steps.items()),
        ttft_s=ttft_s,
        prompt_tokens=PROMPT_TOKENS,
        accuracy=accuracy,
        perplexity=perplexity,
        memory_bytes=memory_bytes,
        load_s=load_s,
        joules_per_token=joules,
        energy_source=meter.read().source if joules is not None else None,
    )
    return record, exits


def spec_of(checkpoint: Checkpoint, job: DepthJob) -> EngineSpec:
    """The engine at the job's depth: every token leaves at its last layer."""
    return engine_spec(
        checkpoint,
        num_rows=max(job.batches),
        row_capacity_tokens=min(ROW_TOKENS, checkpoint.max_model_len),
        depth=job.depth,
        threads=job.threads,
    )


def joules_per_token(runner: ModelRunner, meter: EnergyMeter, batch: int) -> float | None:
    """Energy of decoding, over half a second of it; None where the counter stood still."""
    with Dummies(runner, batch, CONTEXT_TOKENS) as dummies:
        dummies.decode()
        before, num_steps = meter.read(), 0
        end_s = time.perf_counter() + ENERGY_S
        while time.perf_counter() < end_s:
            dummies.decode()
            num_steps += 1
        joules = meter.read().joules - before.joules
    return joules / (num_steps * batch) if joules > 0.0 else None


def generate(
    llm: LLM, prompts: Sequence[TaskPrompt], say: Callable[[dict[str, Any]], None]
) -> DepthAnswers:
    """Answer every prompt greedily, each token from the deepest layer there is."""
    answers = DepthAnswers([[] for _ in prompts])
    most = llm.loop.decode.slots.row_capacity_tokens
    asked = [
        SamplingParams(
            min(MAX_ANSWER_TOKENS, most - len(p.token_ids)), temperature=0.0, num_logprobs=0
        )
        for p in prompts
    ]
    for news in llm.stream([p.token_ids for p in prompts], asked):
        answers.token_ids[news.index] += news.checked().token_ids
        answers.nll -= sum(said.logprob or 0.0 for said in news.logprobs)
        if news.finish_reason is not None:
            say({"done": 1})
    return answers


def unchanged_share(
    llm: LLM, prompts: Sequence[TaskPrompt], answers: Sequence[Sequence[int]]
) -> float:
    """Share of another depth's tokens that this one says too, after the same text."""
    again = read_again(llm, [p.token_ids for p in prompts], answers)
    pairs = [
        pair
        for one, said in zip(answers, again, strict=True)
        for pair in zip(one, said, strict=True)
    ]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
