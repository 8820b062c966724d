"""Are two engines' greedy tokens the same, and if not, was it a tie?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

TIE_LOGITS = 1e-4
"""Two best logits closer than this are a tie: float32 rounding decides, and may differ."""


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first place where two answers part, or where the shorter one ends; else None."""
    pairs = enumerate(zip_longest(ours, theirs))
    return next((i for i, (a, b) in pairs if a != b), None)


@dataclass(slots=True)
class Agreement:
    """How the tokens of two engines compare.

    Attributes:
        tie_logits: Two best logits closer than this are a tie.
        ties: Requests that part at a position where the two best logits tie.
        different: Requests that part anywhere else: (request, position, gap of the logits).
    """

    requests: int
    ties: int
    different: list[tuple[int, int, float]]
    tie_logits: float

    def describe(self) -> str:
        same = self.requests - self.ties - len(self.different)
        text = f"{same}/{self.requests} requests equal"
        if self.ties:
            text += f", {self.ties} part at a tie (two best logits within {self.tie_logits:g})"
        for request, position, gap in self.different[:3]:
            text += f"; request {request} differs at output {position} (logits {gap:.2g} apart)"
        return text


def compare(
    model: Any,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    *,
    tie_logits: float = TIE_LOGITS,
) -> Agreement:
    """Compare request by request; each is judged at the first position that differs.

    Args:
        model: Of `transformers`; it is consulted where tokens part.
    """
    result = Agreement(len(prompts), 0, [], tie_logits)
    for index, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        at = first_difference(a, b)
        if at is None:
            continue
        gap = float("nan")  # one of them ended
        if at < min(len(a), len(b)):
            gap = _gap(model, [*prompt, *a[:at]], a[at], b[at])
        if gap <= tie_logits:
            result.ties += 1
        else:
            result.different.append((index, at, gap))
    return result


def _gap(model: Any, token_ids: Sequence[int], a: int, b: int) -> float:
    """How far below the best logit the lower of two tokens is, after `token_ids`."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, -1]
    return float(logits.max() - torch.minimum(logits[a], logits[b]))
