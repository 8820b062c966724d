"""Where a new sequence decodes: the replica whose balance and memory it hurts least.

The place is chosen while the prompt is being computed, so that its KV can follow at once; how long
the answer will be is not predicted before the prompt is done. Until then the sequence counts as
long as answers have been lately. Where that was wrong, rescheduling moves it.

Source: ARES §3 ("according to its input length, predicted output length, and the current load");
the rule is ours: putting load x(t) on replica t raises the variance at each point by
`(2/n) · x · (L_t − L̄)` and a term that is the same for all, so the least weighted `Σ x · L_t` is
the best. Here a point stands for the tokens up to the next one: a newcomer meets what is there now,
and a short one nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quadriga.core.forecast import LengthPrediction
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import PlaceRequest
from quadriga.policies.ares.cluster import ClusterForecast, no_rows, unpack
from quadriga.policies.ares.depth_pools import DepthPools, preferred
from quadriga.policies.ares.forecast import load_rows, memory_rows, tokens_ahead
from quadriga.policies.ares.overload import OverloadPlan
from quadriga.policies.ares.settings import AresSettings, num_memory_points, settings_for
from quadriga.policies.least_work import LeastWork, expected_length
from quadriga.policies.load import has_room, may_displace


def best_replica(
    cluster: ClusterForecast,
    request: PlaceRequest,
    prediction: LengthPrediction,
    able: NDArray[np.bool_],
    settings: AresSettings,
    pools: DepthPools | None = None,
) -> int | None:
    """Index of the replica to take the sequence, or None where it shall wait.

    Where its upper forecast fits no replica's memory it waits for room, so that what runs is not
    preempted for it; but only for a share of the time it would run itself. Then the one with the
    most room at the tightest point takes it: rescheduling has time to help.

    Args:
        prediction: Tokens that the sequence is expected to generate.
        able: [n], those with room now.
        pools: Replicas for shallow and for deep sequences; None: all are for all.
    """
    if not able.any():
        return None
    tokens = np.array([float(request.num_tokens)])
    ahead = tokens_ahead(cluster.grid_s, cluster.step_s)
    # The share of the layers that its own tokens run is one factor for all of a class.
    x = load_rows(tokens, np.array([prediction.mean]), cluster.costs)[0]
    n = len(cluster)
    upper = np.full(n, prediction.upper)
    held = memory_rows(np.repeat(tokens, n), upper, ahead)
    limit = settings.memory_limit * cluster.capacity_tokens
    points = num_memory_points(settings, cluster.grid_s)
    room = (limit[:, None] - cluster.tokens - held)[:, :points].min(axis=1)
    fits = able & (room >= 0.0)
    if not fits.any():
        patience_s = settings.hold_share * prediction.mean * cluster.step_s.mean()
        if request.waited_s < patience_s:
            return None
        return int(np.argmax(np.where(able, room, -np.inf)))
    if pools is not None and pools.is_on:
        fits = preferred(pools, cluster, fits, settings, leaves_early=request.leaves_early)
    cost = (cluster.load_s * x)[:, :-1] @ settings.weights[1:]
    return int(np.argmin(np.where(fits, cost, np.inf)))


class AresPlacement:
    """Placement by forecast; by least work where there is none.

    Attributes:
        load_only: Predictions are not to be believed now.
        overload: What overload of the class calls for; None without one.
        pools: See `best_replica`.
    """

    def __init__(self, settings: AresSettings | None = None) -> None:
        self._settings = settings or AresSettings()
        self._without = LeastWork()
        self.load_only = False
        self.overload: OverloadPlan | None = None
        self.pools: DepthPools | None = None

    def choose(self, request: PlaceRequest, snapshots: Sequence[ReplicaSnapshot]) -> str | None:
        """See `Placement.choose`; the snapshots are of one depth class."""
        cluster = None if self.load_only else unpack(snapshots, no_rows)
        if cluster is None or len(cluster) != len(snapshots) or not cluster.has_predictions:
            return self._without.choose(request, snapshots)
        by_name = {s.info.name: s for s in snapshots}
        prediction = expected_length(request, snapshots)
        if self.overload is None:
            able = np.array([has_room(by_name[n], request) for n in cluster.names])
        elif not request.is_prompt_done:
            return None  # it has its place once its length is predicted
        else:
            asked = replace(request, by_forecast=True)
            able = np.array([has_room(by_name[n], asked) for n in cluster.names])
            is_open = self.overload.open_to(
                cluster, able, request.num_tokens, prediction, request.waited_s
            )
            if not is_open.any():  # somebody less important makes way, as at any time
                is_open = able & [may_displace(by_name[n], request) for n in cluster.names]
            able = is_open
        settings = settings_for(self._settings, snapshots)
        index = best_replica(cluster, request, prediction, able, settings, self.pools)
        return None if index is None else cluster.names[index]
