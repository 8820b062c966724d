"""Are two engines' greedy tokens the same, and if not, was it a tie?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from loadgen.bench.engines.workloads import Workload

TIE_LOGITS = 1e-4
"""Two best logits closer than this are a tie: float32 rounding decides, and may differ."""


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first place where two answers part, or where the shorter one ends; else None."""
    pairs = enumerate(zip_longest(ours, theirs))
    return next((i for i, (a, b) in pairs if a != b), None)


@dataclass(slots=True)
class Agreement:
    """How a workload's tokens compare with the reference's.

    Attributes:
        ties: Requests that part at a position where the two best logits tie.
        different: Requests that part anywhere else: (request, position, gap of the logits).
    """

    requests: int
    ties: int
    different: list[tuple[int, int, float]]

    def describe(self) -> str:
        same = self.requests - self.ties - len(self.different)
        text = f"{same}/{self.requests} requests equal to transformers"
        if self.ties:
            text += f", {self.ties} part at a tie (two best logits within {TIE_LOGITS:g})"
        for request, position, gap in self.different[:3]:
            text += f"; request {request} differs at output {position} (logits {gap:.2g} apart)"
        return text


class Reference:
    """The `transformers` model, consulted where tokens part."""

    def __init__(self, checkpoint: Path) -> None:
        import torch

        from loadgen.bench.engines.hf_transformers import load_model

        self._torch = torch
        self._model = load_model(checkpoint)

    def compare(
        self, workload: Workload, ours: Sequence[list[int]], theirs: Sequence[list[int]]
    ) -> Agreement:
        """Compare request by request; each is judged at the first position that differs."""
        result = Agreement(len(workload.requests), 0, [])
        for index, (request, a, b) in enumerate(zip(workload.requests, ours, theirs, strict=True)):
            at = first_difference(a, b)
            if at is None:
                continue
            if at == min(len(a), len(b)):
                result.different.append((index, at, float("nan")))
                continue
            gap = self._gap(request.prompt + a[:at], a[at], b[at])
            if gap <= TIE_LOGITS:
                result.ties += 1
            else:
                result.different.append((index, at, gap))
        return result

    def _gap(self, token_ids: list[int], a: int, b: int) -> float:
        """Distance of two tokens' logits after `token_ids`; infinite unless one is the best."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([token_ids])).logits[0, -1]
        best = float(logits.max())
        if max(float(logits[a]), float(logits[b])) < best - TIE_LOGITS:
            return float("inf")
        return abs(float(logits[a]) - float(logits[b]))
