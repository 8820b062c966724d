"""Log-probabilities of prompts' own tokens, gathered chunk by chunk until a prompt ends."""

from __future__ import annotations

import torch

from quadriga.core.request import SequenceState, TokenLogprob
from quadriga.engine.sampler import token_logprobs
from quadriga.interfaces import PrefillChunk


def wants_scores(chunk: PrefillChunk, state: SequenceState) -> bool:
    """Whether a chunk's tokens are to be scored; a rebuilt sequence was scored before."""
    return state.sampling.num_prompt_logprobs is not None and chunk.depths is None


class PromptScores:
    """The scores computed so far, by row."""

    def __init__(self) -> None:
        self._found: dict[int, list[TokenLogprob]] = {}

    def begin(self, chunk: PrefillChunk, state: SequenceState) -> list[int]:
        """The prompt tokens that a chunk's hidden states predict: those at start + 1, …"""
        if chunk.start == 0:
            self._found[chunk.row] = [TokenLogprob(state.prompt_ids[0], None)]
        first = chunk.start + 1
        return state.prompt_ids[first : first + len(chunk.token_ids)]

    def add(self, row: int, state: SequenceState, logits: torch.Tensor, targets: list[int]) -> None:
        """Score what `begin` returned.

        Args:
            logits: float32 [len(targets), vocab].
        """
        num_top = state.sampling.num_prompt_logprobs or 0
        self._found.setdefault(row, []).extend(token_logprobs(logits, targets, num_top))

    def take(self, row: int) -> list[TokenLogprob] | None:
        """All of a row's, which is forgotten; None where nothing was scored."""
        return self._found.pop(row, None)
