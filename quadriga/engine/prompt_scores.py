"""What prompts are read for beside their answers, gathered chunk by chunk until a prompt ends.

Log-probabilities of their own tokens, and embeddings: their last hidden states, made one vector.
"""

from __future__ import annotations

from array import array

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
        del self._found.setdefault(chunk.row, [])[first:]  # of a pass that is run again
        return state.prompt_ids[first : first + len(chunk.token_ids)]

    def add(self, row: int, state: SequenceState, logits: torch.Tensor, targets: list[int]) -> None:
        """Score what `begin` returned.

        Args:
            logits: float32 [len(targets), vocab].
        """
        num_top = state.sampling.num_prompt_logprobs or 0
        self._found[row] += token_logprobs(logits, targets, num_top)

    def take(self, row: int) -> list[TokenLogprob] | None:
        """All of a row's, which is forgotten; None where nothing was scored."""
        return self._found.pop(row, None)


def pooled_from(chunk: PrefillChunk, state: SequenceState) -> int | None:
    """The first of a chunk's tokens whose hidden state an embedding needs; None: none of them."""
    if state.sampling.pooling == "mean":
        return 0
    if state.sampling.pooling == "last" and chunk.is_last:
        return len(chunk.token_ids) - 1
    return None


class PooledStates:
    """What is gathered so far, by row: the sum of the hidden states, or the last one."""

    def __init__(self, found: dict[int, torch.Tensor] | None = None) -> None:
        self._found = found or {}

    def copy(self) -> PooledStates:
        """The same, which later chunks do not change."""
        return PooledStates(dict(self._found))

    def add(self, chunk: PrefillChunk, state: SequenceState, states: torch.Tensor) -> None:
        """Take a chunk's hidden states, from the token that `pooled_from` named.

        They are added one by one in float64, so the sum does not depend on where chunks end.

        Args:
            states: After the final norm, [n, hidden].
        """
        wide = states.double()
        if state.sampling.pooling == "mean":
            before = [] if chunk.start == 0 else [self._found[chunk.row][None]]
            wide = torch.cumsum(torch.cat([*before, wide]), dim=0)
        self._found[chunk.row] = wide[-1]

    def take(self, row: int, state: SequenceState) -> array[float] | None:
        """A row's embedding, which is forgotten; None where nothing was gathered."""
        found = self._found.pop(row, None)
        if found is None:
            return None
        count = len(state.prompt_ids) if state.sampling.pooling == "mean" else 1
        return array("f", (found / count).float().cpu().numpy().tobytes())

    def drop(self, row: int) -> None:
        """Forget what was gathered of a row."""
        self._found.pop(row, None)
