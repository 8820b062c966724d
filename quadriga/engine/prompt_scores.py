"""What prompts are read for beside their answers, gathered chunk by chunk until a prompt ends.

Log-probabilities of their own tokens, and embeddings: their last hidden states, made one vector.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch

from quadriga.core.request import SampledToken, SequenceState, TokenLogprob
from quadriga.engine.sampler import token_logprobs
from quadriga.interfaces import PrefillChunk


def wants_scores(chunk: PrefillChunk, state: SequenceState) -> bool:
    """Whether a chunk's tokens are to be scored; a rebuilt sequence was scored before."""
    return state.sampling.num_prompt_logprobs is not None and chunk.depths is None


def pooled_from(chunk: PrefillChunk, state: SequenceState) -> int | None:
    """The first of a chunk's tokens whose hidden state an embedding needs; None: none of them."""
    if state.sampling.pooling == "mean":
        return 0
    if state.sampling.pooling == "last" and chunk.is_last:
        return len(chunk.token_ids) - 1
    return None


class PromptReads:
    """What is gathered so far, by row.

    What a chunk added is replaced where its pass is run again, as a whole or in part.
    """

    def __init__(self) -> None:
        self._scores: dict[int, list[TokenLogprob]] = {}
        # Sums of hidden states before a row's newest chunk and behind it, by position.
        self._sums: dict[int, dict[int, torch.Tensor]] = {}

    def add(
        self,
        chunk: PrefillChunk,
        state: SequenceState,
        logits: Callable[[int], torch.Tensor],
        states: Callable[[int], torch.Tensor],
    ) -> None:
        """Take what a chunk's tokens say.

        Hidden states are added one by one in float64, so a sum does not depend on where chunks end.

        Args:
            logits: Of the first so many tokens: float32 [n, vocab].
            states: Of those from one on, after the final norm: [n, hidden].
        """
        if wants_scores(chunk, state):
            before = [TokenLogprob(state.prompt_ids[0], None)]
            if chunk.start:
                before = self._scores.get(chunk.row, [])[: chunk.start + 1]
            # Hidden states predict the tokens at start + 1, …
            targets = state.prompt_ids[chunk.start + 1 : chunk.stop + 1]
            if targets:
                num_top = state.sampling.num_prompt_logprobs or 0
                before += token_logprobs(logits(len(targets)), targets, num_top)
            self._scores[chunk.row] = before
        first = pooled_from(chunk, state)
        if first is None:
            return
        wide, sums = states(first).double(), {}
        if state.sampling.pooling == "mean":
            if chunk.start:
                sums[chunk.start] = self._sums[chunk.row][chunk.start]
                wide = torch.cat([sums[chunk.start][None], wide])
            wide = torch.cumsum(wide, dim=0)
        self._sums[chunk.row] = sums | {chunk.stop: wide[-1]}

    def end(self, row: int, state: SequenceState, token: SampledToken) -> SampledToken:
        """Give all that was gathered of a row, which is forgotten, to its first token."""
        token.prompt_logprobs = self._scores.pop(row, None)
        sums = self._sums.pop(row, None)
        if sums is not None:
            count = len(state.prompt_ids) if state.sampling.pooling == "mean" else 1
            pooled = (sums[max(sums)] / count).float().cpu()
            token.embedding = array("f", pooled.numpy().tobytes())
        return token

    def drop(self, row: int) -> None:
        """Forget what was gathered of a row."""
        self._scores.pop(row, None)
        self._sums.pop(row, None)
