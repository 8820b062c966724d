"""The rows at the exit that was run last with its logits, and the tokens that left there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quadriga.checkpoint.exits import Criterion
from quadriga.core.request import SampledToken, SequenceState
from quadriga.engine.models.decoder import AnyDecoder, Candidates, top_two
from quadriga.engine.sampler import Sampler, choose, end_not_finite, process
from quadriga.engine.transfers import index_on


@dataclass(slots=True)
class ExitLogits:
    """Rows at an exit; good until the next pass.

    Attributes:
        depth: Layers run.
        segment: The one that ends here.
        index: Row → its place in `found`, `samplers` and `hidden`.
        samplers: Of the rows.
        is_plain: All of the samplers are.
        hidden: [n, hidden], as the rows reached the exit.
    """

    depth: int
    segment: int
    index: dict[int, int]
    found: Candidates
    samplers: Sequence[Sampler]
    is_plain: bool
    hidden: torch.Tensor

    @classmethod
    def look(
        cls,
        decoder: AnyDecoder,
        depth: int,
        segment: int,
        rows: Sequence[int],
        samplers: Sequence[Sampler],
        hidden: torch.Tensor,
    ) -> ExitLogits:
        """Run the exit's head."""
        is_plain = all(s.is_plain for s in samplers)
        index = dict(zip(rows, range(len(rows)), strict=True))
        found = decoder.candidates(hidden, depth)
        if not is_plain and (changed := process(found.logits, samplers)):
            # Of these rows alone: what a row is sure of does not depend on its company.
            at = index_on(hidden.device, changed)
            found.probs[changed] = top_two(found.logits.index_select(0, at))
        return cls(depth, segment, index, found, samplers, is_plain, hidden)

    def confidences(self, criterion: Criterion) -> list[float]:
        """How sure the exit is of each row's token."""
        probs = self.found.probs
        sure = probs[:, 0] - probs[:, 1] if criterion == "margin" else probs[:, 0]
        confidences: list[float] = sure.tolist()
        return confidences

    def places(self, rows: Sequence[int]) -> list[int] | None:
        """Where the rows are in `hidden`; None where not all of them are here."""
        try:
            return [self.index[row] for row in rows]
        except KeyError:
            return None

    def sample(self, places: Sequence[int]) -> list[SampledToken]:
        """The tokens of those who leave here."""
        samplers = [self.samplers[i] for i in places]
        if self.is_plain:
            best = self.found.best.tolist()
            tokens = [SampledToken(best[i], self.depth) for i in places]
            end_not_finite(tokens, samplers, self.found.logits.shape[-1])
            return tokens
        at_exit = index_on(self.hidden.device, places)
        return choose(self.found.logits.index_select(0, at_exit), samplers, self.depth)


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
    samplers: Sequence[Sampler]
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
        if self.chosen is None:
            return self.hidden
        return self.hidden.index_select(0, index_on(self.hidden.device, self.chosen))
