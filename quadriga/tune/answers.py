"""What the model says to the prompts: generated once, at full depth, and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quadriga.checkpoint.exits import FULL_DEPTH
from quadriga.core.request import SamplingParams
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.files import cut_half_line
from quadriga.llm import LLM
from quadriga.tune.prompts import TunePrompt

ANSWERS_FILE = "answers.jsonl"
_PROMPTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """One generated answer.

    Attributes:
        id: Of its prompt.
        has_ended: By itself; else it was cut at the most tokens.
    """

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]
    has_ended: bool

    @property
    def token_ids(self) -> list[int]:
        """All that has to be run to see the state that makes each token of the answer."""
        return self.prompt_ids + self.answer_ids[:-1]


def native(llm: LLM) -> NativeRunner:
    """Its runner, which is the native one."""
    assert isinstance(llm.runner, NativeRunner)
    return llm.runner


def generate_answers(
    llm: LLM,
    prompts: Sequence[TunePrompt],
    work: Path,
    *,
    max_tokens: int,
    temperature: float | None,
    seed: int,
    advance: Callable[[int], object],
) -> list[OwnAnswer]:
    """Answer all prompts that are not answered in `work` yet; returns all in the prompts' order.

    Prompts that are too long for the model are left out.

    Args:
        temperature: None samples as the checkpoint recommends.
        advance: Called with the number of prompts done.
    """
    assert llm.tokenizer is not None
    file = work / ANSWERS_FILE
    known = read_answers(file)
    advance(len([p for p in prompts if p.id in known]))
    todo = [(i, p) for i, p in enumerate(prompts) if p.id not in known]
    sampling = llm.runner.spec.checkpoint.sampling
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    most = llm.runner.row_capacity_tokens
    with file.open("a", encoding="utf-8") as out:
        for start in range(0, len(todo), _PROMPTS_AT_ONCE):
            asked: list[tuple[str, list[int], SamplingParams]] = []
            for index, prompt in todo[start : start + _PROMPTS_AT_ONCE]:
                try:
                    ids = llm.tokenizer.prompt_ids(prompt.content)
                except QuadrigaError as exc:
                    raise ConfigError(
                        f"--prompts: {prompt.id}: {exc.message}", param="prompts"
                    ) from exc
                if not ids or len(ids) + max_tokens > most:
                    advance(1)
                    continue
                params = SamplingParams(max_tokens, **asdict(sampling))
                asked.append((prompt.id, ids, replace(params, seed=seed * 1_000_003 + index)))
            said: dict[int, list[int]] = {index: [] for index in range(len(asked))}
            given = [params for *_, params in asked]
            news = llm.stream([ids for _, ids, _ in asked], given, exits=FULL_DEPTH)
            for output in news if asked else ():
                said[output.index] += output.token_ids
                if output.finish_reason is None:
                    advance(output.error is not None)
                    continue
                name, ids, _ = asked[output.index]
                answer = OwnAnswer(
                    name, ids, said.pop(output.index), output.finish_reason.value == "stop"
                )
                out.write(json.dumps(asdict(answer)) + "\n")
                out.flush()
                known[name] = answer
                advance(1)
    return [known[p.id] for p in prompts if p.id in known]


def read_answers(file: Path) -> dict[str, OwnAnswer]:
    """By the prompts' ids; a last line that was cut off by the end of a run does not count."""
    if not file.is_file():
        return {}
    cut_half_line(file)
    answers = [OwnAnswer(**json.loads(line)) for line in file.read_bytes().splitlines()]
    return {answer.id: answer for answer in answers}
