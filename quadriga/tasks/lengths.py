"""Heavy-tailed sizes: how many items, repetitions or days an example has."""

import random
from dataclasses import dataclass

ALPHA = 1.2  # tail index of the bounded Pareto part


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Distribution of an example's size inside its task's range [lo, hi].

    With probability `uniform_share` the size is uniform (this is what makes long lists learnable),
    else it follows a bounded Pareto law of index `ALPHA` shifted to start at `lo`.

    Attributes:
        uniform_share: Share of uniform sizes, 0 to 1.
        scale: Shrinks the range to [lo, lo + scale·(hi − lo)]; the training curriculum.
        floor: Raises the range's start to lo + floor·(hi − lo); for looking at long answers only.
    """

    uniform_share: float = 0.35
    scale: float = 1.0
    floor: float = 0.0

    def sample(self, rng: random.Random, lo: int, hi: int) -> int:
        """Return a size in [lo + floor·(hi − lo), lo + scale·(hi − lo)]."""
        top = max(lo, round(lo + self.scale * (hi - lo)))
        lo = min(top, round(lo + self.floor * (hi - lo)))
        if rng.random() < self.uniform_share:
            return rng.randint(lo, top)
        # Bounded Pareto on [base, top + base − lo + 1): base sets how fast the head falls.
        base = max(4.0, float(lo))
        cap = base + (top - lo + 1)
        ratio = (base / cap) ** ALPHA
        value = base * (1.0 - rng.random() * (1.0 - ratio)) ** (-1.0 / ALPHA)
        return min(top, lo + int(value - base))


FULL_LENGTHS = LengthMix()
LONG_LENGTHS = LengthMix(uniform_share=1.0, floor=0.5)  # the upper half of every range, uniform
