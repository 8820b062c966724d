"""Task prompts for the papers' experiments, and whether what a model made of them is right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quadriga.checkpoint.folder import Checkpoint
from quadriga.tasks import TASKS, Example, check, make_example
from quadriga.text.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task prompt as token ids."""

    example: Example
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class TaskSuite:
    """Prompts, and the tokenizer that reads the answers.

    Attributes:
        prompts: In the order they are sent; the tasks are mixed.
        eos: End tokens, which are no part of an answer.
    """

    prompts: tuple[Prompt, ...]
    tokenizer: TextTokenizer
    eos: frozenset[int]

    @classmethod
    def make(cls, checkpoint: Checkpoint, count: int, *, seed: int) -> TaskSuite:
        """Return `count` examples, the tasks in equal shares."""
        tokenizer = load_tokenizer(checkpoint.path, checkpoint.id)
        examples = [
            make_example(task, seed=seed, index=index)
            for index in range(-(-count // len(TASKS)))
            for task in TASKS
        ][:count]
        random.Random(seed).shuffle(examples)
        prompts = tuple(
            Prompt(e, tokenizer.encode(e.text, add_special_tokens=False)) for e in examples
        )
        return cls(prompts, tokenizer, frozenset(checkpoint.eos_token_ids))

    def right(self, outputs: Mapping[int, Sequence[int]]) -> list[bool]:
        """Return, per prompt, whether its checker accepts the output token ids."""
        return [
            check(p.example.task, p.example.prompt, self._text(outputs[i]))
            for i, p in enumerate(self.prompts)
        ]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode([t for t in token_ids if t not in self.eos]).strip()
