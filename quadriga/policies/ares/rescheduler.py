"""The rescheduling tick: packed snapshots and the time in, migration orders out."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.policies.ares.cluster import ClusterForecast, by_class, no_rows, unpack
from quadriga.policies.ares.forecast import REMAINING, TOKENS
from quadriga.policies.ares.roles import RoleWeights, classify, relative_work, weights
from quadriga.policies.ares.selection import select
from quadriga.policies.ares.settings import AresSettings, TransferCosts


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
    ) -> list[MigrationOrder]:
        """Decide the moves of this tick, class by class.

        Args:
            snapshots: Decode replicas that were heard of lately.
            busy: Replicas with a migration under way.
            load_only: Predictions are not to be believed now; see `DriftMonitor`.

        Raises:
            ConfigError: A forecast is malformed.
        """
        orders = []
        for depth_class, members in sorted(by_class(snapshots).items(), key=lambda i: str(i[0])):
            cluster = unpack(members, partial(self._sources, busy=busy, load_only=load_only))
            if cluster is not None:
                orders += self.decide(cluster, depth_class, costs, busy=busy, load_only=load_only)
        return orders

    def decide(
        self,
        cluster: ClusterForecast,
        depth_class: DepthClass,
        costs: TransferCosts,
        *,
        busy: Set[str] = frozenset(),
        load_only: bool = False,
    ) -> list[MigrationOrder]:
        """Decide the moves of this tick inside one class; arguments as in `tick`."""
        weigh = self._weights(cluster, load_only)
        trusts = weigh is self._ahead
        return [
            MigrationOrder(
                sequence_id=cluster.sequence_ids[choice.row],
                depth_class=depth_class,
                source=cluster.names[choice.source],
                destination=cluster.names[choice.destination],
                cause=MigrationCause.MEMORY if choice.is_rescue else MigrationCause.BALANCE,
                gain=choice.gain,
                num_tokens=int(cluster.rows[choice.row, TOKENS]),
                remaining_tokens=float(cluster.rows[choice.row, REMAINING]) if trusts else 0.0,
            )
            for choice in select(cluster, self.settings, costs, weigh, busy=busy)
        ]

    def work(
        self, snapshots: Sequence[ReplicaSnapshot], *, load_only: bool = False
    ) -> dict[str, float]:
        """What is balanced, by replica of one class: forecast work over the mean.

        Empty where fewer than two can be compared. Arguments as in `tick`.
        """
        cluster = unpack(snapshots, no_rows)
        return {} if cluster is None else relative_work(cluster, self._weights(cluster, load_only))

    def _weights(self, cluster: ClusterForecast, load_only: bool) -> RoleWeights:
        trusts = self._predicts and cluster.has_predictions and not load_only
        return self._ahead if trusts else self._now

    def _sources(
        self, cluster: ClusterForecast, *, busy: Set[str], load_only: bool
    ) -> NDArray[np.int64]:
        """Only overloaded replicas' sequences may move: nobody else's need to be unpacked."""
        return classify(cluster, self.settings, self._weights(cluster, load_only), busy).sources
