"""Seeded tasks with answers that a program can check.

`make_example(task, seed=..., index=...)` is a pure function of its arguments: the same call gives
the same example on every machine. `check(task, prompt, answer)` judges any answer text, so load
generators can score what a service returned. Neither torch nor ray is loaded.

`Example.text` is what a model is sent, line end included; no client adds one.

    >>> example = make_example("count", seed=1, index=0)
    >>> check(example.task, example.prompt, example.answer)
    True
"""

from quadriga.tasks.lengths import FULL_LENGTHS, LONG_LENGTHS, LengthMix
from quadriga.tasks.registry import (
    DEFAULT_MIX,
    LINE_END,
    TASKS,
    Example,
    check,
    make_example,
    make_reworded_example,
    sample_examples,
    size_of,
)

__all__ = [
    "DEFAULT_MIX",
    "FULL_LENGTHS",
    "LINE_END",
    "LONG_LENGTHS",
    "TASKS",
    "Example",
    "LengthMix",
    "check",
    "make_example",
    "make_reworded_example",
    "sample_examples",
    "size_of",
]
