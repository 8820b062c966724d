"""The tokens that left in a pass, for those who want to look at their hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quadriga.core.request import SequenceState
from quadriga.engine.sampler import RowSampler


@dataclass(frozen=True, slots=True)
class ExitedTokens:
    """The tokens that left in the last pass.

    Attributes:
        depth: Layers run for them.
        samplers: Of their rows, and maybe of others.
        hidden: [len(samplers), hidden], as they left the last layer run, before any norm.
        chosen: Indices into both, where not all of them left.
    """

    depth: int
    samplers: Sequence[RowSampler]
    hidden: torch.Tensor
    chosen: Sequence[int] | None = None

    @property
    def states(self) -> list[SequenceState]:
        """Their sequences."""
        if self.chosen is None:
            return [sampler.state for sampler in self.samplers]
        return [self.samplers[i].state for i in self.chosen]

    @property
    def of_states(self) -> torch.Tensor:
        """Parallel to `states`: [n, hidden]; good until the next pass."""
        return self.hidden if self.chosen is None else self.hidden[list(self.chosen)]
