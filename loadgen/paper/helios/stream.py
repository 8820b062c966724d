"""A stream of task prompts whose mix drifts: lists, stories, sums, everything."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

from loadgen.load.task_suite import Prompt, TaskSuite
from quadriga.checkpoint.folder import Checkpoint
from quadriga.tasks import DEFAULT_MIX, make_example
from quadriga.text.tokenizer import load_tokenizer

Mix = Mapping[str, float]

LISTS: Mix = {"count": 1.0, "repeat": 1.0, "copy": 1.0, "reverse": 1.0, "transform": 1.0}
STORIES: Mix = {"story": 3.0, "repeat": 1.0, "copy": 1.0}
SUMS: Mix = {"sort": 2.0, "add": 2.0, "transform": 1.0}
WAYPOINTS: tuple[Mix, ...] = (LISTS, STORIES, SUMS, DEFAULT_MIX)
"""Passed one after the other at equal distances; in between the shares change bit by bit."""


def mix_at(where: float, waypoints: Sequence[Mix] = WAYPOINTS) -> dict[str, float]:
    """Return each task's share at a place of the stream.

    Args:
        where: 0 is its beginning, 1 its end.
    """
    place = min(max(where, 0.0), 1.0) * (len(waypoints) - 1)
    index = min(int(place), len(waypoints) - 2)
    before, after = (_shares(mix) for mix in list(pairwise(waypoints))[index])
    weight = place - index
    tasks = sorted({*before, *after})
    mixed = {t: (1 - weight) * before.get(t, 0.0) + weight * after.get(t, 0.0) for t in tasks}
    return {task: share for task, share in mixed.items() if share > 0.0}


def drifting_suite(checkpoint: Checkpoint, count: int, *, seed: int) -> TaskSuite:
    """Return `count` task prompts in the order they are sent; a function of its arguments."""
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.id)
    choices = random.Random(f"quadriga:drift:{seed}")
    prompts = []
    for index in range(count):
        mix = mix_at(index / max(1, count - 1))
        task = choices.choices(list(mix), list(mix.values()))[0]
        example = make_example(task, seed=seed, index=index)
        ids = tokenizer.encode(example.text, add_special_tokens=False)
        prompts.append(Prompt(example, ids))
    return TaskSuite(tuple(prompts), tokenizer, frozenset(checkpoint.eos_token_ids))


def _shares(mix: Mix) -> dict[str, float]:
    total = sum(mix.values())
    return {task: weight / total for task, weight in mix.items()}
