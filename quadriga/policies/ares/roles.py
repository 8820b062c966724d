"""Who is overloaded, who is not, and what counts how much.

A replica that has paused sequences is out of memory now. It gives; and it would let nobody in.

Source: ARES §5.2, Algorithm 1, phase 1; differs: 𝒰 by the weighted load as 𝒪 is, and sources whose
own memory will run out, or has.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.forecast import NUM_LOADS
from quadriga.policies.ares.settings import AresSettings, num_memory_points


@dataclass(frozen=True, slots=True)
class RoleWeights:
    """What counts how much.

    Attributes:
        points: [17]: of the load at each point, and of its variance. A replica's weighted load
            is its forecast work.
        is_load_only: Only the present counts; predictions are not looked at.
    """

    points: NDArray[np.float64]
    is_load_only: bool


@dataclass(frozen=True, slots=True)
class Roles:
    """Who gives and who takes; indices of replicas.

    Attributes:
        sources: 𝒪, ascending.
        destinations: 𝒰, ascending.
        takers: All that let somebody in, however busy, ascending: for paused sequences.
        is_rescue: [n]: sources whose own memory is forecast to run out, or has.
    """

    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]
    takers: NDArray[np.int64]
    is_rescue: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RoleAssignment:
    """One move: indices into the cluster, and the share of the variance it removes."""

    row: int
    source: int
    destination: int
    gain: float
    is_rescue: bool


def weights(settings: AresSettings, *, load_only: bool) -> RoleWeights:
    """Return the weights of a mode."""
    if load_only:
        now = np.zeros(NUM_LOADS)
        now[0] = 1.0
        return RoleWeights(now, True)
    return RoleWeights(settings.weights, False)


def relative_work(cluster: ClusterForecast, weigh: RoleWeights) -> dict[str, float]:
    """Forecast work of each replica, over the mean of all; 1 for each where there is none."""
    w = cluster.load_s @ weigh.points
    mean = float(w.mean())
    relative = (w / mean if mean else np.ones(len(w))).tolist()
    return dict(zip(cluster.names, relative, strict=True))


def classify(
    cluster: ClusterForecast, settings: AresSettings, weigh: RoleWeights, busy: Set[str]
) -> Roles:
    """Tell overloaded and underloaded replicas by their weighted load.

    Args:
        busy: Replicas with a move under way; they neither give nor take.
    """
    w = cluster.load_s @ weigh.points
    mean_w = w.sum() / len(cluster)
    free = np.ones(len(cluster), dtype=bool)
    if busy:
        free[[i for i, name in enumerate(cluster.names) if name in busy]] = False
    points = 1 if weigh.is_load_only else num_memory_points(settings, cluster.grid_s)
    tokens = cluster.tokens[:, :points].max(axis=1)
    is_rescue = (tokens > settings.rescue_limit * cluster.capacity_tokens) | (
        cluster.num_paused > 0
    )
    over = (w > (1.0 + settings.theta) * mean_w) | is_rescue
    able = free & (cluster.free_slots > 0) & (cluster.num_paused == 0)
    under = able & (w < (1.0 - settings.theta) * mean_w)
    if not under.any() and able.any():
        under = np.zeros_like(able)
        under[np.flatnonzero(able)[np.argmin(w[able])]] = True
    return Roles(
        np.flatnonzero(over & free), np.flatnonzero(under), np.flatnonzero(able), is_rescue
    )
