"""Tokens that the first exit proposes, and the hidden states with which they reached that exit.

A row whose token waits at the first exit may *draft*: it takes the exit's own choice for its next
token, runs the first segment with it, and so on. Later one pass through the other segments, over
all of a row's drafted positions at once, gives the whole model's choices, and the drafts agree with
them up to some position. Nothing of a draft is believed before: the sequence's state, the row's
count of positions and its waiting token are what they would be without it, so to drop a draft is to
forget it. The first segment's KV at drafted positions is written again by whatever runs there next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from quadriga.core.request import SampledToken
from quadriga.engine.kv_cache import Ints
from quadriga.engine.models.decoder import AnyDecoder
from quadriga.engine.sampler import RowSampler, Sampler, SamplerAhead, end_not_finite, sample
from quadriga.engine.transfers import to_device
from quadriga.interfaces import MAX_DRAFTED


class Drafts:
    """Per KV row, what is drafted behind its waiting token.

    Attributes:
        tokens: Row that drafts → its proposed tokens; the newest may not have been run.
        num_run: int64 [num_rows], how many of them went through the first segment.
    """

    def __init__(self, num_rows: int, like: torch.Tensor) -> None:
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.num_run: Ints = np.zeros(num_rows, dtype=np.int64)
        self._like = like
        self._states: torch.Tensor | None = None

    def drop(self, rows: Sequence[int]) -> None:
        """Forget what is drafted in these rows."""
        for row in rows if self.tokens else ():
            if self.tokens.pop(row, None):
                self.num_run[row] = 0

    def next_of(self, rows: Sequence[int]) -> list[int | None]:
        """The proposed token of each row that was not run yet; None without one."""
        tokens, num_run = self.tokens, self.num_run
        return [
            tokens[row][-1] if row in tokens and len(tokens[row]) > num_run[row] else None
            for row in (rows if tokens else ())
        ]

    def keep(self, rows: Ints, states: torch.Tensor) -> None:
        """The newest proposals of these rows reached the exit with these states, [n, hidden]."""
        at = to_device(rows * MAX_DRAFTED + self.num_run[rows], states.device)
        self.states.index_copy_(0, at, states)
        self.num_run[rows] += 1

    @property
    def states(self) -> torch.Tensor:
        """[num_rows · MAX_DRAFTED, hidden], of each row's drafts in turn."""
        if self._states is None:
            hidden = self._like.shape[1]
            self._states = self._like.new_zeros(len(self.num_run) * MAX_DRAFTED, hidden)
        return self._states

    def take(self, rows: Ints, numbers: Ints) -> torch.Tensor:
        """States of drafted tokens, counted from 0 in each row: [n, hidden]."""
        at = to_device(rows * MAX_DRAFTED + numbers, self._like.device)
        return self.states.index_select(0, at)

    def verified(
        self,
        decoder: AnyDecoder,
        depth: int,
        x: torch.Tensor,
        samplers: Sequence[RowSampler],
        rows: Sequence[int],
        spans: Sequence[tuple[int, int]],
    ) -> list[list[SampledToken]]:
        """The whole model's tokens of each row: up to the first that differs from the draft.

        A draw depends on seed and position, so drafts are drawn with the numbers that the whole
        model's tokens are drawn with, and agree where the distributions do.

        Args:
            x: States at the end of the model, [n, hidden], a row's at its span [begin, stop).
        """
        if all(s.is_plain for s in samplers):
            chosen = [SampledToken(t, depth) for t in decoder.best(x, depth)]
            each = [s for s, (b, e) in zip(samplers, spans, strict=True) for _ in range(b, e)]
            end_not_finite(chosen, each, decoder.config.vocab_size)
        else:
            ahead: list[Sampler] = []
            for sampler, row, (begin, stop) in zip(samplers, rows, spans, strict=True):
                drafted = self.tokens[row]
                ahead += [SamplerAhead(sampler, drafted[:i]) for i in range(stop - begin)]
            chosen = sample(decoder.logits(x, depth), ahead, depth)
        found = []
        for row, (begin, stop) in zip(rows, spans, strict=True):
            drafted, count = self.tokens[row], 1
            while begin + count < stop and chosen[begin + count - 1].token_id == drafted[count - 1]:
                count += 1
            found.append(chosen[begin : begin + count])
        return found
