"""The two query sets of the BATON paper, with lengths scaled to a model that is small.

Set 1: 120 queries, long input with short output, short input with long output, and both short, in
the ratio 1:1:2; "long" is around 4,000 words, "short" a few dozen to 400. At batch 4 every length
is doubled. Set 2: 30 queries, input and output a few dozen to 200 words, not scaled.

The paper does not say how lengths are spread. Long ones lie within a tenth of the limit; short ones
follow a bounded Pareto distribution (α 1.2), as the bundled tasks do, or a uniform one.

Source: BATON §5.1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quadriga.errors import ConfigError

Spread = Literal["pareto", "uniform"]

LONG_WORDS = (3600, 4000)
SHORT_WORDS = (24, 400)
BRIEF_WORDS = (24, 200)
PARETO_ALPHA = 1.2
DOUBLED_UP_TO = 4
"""Set 1 is doubled at this batch size and below."""


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt, and how many tokens its answer has: it ends there, whatever they are.

    Attributes:
        index: Its place in line; all are there from the start.
    """

    index: int
    prompt_ids: tuple[int, ...]
    num_output: int


class _Lengths:
    """Draws lengths in tokens."""

    def __init__(self, rng: random.Random, spread: Spread, scale: float) -> None:
        self._rng, self._spread, self._scale = rng, spread, scale

    def __call__(self, words: tuple[int, int]) -> int:
        low, high = words
        if self._spread == "pareto" and words != LONG_WORDS:
            share = self._rng.random() * (1.0 - (low / high) ** PARETO_ALPHA)
            drawn = low * float((1.0 - share) ** (-1.0 / PARETO_ALPHA))
        else:
            drawn = self._rng.uniform(low, high)
        return max(2, round(drawn * self._scale))


def mixed_queries(
    *, count: int, batch: int, scale: float, spread: Spread, seed: int, vocab_size: int
) -> list[Query]:
    """Set 1 in random order.

    Args:
        count: A multiple of 4.
        batch: Lengths are doubled where it is `DOUBLED_UP_TO` or less.
        scale: Tokens per word.
    """
    if count % 4:
        raise ConfigError(f"queries: {count} do not split 1:1:2; use a multiple of 4")
    rng = random.Random(seed)
    draw = _Lengths(rng, spread, scale * (2 if batch <= DOUBLED_UP_TO else 1))
    shapes = [(LONG_WORDS, SHORT_WORDS), (SHORT_WORDS, LONG_WORDS)] * (count // 4)
    shapes += [(SHORT_WORDS, SHORT_WORDS)] * (count // 2)
    rng.shuffle(shapes)
    return _queries([(draw(i), draw(o)) for i, o in shapes], rng, vocab_size)


def brief_queries(
    *, count: int, spread: Spread, seed: int, vocab_size: int, words: tuple[int, int] = BRIEF_WORDS
) -> list[Query]:
    """Set 2, a token a word."""
    rng = random.Random(seed)
    draw = _Lengths(rng, spread, 1.0)
    lengths = [(draw(words), draw(words)) for _ in range(count)]
    return _queries(lengths, rng, vocab_size)


def step_ceiling(queries: Sequence[Query], batch: int) -> float:
    """Decode steps of run-to-completion over the fewest that any policy could take.

    No policy with `batch` rows is faster than run-to-completion by more, where a step costs the
    same for every policy and prefill nothing.
    """
    outputs = [q.num_output - 1 for q in queries]
    to_completion = sum(max(outputs[i : i + batch]) for i in range(0, len(outputs), batch))
    return to_completion / max(sum(outputs) / batch, max(outputs))


def _queries(
    lengths: Sequence[tuple[int, int]], rng: random.Random, vocab_size: int
) -> list[Query]:
    low = min(10, vocab_size // 2)  # low ids are often special
    return [
        Query(i, tuple(rng.randrange(low, vocab_size) for _ in range(num_input)), num_output)
        for i, (num_input, num_output) in enumerate(lengths)
    ]
