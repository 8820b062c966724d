"""Which sequence to move, from which replica to which: exact, without trying them all.

Moving load x(t) from replica s to replica t changes the variance over n replicas at each point by
`(2/n) · x · (x + L_t − L_s)`, so the weighted variance that a move removes is a row's own term
minus one matrix product of all rows with all destinations. The conditions (memory, ping-pong,
gain over cost) are looked at only for rows that can still win: rows come in the order of their
best conceivable gain, and the search ends where no unseen row can beat the best one seen.

A move between two replicas changes no other pair's gain, so several moves of one tick, between
disjoint replicas, add up exactly.

Paused sequences come first: they stand still until their replica has room again, so moving one
delays nobody and has it running at once. They go wherever there is room, whatever that does to the
balance; of several moves, too, the one that removes the most variance, or adds the least.

Source: ARES §5.2, Algorithm 1; differs: closed form instead of simulation per candidate, 𝒰 by the
weighted load, memory at the forecast peak with the migrant's own cache, several moves a tick,
paused sequences.

Against ping-pong: a move may turn the difference of a pair's work round, but not to more than half
of what it was. (It need not shrink otherwise: among many small sequences no single move could.)
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.forecast import (
    FIXED,
    MOVABLE,
    MOVES,
    PAUSED,
    REMAINING,
    SINCE_MOVE_S,
    TOKENS,
)
from quadriga.policies.ares.roles import RoleAssignment, Roles, RoleWeights, classify
from quadriga.policies.ares.search import Search
from quadriga.policies.ares.settings import AresSettings, TransferCosts


def select(
    cluster: ClusterForecast,
    settings: AresSettings,
    costs: TransferCosts,
    weigh: RoleWeights,
    *,
    busy: Set[str] = frozenset(),
) -> list[RoleAssignment]:
    """Choose the moves of one tick, each replica taking part in one at most.

    Those of paused sequences come first, then the best. Ties go to fewer KV tokens, then the
    longer remaining, then the smallest ids.
    """
    roles = classify(cluster, settings, weigh, busy)
    if not len(roles.sources) or not len(roles.takers):
        return []
    rows = candidate_rows(cluster, settings, costs, weigh, roles)
    if not len(rows):
        return []
    variance = float(cluster.load_s.var(axis=0) @ weigh.points)
    if variance <= 0.0:
        return []
    most = max(1, round(settings.moves_share * len(cluster)))
    choices: list[RoleAssignment] = []
    is_paused = cluster.rows[rows, MOVABLE] == PAUSED
    for of_paused, candidates in ((True, rows[is_paused]), (False, rows[~is_paused])):
        if not len(candidates) or len(choices) >= most:
            continue
        search = Search(
            cluster,
            settings,
            costs,
            weigh,
            roles,
            variance,
            candidates,
            of_paused=of_paused,
            used=[replica for c in choices for replica in (c.source, c.destination)],
        )
        while len(choices) < most and (choice := search.next()) is not None:
            choices.append(choice)
    return choices


def candidate_rows(
    cluster: ClusterForecast,
    settings: AresSettings,
    costs: TransferCosts,
    weigh: RoleWeights,
    roles: Roles,
) -> NDArray[np.int64]:
    """Rows of overloaded replicas that may move at all, and last long enough to be worth it.

    A paused one waits for room meanwhile, for nobody knows how long: it is always worth it.
    """
    is_source = np.zeros(len(cluster), dtype=bool)
    is_source[roles.sources] = True
    rows = np.flatnonzero(is_source[cluster.owner])
    held = cluster.rows[rows]
    ok = held[:, MOVABLE] != FIXED
    ok &= held[:, MOVES] < settings.max_moves
    ok &= held[:, SINCE_MOVE_S] >= settings.cooldown_s
    if not weigh.is_load_only:
        cost_s = costs.seconds(held[:, TOKENS].astype(np.float64))
        least = settings.remaining_factor * cost_s / (cluster.step_s.sum() / len(cluster))
        is_paused = held[:, MOVABLE] == PAUSED
        ok &= is_paused | (held[:, REMAINING] > least)
    kept: NDArray[np.int64] = rows[ok]
    return kept
