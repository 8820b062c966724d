"""Replicas of one model and their sequences as arrays, and which replicas are overloaded.

Sequences move freely inside a depth class. Between classes the layers count: loads are then taken
by the layer, so that those of a shallow and of a deep replica can be compared, and each sequence
says how many layers a replica needs for it.

A replica that has paused sequences is out of memory now: it is a source, and never a destination.

Source of the roles: ARES §5.2, Algorithm 1, phase 1; differs: 𝒰 by the weighted load as 𝒪 is, and
sources whose own memory will run out, or has, the soonest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from statistics import median

import numpy as np
from numpy.typing import NDArray

from quadriga.core.forecast import LoadForecast
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.policies.ares.forecast import (
    NUM_COLUMNS,
    NUM_LOADS,
    StepCosts,
    load_rows,
    numbers,
    shares,
    sizes,
    with_usual_lengths,
)
from quadriga.policies.ares.settings import AresSettings

NEVER_FULL = NUM_LOADS


@dataclass(slots=True)
class ClusterForecast:
    """n replicas and the R sequences they hold, in the order of the replicas' names.

    Attributes:
        names: [n], ascending.
        costs: What a sequence and a token add to a step, the same on all replicas; by the layer
            where their depths differ. See `with_deep_passes`.
        measured: The same as the replicas measured it, all layers run.
        depth: [n], layers that each has loaded.
        load_s: [n, 17], what the sequences add to a step, at `forecast.TOKENS_AHEAD`.
        grid_s: [17], seconds; the first is now.
        tokens: [n, 17], KV tokens held, at `grid_s`.
        step_s: [n], a step as lately measured.
        capacity_tokens: [n].
        longest: [n], tokens that one sequence may become there.
        promised_tokens: [n], KV tokens promised to the sequences held.
        free_slots: [n], sequences that still fit; 0 for a replica that drains.
        num_paused: [n], sequences that stand in host memory.
        rows: [R, NUM_COLUMNS], see `forecast`.
        row_load_s: [R, 17], what each adds to a step, at `forecast.TOKENS_AHEAD`.
        owner: [R], index of the replica that holds the row, ascending.
        sequence_ids: [R].
        has_predictions: False where no replica that holds sequences knows the length of any.
        base_s: A step without sequences, as the median replica measured it.
        front_share: Of the layers, those up to the first exit that any replica uses.
    """

    names: list[str]
    costs: StepCosts
    measured: StepCosts
    depth: NDArray[np.int64]
    load_s: NDArray[np.float64]
    grid_s: NDArray[np.float64]
    tokens: NDArray[np.float64]
    step_s: NDArray[np.float64]
    capacity_tokens: NDArray[np.float64]
    longest: NDArray[np.int64]
    promised_tokens: NDArray[np.float64]
    free_slots: NDArray[np.int64]
    num_paused: NDArray[np.int64]
    rows: NDArray[np.float32]
    row_load_s: NDArray[np.float32]
    owner: NDArray[np.int64]
    sequence_ids: Sequence[str]
    has_predictions: bool
    base_s: float
    front_share: float

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_one_class(self) -> bool:
        """Whether all replicas have the same layers."""
        return bool((self.depth == self.depth[0]).all())

    def part(self, replicas: NDArray[np.int64]) -> ClusterForecast:
        """Some of the replicas, ascending, with what they hold."""
        rows = np.flatnonzero(np.isin(self.owner, replicas))
        return ClusterForecast(
            names=[self.names[i] for i in replicas.tolist()],
            costs=self.costs,
            measured=self.measured,
            depth=self.depth[replicas],
            load_s=self.load_s[replicas],
            grid_s=self.grid_s,
            tokens=self.tokens[replicas],
            step_s=self.step_s[replicas],
            capacity_tokens=self.capacity_tokens[replicas],
            longest=self.longest[replicas],
            free_slots=self.free_slots[replicas],
            num_paused=self.num_paused[replicas],
            promised_tokens=self.promised_tokens[replicas],
            rows=self.rows[rows],
            row_load_s=self.row_load_s[rows],
            owner=np.searchsorted(replicas, self.owner[rows]),
            sequence_ids=[self.sequence_ids[i] for i in rows.tolist()],
            has_predictions=self.has_predictions,
            base_s=self.base_s,
            front_share=self.front_share,
        )


WhoseRows = Callable[[ClusterForecast], NDArray[np.int64]]
"""Asked with the replicas' own figures: the indices of the replicas whose rows are wanted."""


def unpack(
    snapshots: Sequence[ReplicaSnapshot], whose_rows: WhoseRows | None = None
) -> ClusterForecast | None:
    """Put the packed snapshots of one model together, of one depth class or of several.

    Those that are not `comparable` are left out: they can neither give nor take.

    Args:
        whose_rows: Rows are most of the bytes; those of other replicas are left packed. None: all.

    Returns:
        None where fewer than two replicas can be compared.
    """
    able = comparable(snapshots)
    forecasts = [s.forecast for s in able if s.forecast is not None]
    if len(able) < 2:
        return None
    grid_s = forecasts[0].grid_s
    forecasts = with_usual_lengths(forecasts, [s.step_time_s for s in able])
    free = [0 if s.draining else s.info.num_slots - s.num_running - s.num_waiting for s in able]
    depth = np.array([s.info.depth_class.depth for s in able], dtype=np.int64)
    layers = np.ones(len(able)) if (depth == depth[0]).all() else depth.astype(np.float64)
    costs = measured = common_costs(forecasts, layers)
    running = _stacked([f.running for f in forecasts], NUM_LOADS)
    base_s = median([f.base_s for f in forecasts])
    front_share = min(f.front_share for f in forecasts)
    if (depth == depth[0]).all():
        num_each = sum(len(f.sequence_ids) for f in forecasts) / len(able)
        share_each = float(running[:, 0].mean())
        usual_front = median([f.front_share for f in forecasts])
        costs = with_deep_passes(measured, base_s, usual_front, num_each, share_each)
    cluster = ClusterForecast(
        names=[s.info.name for s in able],
        costs=costs,
        measured=measured,
        depth=depth,
        load_s=class_loads(
            costs,
            running * layers[:, None],
            _stacked([f.context for f in forecasts], NUM_LOADS) * layers[:, None],
        ),
        grid_s=np.array(grid_s),
        tokens=_stacked([f.tokens for f in forecasts], NUM_LOADS).astype(np.float64),
        step_s=np.array([max(s.step_time_s, 1e-9) for s in able]),
        capacity_tokens=np.array([s.info.kv_capacity_tokens for s in able], dtype=np.float64),
        longest=np.array([s.info.longest_sequence for s in able], dtype=np.int64),
        promised_tokens=np.array([s.reserved_tokens for s in able], dtype=np.float64),
        free_slots=np.array(free, dtype=np.int64),
        num_paused=np.array([s.num_paused for s in able], dtype=np.int64),
        rows=np.empty((0, NUM_COLUMNS), dtype=np.float32),
        row_load_s=np.empty((0, NUM_LOADS), dtype=np.float32),
        owner=np.empty(0, dtype=np.int64),
        sequence_ids=(),
        has_predictions=all(f.has_predictions for f in forecasts),
        base_s=base_s,
        front_share=front_share,
    )
    wanted = np.arange(len(able)) if whose_rows is None else whose_rows(cluster)
    mine = [forecasts[i] for i in wanted.tolist()]
    cluster.rows = _stacked([f.rows for f in mine], NUM_COLUMNS)
    cluster.owner = np.repeat(wanted, [len(f.sequence_ids) for f in mine])
    share = shares(cluster.rows) * layers[cluster.owner]
    cluster.row_load_s = load_rows(*sizes(cluster.rows), costs, share=share).astype(np.float32)
    cluster.sequence_ids = list(chain.from_iterable(f.sequence_ids for f in mine))
    return cluster


def common_costs(
    forecasts: Sequence[LoadForecast], layers: NDArray[np.float64] | float = 1.0
) -> StepCosts:
    """The costs of a class: the medians of what its replicas measured, each for itself.

    Args:
        layers: [n], by which each replica's are divided.

    Equal replicas measure unequal costs, by what else their machines did at that moment. Loads
    that are compared must be counted by the same ones.
    """
    return StepCosts(
        median((np.array([f.per_sequence_s for f in forecasts]) / layers).tolist()),
        median((np.array([f.per_token_s for f in forecasts]) / layers).tolist()),
    )


def with_deep_passes(
    costs: StepCosts, base_s: float, front_share: float, num_each: float, share_each: float
) -> StepCosts:
    """The costs, with what a sequence adds by making steps go deep where tokens leave early.

    The layers behind the first exit are read where any token goes on. Of n sequences whose tokens
    do so with probability u, one more makes that happen u · (1 − u)^n times more often. A sequence
    counts by its share of the layers, so this is divided by what that is on average. Where some
    tokens never leave and others mostly do, the average says too much of both.

    Args:
        num_each, share_each: Sequences of a replica, and the sum of their shares, on average.
    """
    if front_share >= 1.0 or num_each <= 0.0 or share_each <= 0.0:
        return costs
    share = share_each / num_each
    stays = min(max((share - front_share) / (1.0 - front_share), 0.0), 1.0)
    deep_s = base_s * (1.0 - front_share) * stays * (1.0 - stays) ** max(num_each, 1.0)
    return StepCosts(costs.per_sequence_s + deep_s / share, costs.per_token_s)


def class_loads(
    costs: StepCosts, running: NDArray[np.floating], context: NDArray[np.floating]
) -> NDArray[np.float64]:
    """What so many sequences with so many KV tokens add to a step: [n, 17] of twice [n, 17]."""
    load: NDArray[np.float64] = np.multiply(running, costs.per_sequence_s, dtype=np.float64)
    load += np.multiply(context, costs.per_token_s, dtype=np.float64)
    return load


def no_rows(cluster: ClusterForecast) -> NDArray[np.int64]:
    """Return no rows: for callers that want the replicas' own figures alone."""
    return np.empty(0, dtype=np.int64)


def _stacked(parts: list[bytes], columns: int) -> NDArray[np.float32]:
    return numbers(b"".join(parts)).reshape(-1, columns)


def comparable(snapshots: Sequence[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
    """Those with the grid that most forecasts have, the smallest of several, by name."""
    counts = Counter(s.forecast.grid_s for s in snapshots if s.forecast is not None)
    grid = min(counts, key=lambda grid: (-counts[grid], grid), default=None)
    able = [s for s in snapshots if s.forecast is not None and s.forecast.grid_s == grid]
    return sorted(able, key=lambda s: s.info.name)


def holds_any(snapshots: Sequence[ReplicaSnapshot]) -> bool:
    """Whether any sequence is forecast: without one there is nothing to unpack."""
    return any(s.forecast is not None and s.forecast.sequence_ids for s in snapshots)


def by_class(snapshots: Sequence[ReplicaSnapshot]) -> dict[DepthClass, list[ReplicaSnapshot]]:
    """Snapshots by depth class; sequences move freely only inside one."""
    classes: dict[DepthClass, list[ReplicaSnapshot]] = {}
    last: DepthClass | None = None
    members: list[ReplicaSnapshot] = []
    for snapshot in snapshots:
        depth_class = snapshot.info.depth_class
        if depth_class is not last:  # a class is hashed once for a run of replicas
            last, members = depth_class, classes.setdefault(depth_class, [])
        members.append(snapshot)
    return classes


def by_model(snapshots: Sequence[ReplicaSnapshot]) -> dict[str, list[ReplicaSnapshot]]:
    """Snapshots by model, whatever their depth."""
    models: dict[str, list[ReplicaSnapshot]] = {}
    for depth_class, members in by_class(snapshots).items():
        models.setdefault(depth_class.model, []).extend(members)
    return models


def alike(snapshots: Sequence[ReplicaSnapshot]) -> list[list[ReplicaSnapshot]]:
    """Snapshots by model and numerics, whatever their depth: sequences move inside these alone."""
    groups: dict[tuple[str, str], list[ReplicaSnapshot]] = {}
    for s in snapshots:
        groups.setdefault((s.info.depth_class.model, s.info.numerics), []).append(s)
    return [members for _, members in sorted(groups.items())]


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
    """Which replicas give and which take; indices.

    Attributes:
        sources: 𝒪, ascending.
        destinations: 𝒰, ascending.
        takers: All that admit a sequence, however busy, ascending: for paused sequences.
        full_at: [n]: the first point of the grid at which a replica's own memory is forecast to be
            nearly full; 0 where sequences are paused, `NEVER_FULL` where it is not, or later.
    """

    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]
    takers: NDArray[np.int64]
    full_at: NDArray[np.int64]

    @property
    def is_rescue(self) -> NDArray[np.bool_]:
        """Which replicas are relieved whatever the balance says: [n]."""
        return np.asarray(self.full_at < NEVER_FULL)


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

    Where depths differ, a replica gives because it has more work only if no other has its depth:
    those with others of their class are balanced among themselves.

    Args:
        busy: Replicas with a move under way; they neither give nor take.
    """
    w = cluster.load_s @ weigh.points
    mean_w = w.sum() / len(cluster)
    free = np.ones(len(cluster), dtype=bool)
    if busy:
        free[[i for i, name in enumerate(cluster.names) if name in busy]] = False
    seen_s = 0.0 if weigh.is_load_only else settings.rescue_within_s
    is_full = cluster.tokens > (settings.rescue_limit * cluster.capacity_tokens)[:, None]
    is_full &= cluster.grid_s <= seen_s
    full_at = np.where(is_full.any(axis=1), is_full.argmax(axis=1), NEVER_FULL)
    full_at[cluster.num_paused > 0] = 0
    over = w > (1.0 + settings.theta) * mean_w
    if not cluster.is_one_class:
        over &= (cluster.depth[:, None] == cluster.depth).sum(axis=1) == 1
    over |= full_at < NEVER_FULL
    able = free & (cluster.free_slots > 0) & (cluster.num_paused == 0)
    under = able & (w < (1.0 - settings.theta) * mean_w)
    if not under.any() and able.any():
        under = np.zeros_like(able)
        under[np.flatnonzero(able)[np.argmin(w[able])]] = True
    return Roles(np.flatnonzero(over & free), np.flatnonzero(under), np.flatnonzero(able), full_at)
