"""A sequence that was lost is begun anew: when, and how one knows that nobody has it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from quadriga.errors import QuadrigaError, ReplicaDied
from serve_app.request.cluster import UNREACHABLE, Cluster
from serve_app.request.sequence_request import SequenceRequest

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
AUDIT_AFTER_S = 5.0
"""Whose sequence was silent for this long is asked whether they still have it."""
AUDIT_PAUSE_S = 1.0
"""And asked again after this, before they are believed not to."""


def pause_s(num_stalled: int) -> float:
    """How long to wait before the next rebuild, after so many in a row that brought no token.

    The first goes at once. The others are spread, so that those who were lost together do not all
    come back together.
    """
    if num_stalled == 0:
        return 0.0
    longest_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (num_stalled - 1))
    return longest_s * random.uniform(0.5, 1.0)


async def unclaimed(cluster: Cluster, choices: Sequence[SequenceRequest]) -> list[str]:
    """Ask whoever may hold these sequences; return the ids of those that nobody has any more.

    Where a replica does not answer, its sequences count as held: its silence is judged elsewhere.
    And where something was heard of a sequence while its holders were asked, somebody has it.
    """
    asked: dict[str, list[str]] = {}
    # Who has no holders was lost meanwhile, and is on its way to new ones.
    before = [(c, c.state.sequence_id, c.num_heard) for c in choices if c.holders]
    for choice, sequence_id, _ in before:
        for name in choice.holders:
            asked.setdefault(name, []).append(sequence_id)
    answers = await asyncio.gather(*(_held(cluster, name, ids) for name, ids in asked.items()))
    held = {sequence_id for answer in answers for sequence_id in answer}
    return [
        sequence_id
        for choice, sequence_id, num_heard in before
        if sequence_id not in held and choice.num_heard == num_heard
    ]


async def _held(cluster: Cluster, replica: str, sequence_ids: list[str]) -> Sequence[str]:
    try:
        return await cluster.holding(replica, sequence_ids)
    except ReplicaDied as exc:
        return sequence_ids if exc.code == UNREACHABLE else ()
    except QuadrigaError:
        return sequence_ids
