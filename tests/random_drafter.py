"""Drafts at random, in a loop of a test and in a live replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import ray

from actors.rpc.lookup import get_actor
from quadriga.interfaces import DraftPlan
from quadriga.policies.drafting import DraftAction, DraftChoice, Drafter
from quadriga.policies.drex import SegmentCosts


class RandomDrafter(Drafter):
    """Takes any decision that may be taken."""

    def __init__(self, costs: SegmentCosts, seed: int, eagerness: float = 0.7) -> None:
        super().__init__(costs)
        self._random, self._eagerness = Random(seed), eagerness

    def choose(
        self, fresh: int, pending: int, positions: int, survivals: Sequence[float], **_: Any
    ) -> DraftChoice:
        drafts = self._random.random() < self._eagerness
        if not pending:
            return DraftChoice(DraftAction.DRAFT if drafts else DraftAction.FULL)
        if not drafts or not (fresh or survivals):
            return DraftChoice(DraftAction.VERIFY)
        least = self._random.choice([0.0, *survivals])
        return DraftChoice(DraftAction.DRAFT, least)

    def plan(self, survivals: Sequence[float], rooms: Sequence[int], **rest: Any) -> DraftPlan:
        plan = super().plan(survivals, rooms, **rest)
        random, wanted = self._random, [0.0] * 3 + [0.5, float("inf")]
        return replace(
            plan,
            rooms=[random.randint(0, room) for room in rooms],
            least=random.choice([0.0, *survivals]),
            token_s=1.0,
            needed_s=[[random.choice(wanted) * n for n in range(len(r))] for r in plan.needed_s],
        )

    def resized(self, costs: SegmentCosts) -> RandomDrafter:
        other = RandomDrafter(costs, 0, self._eagerness)
        other._random = self._random
        return other


def draft_at_random(replica: str, seed: int) -> None:
    """Let a live decode replica draft at random from now on, and count the drafts it drops."""

    def patch(actor: Any) -> None:
        actor.num_dropped_drafts = 0

        def change(core: Any) -> None:
            batch = core.loop.batch
            drop = type(batch).drop_drafts

            def counted(sequences: Sequence[Any]) -> None:
                actor.num_dropped_drafts += sum(s.num_drafted > 0 for s in sequences)
                drop(batch, sequences)

            batch.drafter = RandomDrafter(batch.rebatcher.costs, seed, 0.9)
            batch.drop_drafts = counted

        actor.engine._inbox.put(change)

    actor: Any = get_actor(replica)
    ray.get(actor.__ray_call__.remote(patch), timeout=10)


def num_dropped_drafts(replica: str) -> int:
    """Sequences of a replica that drafts at random which were taken out in the middle of one."""
    actor: Any = get_actor(replica)
    found: int = ray.get(actor.__ray_call__.remote(lambda a: a.num_dropped_drafts), timeout=10)
    return found


def draft_as_it_pays(replica: str) -> None:
    """Let a live replica decide again."""

    def patch(actor: Any) -> None:
        def change(core: Any) -> None:
            batch = core.loop.batch
            batch.drafter = Drafter(batch.rebatcher.costs)
            del batch.drop_drafts

        actor.engine._inbox.put(change)

    actor: Any = get_actor(replica)
    ray.get(actor.__ray_call__.remote(patch), timeout=10)
