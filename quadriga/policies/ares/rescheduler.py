"""The rescheduling tick: packed snapshots and the time in, migration orders out.

The choice of moves is exact, without trying them all. Moving load x(t) from replica s to replica t
changes the variance over n replicas at each point by `(2/n) · x · (x + L_t − L_s)`, so the weighted
variance that a move removes is a row's own term minus one matrix product of all rows with all
destinations. The conditions (memory, ping-pong, gain over cost) are evaluated only for rows that
can still win (`search`). A move between two replicas changes no other pair's gain, so several moves
of one tick, between disjoint replicas, add up exactly.

Paused sequences come first: they stand still until their replica has room again, so moving one
delays no other sequence and lets it run at once. Then replicas whose memory is forecast to be full
soon are relieved, the soonest first by the points of the grid. Both go wherever there is room,
whatever that does to the balance; of several moves, too, the one that removes the most variance,
or adds the least. Then the balance counts.

Between depth classes of one model (pools of different depths, or a model that is being resized) a
second look follows, at all its replicas: who runs out of memory is relieved there where its own
class has no room, and who is alone in its class is balanced with the others. Strict sequences go
only where they can do at least what they can where they are; for balance alone no sequence loses
layers (`Search`).

Against ping-pong: a move may reverse the difference of a pair's work, but not to more than half of
what it was. (It need not shrink otherwise: among many small sequences no single move could.)

Source: ARES §5.2, Algorithm 1; differs: closed form instead of simulation per candidate, 𝒰 by the
weighted load, memory at the forecast peak with the migrant's own cache, several moves a tick,
paused sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.policies.ares.cluster import (
    NEVER_FULL,
    ClusterForecast,
    RoleAssignment,
    Roles,
    RoleWeights,
    alike,
    by_class,
    classify,
    comparable,
    holds_any,
    no_rows,
    relative_work,
    unpack,
    weights,
)
from quadriga.policies.ares.depth_pools import DepthPools, crossings
from quadriga.policies.ares.forecast import (
    FIXED,
    MOVABLE,
    MOVES,
    PAUSED,
    REMAINING,
    SINCE_MOVE_S,
    TOKENS,
)
from quadriga.policies.ares.overload import OverloadPlan, evictions
from quadriga.policies.ares.search import Search
from quadriga.policies.ares.settings import AresSettings, TransferCosts


def select(
    cluster: ClusterForecast,
    settings: AresSettings,
    costs: TransferCosts,
    weigh: RoleWeights,
    *,
    busy: Set[str] = frozenset(),
    rescues_only: bool = False,
) -> list[RoleAssignment]:
    """Choose the moves of one tick, each replica taking part in one at most.

    Those of paused sequences come first, then those of replicas that will be full, the soonest
    first, then the best. Ties go to fewer KV tokens, then the longer remaining, then the smallest
    ids.

    Args:
        rescues_only: Nothing is moved for balance.
    """
    roles = classify(cluster, settings, weigh, busy)
    if rescues_only:
        roles = replace(roles, sources=roles.sources[roles.is_rescue[roles.sources]])
    if not len(roles.sources) or not len(roles.takers):
        return []
    rows = candidate_rows(cluster, settings, costs, weigh, roles)
    if not len(rows):
        return []
    variance = float(cluster.load_s.var(axis=0) @ weigh.points) or 1.0
    most = max(1, round(settings.moves_share * len(cluster)))
    choices: list[RoleAssignment] = []
    is_paused = cluster.rows[rows, MOVABLE] == PAUSED
    full_at = np.where(is_paused, -1, roles.full_at[cluster.owner[rows]])
    for at in np.unique(full_at).tolist():
        if len(choices) >= most:
            break
        search = Search(
            cluster,
            settings,
            costs,
            weigh,
            roles,
            variance,
            rows[full_at == at],
            is_rescue=at < NEVER_FULL,
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

    A paused one waits for room for an unknown time: moving it is always worth it.
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


def pools_on(
    pools: Mapping[DepthClass, DepthPools] | None, members: Sequence[ReplicaSnapshot]
) -> DepthPools | None:
    """What holds for a class whose shallow and deep sequences run apart; None for others."""
    found = (pools or {}).get(members[0].info.depth_class)
    return found if found is not None and found.is_on else None


def _taking_part(orders: Sequence[MigrationOrder]) -> set[str]:
    return {name for o in orders for name in (o.source, o.destination)}


class Rescheduler:
    """Moves running sequences between decode replicas before they overload.

    Holds nothing from tick to tick: what was moved, when and how often comes with the snapshots,
    what is under way comes in.

    Args:
        predicts: False is rescheduling without prediction, a baseline: the present load alone.
    """

    def __init__(self, settings: AresSettings | None = None, *, predicts: bool = True) -> None:
        self.settings = settings or AresSettings()
        self._predicts = predicts
        self._ahead = weights(self.settings, load_only=False)
        self._now = weights(self.settings, load_only=True)

    def tick(
        self,
        snapshots: Sequence[ReplicaSnapshot],
        costs: TransferCosts,
        *,
        busy: Set[str] = frozenset(),
        load_only: bool = False,
        overload: OverloadPlan | None = None,
        pools: Mapping[DepthClass, DepthPools] | None = None,
    ) -> list[MigrationOrder]:
        """Decide the moves of this tick: class by class, then between the classes of a model.

        Args:
            snapshots: Decode replicas that were heard of lately.
            busy: Replicas with a migration under way.
            load_only: Predictions are not to be believed now; see `DriftMonitor`.
            overload: What the overload of the one class there is calls for, instead of balance.
            pools: What was decided of the depth pools of each class.
        """
        orders: list[MigrationOrder] = []
        for of_model in alike(snapshots):
            classes = by_class(of_model)
            parts = [members for _, members in sorted(classes.items(), key=lambda i: str(i[0]))]
            # An overload is relieved by what its plan names, inside each class.
            if len(parts) > 1 and overload is None:
                parts.append(of_model)
            for members in filter(holds_any, parts):
                used = _taking_part(orders) | busy
                sources = partial(self._sources, busy=used, load_only=load_only)
                split = None if members is of_model and len(parts) > 1 else pools_on(pools, members)
                wants_all = overload is not None or split is not None
                cluster = unpack(members, None if wants_all else sources)
                if cluster is not None:
                    weigh = self._weights(cluster, load_only)
                    depth_class = members[0].info.depth_class
                    orders += self._decide(
                        cluster, depth_class, costs, weigh, used, overload, split
                    )
        return orders

    def _decide(
        self,
        cluster: ClusterForecast,
        depth_class: DepthClass,
        costs: TransferCosts,
        weigh: RoleWeights,
        busy: Set[str],
        overload: OverloadPlan | None,
        pools: DepthPools | None,
    ) -> list[MigrationOrder]:
        """Decide the moves of this tick inside one class, or between those of one model.

        Args:
            depth_class: Of the replicas; where their depths differ, of any of them.
            weigh: See `_weights`.
            pools: What holds for the class, if its shallow and deep sequences run apart. The others
                are as in `tick`.
        """
        if overload is not None:
            choices = evictions(cluster, overload, self.settings, busy=busy)
        elif pools is not None:
            return self._decide_apart(cluster, depth_class, costs, weigh, pools, busy)
        else:
            choices = select(cluster, self.settings, costs, weigh, busy=busy)
        return self._orders(choices, cluster, depth_class, weigh)

    def _decide_apart(
        self,
        cluster: ClusterForecast,
        depth_class: DepthClass,
        costs: TransferCosts,
        weigh: RoleWeights,
        pools: DepthPools,
        busy: Set[str],
    ) -> list[MigrationOrder]:
        """Memory is relieved anywhere, then sequences change sides, then each side is balanced."""
        settings = self.settings
        choices = select(cluster, settings, costs, weigh, busy=busy, rescues_only=True)
        orders = self._orders(choices, cluster, depth_class, weigh)
        used = _taking_part(orders) | busy
        everyone = np.arange(len(cluster))
        roles = Roles(everyone, everyone, everyone, np.full(len(cluster), NEVER_FULL))
        rows = candidate_rows(cluster, settings, costs, weigh, roles)
        choices = crossings(cluster, pools, settings, rows, busy=used)
        orders += self._orders(choices, cluster, depth_class, weigh, MigrationCause.DEPTH)
        is_shallow = pools.is_shallow(cluster.names)
        for side in (is_shallow, ~is_shallow):
            if side.sum() > 1:
                part, used = cluster.part(np.flatnonzero(side)), _taking_part(orders) | busy
                choices = select(part, settings, costs, weigh, busy=used)
                orders += self._orders(choices, part, depth_class, weigh)
        return orders

    def _orders(
        self,
        choices: Sequence[RoleAssignment],
        cluster: ClusterForecast,
        depth_class: DepthClass,
        weigh: RoleWeights,
        cause: MigrationCause = MigrationCause.BALANCE,
    ) -> list[MigrationOrder]:
        trusts = weigh is self._ahead
        return [
            MigrationOrder(
                sequence_id=cluster.sequence_ids[choice.row],
                depth_class=(
                    depth_class
                    if cluster.is_one_class
                    else replace(depth_class, depth=int(cluster.depth[choice.source]))
                ),
                source=cluster.names[choice.source],
                destination=cluster.names[choice.destination],
                cause=MigrationCause.MEMORY if choice.is_rescue else cause,
                gain=choice.gain,
                num_tokens=int(cluster.rows[choice.row, TOKENS]),
                remaining_tokens=float(cluster.rows[choice.row, REMAINING]) if trusts else 0.0,
            )
            for choice in choices
        ]

    def decide_all(
        self,
        cluster: ClusterForecast,
        depth_class: DepthClass,
        costs: TransferCosts,
        *,
        busy: Set[str] = frozenset(),
        load_only: bool = False,
        overload: OverloadPlan | None = None,
        pools: DepthPools | None = None,
    ) -> list[MigrationOrder]:
        """Decide the moves of one model's replicas as `tick` does, from one cluster forecast.

        Args:
            pools: Where they are of one class. What `tick` takes as well is as there.
        """
        parts = [cluster]
        if not cluster.is_one_class:
            depths = np.unique(cluster.depth)
            parts = [cluster.part(np.flatnonzero(cluster.depth == depth)) for depth in depths]
            parts = [part for part in parts if len(part) > 1]
            if overload is None:
                parts.append(cluster)
        orders: list[MigrationOrder] = []
        for part in parts:
            used = _taking_part(orders) | busy
            split = pools if part.is_one_class and pools is not None and pools.is_on else None
            weigh = self._weights(part, load_only)
            orders += self._decide(part, depth_class, costs, weigh, used, overload, split)
        return orders

    def work(
        self, snapshots: Sequence[ReplicaSnapshot], *, load_only: bool = False
    ) -> dict[str, float]:
        """What is balanced, by replica of one class: forecast work over the mean.

        Empty where fewer than two can be compared. Arguments as in `tick`.
        """
        if not holds_any(snapshots):
            able = comparable(snapshots)
            return {s.info.name: 1.0 for s in able} if len(able) > 1 else {}
        cluster = unpack(snapshots, no_rows)
        return {} if cluster is None else relative_work(cluster, self._weights(cluster, load_only))

    def _weights(self, cluster: ClusterForecast, load_only: bool) -> RoleWeights:
        trusts = self._predicts and cluster.has_predictions and not load_only
        return self._ahead if trusts else self._now

    def _sources(
        self, cluster: ClusterForecast, *, busy: Set[str], load_only: bool
    ) -> NDArray[np.int64]:
        """Only overloaded replicas' sequences may move: no others need to be unpacked."""
        return classify(cluster, self.settings, self._weights(cluster, load_only), busy).sources
