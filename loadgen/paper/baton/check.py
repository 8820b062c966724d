"""Do two contestants say the same? Batches of another shape round otherwise, so ties may fall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from loadgen.bench.engines.agreement import first_difference
from loadgen.paper.baton.queries import Query
from quadriga.engine.baton.model import CausalModel
from quadriga.errors import InvariantViolation

TIE = 1e-3
"""Logits that lie closer are equal up to float32's rounding over the whole model."""


def count_ties(
    model: CausalModel,
    queries: Sequence[Query],
    wanted: Mapping[int, Sequence[int]],
    got: Mapping[int, Sequence[int]],
) -> int:
    """Queries whose tokens part where the two best logits are equal up to rounding.

    Raises:
        InvariantViolation: Tokens part anywhere else, or some are missing.
    """
    ties = 0
    for query in queries:
        ours, theirs = got.get(query.index, ()), wanted[query.index]
        if len(ours) != query.num_output or len(theirs) != query.num_output:
            raise InvariantViolation(
                f"query {query.index}: {len(ours)} and {len(theirs)} of {query.num_output} tokens"
            )
        parted = first_difference(ours, theirs)
        if parted is None:
            continue
        gap = _logit_gap(model, [*query.prompt_ids, *theirs[:parted]], ours[parted], theirs[parted])
        if gap > TIE:
            raise InvariantViolation(
                f"query {query.index} parts at token {parted}: {ours[parted]} and "
                f"{theirs[parted]}, whose logits lie {gap:.2g} apart"
            )
        ties += 1
    return ties


@torch.no_grad()
def _logit_gap(model: CausalModel, token_ids: Sequence[int], one: int, other: int) -> float:
    """How far below the best logit the lower of two tokens is, in a plain pass."""
    ids = torch.tensor([list(token_ids)])
    logits = model(ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None], None)[0, -1]
    return float(logits.max() - torch.minimum(logits[one], logits[other]))
