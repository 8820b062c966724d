"""Length distributions that are published as figures only, drawn from small quantile tables.

ARES (Table 2) ran DeepSeek-R1-Distill-Qwen-7B with a cap of 32K tokens on the prompts of ShareGPT
and Alpaca, and gives mean, standard deviation, P50, P90 and P95 of both lengths. The tables below
are our fit to those figures and to the shares in its text, not its data:

    workload            mean (paper)     std (paper)       P50     P90      P95
    ShareGPT  input     301 (305)        1,047 (1,053)     36      920      1,609
              output    7,546 (7,542)    11,727 (12,008)   1,536   32,670   32,679
    Alpaca    input     11 (11)          4 (4)             10      15       18
              output    8,590 (8,596)    13,244 (13,354)   987     32,690   32,691
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = tuple[tuple[float, float], ...]
"""(u, tokens), u ascending from 0 to 1; between two points the length is linear in u."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A workload's two lengths, drawn independently."""

    name: str
    input: Table
    output: Table

    def draw(self, num_requests: int, *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return input and output tokens, each [num_requests]."""
        rng = np.random.default_rng([seed, 0x1E57])
        uniform = rng.random((2, num_requests))
        return _drawn(self.input, uniform[0]), _drawn(self.output, uniform[1])


def _drawn(table: Table, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    at, tokens = zip(*table, strict=True)
    drawn: NDArray[np.float64] = np.rint(np.interp(uniform, at, tokens))
    return np.maximum(drawn, 1.0).astype(np.int64)


SHAREGPT = Lengths(
    name="sharegpt",
    input=(
        (0.0, 4),
        (0.25, 12),
        (0.5, 36),
        (0.8, 80),
        (0.87, 400),
        (0.9, 920),
        (0.95, 1_609),
        (0.99, 3_000),
        (0.999, 11_500),
        (1.0, 24_500),
    ),
    output=(
        (0.0, 20),
        (0.292, 1_000),
        (0.5, 1_536),
        (0.78, 5_600),
        (0.82, 12_000),
        (0.827, 30_000),
        (0.84, 32_600),
        (0.9, 32_670),
        (0.95, 32_679),
        (1.0, 32_768),
    ),
)
ALPACA = Lengths(
    name="alpaca",
    input=((0.0, 5), (0.1, 7), (0.5, 10), (0.9, 15), (0.95, 18), (1.0, 26)),
    output=(
        (0.0, 20),
        (0.25, 420),
        (0.5, 987),
        (0.7, 2_900),
        (0.76, 8_000),
        (0.772, 28_000),
        (0.7815, 32_600),
        (0.9, 32_690),
        (0.95, 32_691),
        (1.0, 32_768),
    ),
)

# Held out: nothing was chosen by these. One hump instead of two. The quantiles of the two clients
# of DeepSeek-R1 with the longest outputs that ServeGen publishes (arXiv 2505.09999; 6 hours of
# their published day, drawn from its histograms).
REASONING = Lengths(
    name="reasoning",
    input=((0.0, 8), (0.5, 63), (0.9, 148), (0.95, 240), (0.99, 707), (1.0, 2_752)),
    output=((0.0, 200), (0.5, 6_566), (0.9, 16_418), (0.95, 19_140), (0.99, 23_202), (1.0, 32_768)),
)
# Made up: sections of books, and translations of about their length.
TRANSLATION = Lengths(
    name="translation",
    input=((0.0, 300), (0.25, 1_500), (0.5, 3_000), (0.9, 8_000), (1.0, 14_000)),
    output=((0.0, 300), (0.25, 1_600), (0.5, 3_300), (0.9, 9_000), (1.0, 16_000)),
)

WORKLOADS: dict[str, Lengths] = {w.name: w for w in (SHAREGPT, ALPACA, REASONING, TRANSLATION)}
