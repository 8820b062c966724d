"""Optimiser steps as flat tensors: examples of mixed length, grouped so that padding is small."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from quadriga.tasks import Example, LengthMix, sample_examples
from quadriga.training.tokenizer import END_ID, PAD_ID

_GROUP_RATIO = 0.82  # a group holds rows at least this share of its longest


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One step's tokens.

    Attributes:
        tokens: [num_tokens] int64, rows of every group one after the other, then filler.
        positions: [num_tokens] int64, position inside the row.
        groups: (rows, row length) of each group.
        answers: [num_answers] int64, flat index of the token whose successor is learned.
        targets: [num_answers] int64, that successor.
        weights: [num_answers] fp32, loss weight.
        next_index: First example not used, where the following batch starts.
    """

    tokens: Tensor
    positions: Tensor
    groups: list[tuple[int, int]]
    answers: Tensor
    targets: Tensor
    weights: Tensor
    next_index: int

    def to(self, device: torch.device) -> "TrainingBatch":
        """Return the batch on a device."""
        return TrainingBatch(
            self.tokens.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            self.groups,
            self.answers.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.weights.to(device, non_blocking=True),
            self.next_index,
        )


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """Token ids of an example's text, and of its continuation with the end token."""

    prompt: list[int]
    answer: list[int]


def encode(tokenizer: Tokenizer, examples: list[Example]) -> list[EncodedExample]:
    """Tokenise examples as they are served: the text, then what follows it and the end token."""
    prompts = tokenizer.encode_batch([example.text for example in examples])
    answers = tokenizer.encode_batch([example.continuation for example in examples])
    return [
        EncodedExample(prompt.ids, [*answer.ids, END_ID])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def group_rows(lengths: list[int]) -> list[list[int]]:
    """Partition row indices into groups of similar length, longest first."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    for row in order:
        if groups and lengths[row] >= _GROUP_RATIO * lengths[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def pack(
    rows: list[EncodedExample], *, end_weight: float, num_tokens: int, next_index: int
) -> TrainingBatch:
    """Lay rows out flat; `num_tokens` below what they need is raised to it."""
    tokens: list[int] = []
    positions: list[int] = []
    answers: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    shapes = []
    # The last token of a row is only a target, so a row is one shorter than its example.
    for group in group_rows([len(row.prompt) + len(row.answer) - 1 for row in rows]):
        length = len(rows[group[0]].prompt) + len(rows[group[0]].answer) - 1
        shapes.append((len(group), length))
        for index in group:
            prompt, answer = rows[index].prompt, rows[index].answer
            start = len(tokens)
            tokens += prompt + answer[:-1]
            tokens += [PAD_ID] * (length - (len(tokens) - start))
            positions += range(length)
            answers += range(start + len(prompt) - 1, start + len(prompt) - 1 + len(answer))
            targets += answer
            weights += [1.0] * (len(answer) - 1) + [end_weight]
    filler = max(0, num_tokens - len(tokens))
    return TrainingBatch(
        torch.tensor(tokens + [PAD_ID] * filler),
        torch.tensor(positions + [0] * filler),
        shapes,
        torch.tensor(answers),
        torch.tensor(targets),
        torch.tensor(weights),
        next_index,
    )


def next_batch(
    tokenizer: Tokenizer,
    *,
    seed: int,
    start: int,
    mix: Mapping[str, float],
    lengths: LengthMix,
    reworded_share: float = 0.0,
    tokens_per_step: int,
    end_weight: float,
) -> TrainingBatch:
    """Return the batch that begins with example `start` of the stream; a pure function."""
    stream = sample_examples(
        seed=seed, start=start, mix=mix, lengths=lengths, reworded_share=reworded_share
    )
    rows: list[EncodedExample] = []
    sizes: list[int] = []
    while True:
        fresh = encode(tokenizer, list(itertools.islice(stream, 16)))
        for row in fresh:
            size = len(row.prompt) + len(row.answer) - 1
            if _padded([*sizes, size]) > tokens_per_step and rows:
                return pack(
                    rows,
                    end_weight=end_weight,
                    num_tokens=tokens_per_step,
                    next_index=start + len(rows),
                )
            rows.append(row)
            sizes.append(size)


def _padded(sizes: list[int]) -> int:
    return sum(len(group) * sizes[group[0]] for group in group_rows(sizes))
