"""Best-first search for the moves that remove the most variance; see `rescheduler` for the sums."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quadriga.policies.ares.cluster import ClusterForecast, RoleAssignment, Roles, RoleWeights
from quadriga.policies.ares.forecast import (
    LEAST_LAYERS,
    MOST_LAYERS,
    MOST_TOKENS,
    REMAINING,
    REMAINING_LOWER,
    REMAINING_UPPER,
    TOKENS,
    memory_rows,
    tokens_ahead,
)
from quadriga.policies.ares.settings import (
    OVERSHOOT,
    PAPER_REPLICAS,
    TOKENS_AHEAD,
    TOKENS_BETWEEN,
    AresSettings,
    TransferCosts,
    num_memory_points,
)

Floats = NDArray[np.float64]
Targets = NDArray[np.int64]
"""Positions among the destinations of a search."""

GAIN_DECIMALS = 12
"""Gains, as shares of the variance, are compared to this many decimals; then ties are broken."""

_CHUNK_ROWS = 512
_LOOK_ROWS = 64
"""Looked at exactly, together: many are refused by a condition that their bound does not know, and
few are not worth a bound."""
_SLACK = 2e-5  # what single precision may be wrong by, against the terms of a gain


class Search:
    """Best-first search over candidate rows of one tick.

    A row passes three stages, and most rows only the first: a bound over an imagined destination
    that is the best at every point; a bound over the real ones (the matrix product), in chunks
    of rows; and the exact gain under all conditions.

    Args:
        rows: All of paused sequences or of replicas that will be full, or none.
        is_rescue: They are: they may go to every replica with room, whatever the balance says.
        used: Replicas that take part in a move of this tick already.
    """

    def __init__(
        self,
        cluster: ClusterForecast,
        settings: AresSettings,
        costs: TransferCosts,
        weigh: RoleWeights,
        roles: Roles,
        variance: float,
        rows: NDArray[np.int64],
        *,
        is_rescue: bool,
        used: Sequence[int],
    ) -> None:
        n = len(cluster)
        self._cluster, self._settings, self._costs, self._weigh = cluster, settings, costs, weigh
        self._is_rescue = is_rescue
        self._is_one_class = cluster.is_one_class
        self._destinations = roles.takers if is_rescue else roles.destinations
        self._scale = 2.0 / (n * variance)
        self._least = -np.inf if is_rescue else settings.min_gain * min(1.0, PAPER_REPLICAS / n)
        # Differences alone count. Above the least of them no destination's load is negative.
        self._load = cluster.load_s - cluster.load_s[self._destinations].min(axis=0)
        self._w = cluster.load_s @ weigh.points
        self._target_load = self._load[self._destinations]
        self._target_depth = cluster.depth[self._destinations]
        self._target_w = self._w[self._destinations]
        is_free = np.ones(n, dtype=bool)
        is_free[np.array(used, dtype=np.int64)] = False
        self._target_free = is_free[self._destinations]
        self._target_ahead = tokens_ahead(cluster.grid_s, cluster.step_s[self._destinations])
        self._memory_points = num_memory_points(settings, cluster.grid_s)
        self._source_free = np.zeros(n, dtype=bool)
        self._source_free[roles.sources] = True
        self._source_free &= is_free
        # (-bound, 0, row) of rows to be looked at; (-gain, 1, ties…, row, target) of those seen.
        self._heap: list[tuple[Any, ...]] = []
        self._unseen, self._unseen_bounds = rows[:0], np.empty(0)
        if len(rows) <= _LOOK_ROWS:
            self._look_at(rows)
            return
        self._points32 = weigh.points.astype(np.float32)
        self._target_load32 = self._target_load.astype(np.float32)
        bounds = self._first_bounds(rows)
        keep = np.flatnonzero(bounds >= self._least)
        order = keep[np.argsort(-bounds[keep], kind="stable")]
        self._unseen, self._unseen_bounds = rows[order], bounds[order]

    def next(self) -> RoleAssignment | None:
        """The best move between replicas that are still free, or None."""
        while True:
            best = -self._heap[0][0] if self._heap else -np.inf
            if len(self._unseen) and self._unseen_bounds[0] >= best:
                self._bound_chunk()
            elif not self._heap:
                return None
            elif self._heap[0][1] == 0:
                self._look_at(self._next_rows())
            elif (choice := self._settled(heapq.heappop(self._heap))) is not None:
                return choice

    def _next_rows(self) -> NDArray[np.int64]:
        """The rows that are to be looked at before the best one seen can be trusted, or some."""
        rows: list[int] = []
        while self._heap and self._heap[0][1] == 0 and len(rows) < _LOOK_ROWS:
            rows.append(heapq.heappop(self._heap)[2])
        return np.array(rows, dtype=np.int64)

    def _settled(self, entry: tuple[Any, ...]) -> RoleAssignment | None:
        """The move of a row that was seen; None where its replicas were used meanwhile."""
        row, target = entry[-2:]
        source = int(self._cluster.owner[row])
        if not (self._source_free[source] and self._target_free[target]):
            self._look_at(np.array([row]))
            return None
        destination = int(self._destinations[target])
        for replica in (source, destination):
            self._source_free[replica] = False
            self._target_free[self._destinations == replica] = False
        return RoleAssignment(row, source, destination, -entry[0], self._is_rescue)

    def _first_bounds(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Upper bounds of the gains over any destination; -1 for a row too large to pass
        the test against ping-pong with any. Single precision, with a slack for it."""
        x = self._cluster.row_load_s[rows]
        owner = self._cluster.owner[rows]
        load = self._load.astype(np.float32)
        weighted = x * self._points32
        own = load[owner]
        own -= x
        own *= weighted
        slack = weighted @ (_SLACK * (x.max(axis=0) + 2.0 * np.abs(load).max(axis=0)))
        gains = own.sum(axis=1) + slack
        bounds: NDArray[np.float64] = self._scale * gains.astype(np.float64) + 10.0**-GAIN_DECIMALS
        if self._is_rescue:
            return bounds
        wx = weighted.sum(axis=1).astype(np.float64)
        w = self._w[owner]
        margin = _SLACK * float(np.abs(self._w).max())
        too_large = wx - margin > (1.0 + OVERSHOOT) / 2.0 * (w - self._target_w.min())
        bounds[too_large] = -1.0
        return bounds

    def _bound_chunk(self) -> None:
        """Bound the next rows over the real destinations, by one matrix product."""
        is_free = self._source_free[self._cluster.owner[self._unseen]]
        unseen, bounds = self._unseen[is_free], self._unseen_bounds[is_free]
        rows, self._unseen = unseen[:_CHUNK_ROWS], unseen[_CHUNK_ROWS:]
        over_best, self._unseen_bounds = bounds[:_CHUNK_ROWS], bounds[_CHUNK_ROWS:]
        if not len(rows):
            return
        weighted = self._cluster.row_load_s[rows] * self._points32
        least = (weighted @ self._target_load32[self._target_free].T).min(axis=1, initial=np.inf)
        over_real = over_best - self._scale * least * (1.0 - _SLACK)
        keep = np.flatnonzero(over_real >= self._least)
        for bound, row in zip(-over_real[keep], rows[keep].tolist(), strict=True):
            heapq.heappush(self._heap, (float(bound), 0, row))

    def _look_at(self, rows: NDArray[np.int64]) -> None:
        """Find each row's best permitted destination, in double precision, and keep it."""
        cluster = self._cluster
        rows = rows[self._source_free[cluster.owner[rows]]]
        if not len(rows):
            return
        sources = cluster.owner[rows]
        x = cluster.row_load_s[rows].astype(np.float64)
        gains = self._gains(x, sources)
        ok = self._permitted(x, sources, gains)
        if not self._is_one_class:
            ok &= self._has_the_layers(rows, sources)
        # The greatest gain first, then the smallest name; nearly always it is good.
        best = np.where(ok, gains, -np.inf).argmax(axis=1)
        each = np.arange(len(rows))
        good = ok[each, best]
        good[good] = self._is_good(rows[good], x[good], sources[good], best[good])
        ok[each, best] = good
        others = np.flatnonzero(~good & ok.any(axis=1))
        if len(others):
            which, targets = np.nonzero(ok[others])
            which = others[which]
            ok[which, targets] = self._is_good(rows[which], x[which], sources[which], targets)
            best[others] = np.where(ok[others], gains[others], -np.inf).argmax(axis=1)
            good[others] = ok[others, best[others]]
        for i in np.flatnonzero(good).tolist():
            row, target = int(rows[i]), int(best[i])
            entry = (
                -float(gains[i, target]),
                1,
                float(cluster.rows[row, TOKENS]),
                -float(cluster.rows[row, REMAINING]),
                cluster.sequence_ids[row],
                row,
                target,
            )
            heapq.heappush(self._heap, entry)

    def _gains(self, x: Floats, sources: NDArray[np.int64]) -> Floats:
        """What moving each row to each destination gains, [num_rows, num_destinations].

        Args:
            x: Loads of the rows, [num_rows, NUM_LOADS].
        """
        weighted = self._weigh.points * x
        own = (weighted * (self._load[sources] - x)).sum(axis=1)
        gains = self._scale * (own[:, None] - weighted @ self._target_load.T)
        return np.asarray(np.round(gains, GAIN_DECIMALS))

    def _permitted(self, x: Floats, sources: NDArray[np.int64], gains: Floats) -> NDArray[np.bool_]:
        """Which destinations the balance allows each row, [num_rows, num_destinations]."""
        permitted = self._target_free & (self._destinations != sources[:, None])
        if not self._is_rescue:
            wx = x @ self._weigh.points
            before = self._w[sources][:, None] - self._target_w
            permitted &= 2.0 * wx[:, None] - before <= OVERSHOOT * before
            permitted &= (gains > 0.0) & (gains >= self._least)
        return np.asarray(permitted)

    def _has_the_layers(
        self, rows: NDArray[np.int64], sources: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which destinations each row may go to by its layers, [num_rows, num_destinations].

        No strict sequence goes where it could do less than it can here, and for the sake of balance
        alone none does; one that is rescued may, if its request allows it.
        """
        needs = self._cluster.rows[rows][:, [LEAST_LAYERS, MOST_LAYERS]]
        here = np.int64(0) if self._is_rescue else self._cluster.depth[sources]
        most = np.where(needs[:, 1] > 0, needs[:, 1], np.inf)
        depth = self._target_depth
        is_enough = depth >= np.maximum(needs[:, 0], here)[:, None]
        return np.asarray(is_enough & (depth <= most[:, None]))

    def _is_good(
        self, rows: NDArray[np.int64], x: Floats, sources: NDArray[np.int64], targets: Targets
    ) -> NDArray[np.bool_]:
        """Which rows may go to a destination each: there is room, and the move pays. [num_rows]."""
        good = self._fits(rows, targets)
        if good.any() and not (self._is_rescue or self._weigh.is_load_only):
            good[good] = self._pays(rows[good], x[good], sources[good], targets[good])
        return good

    def _fits(self, rows: NDArray[np.int64], targets: Targets) -> NDArray[np.bool_]:
        """Which destinations have room now and at their forecast peak, by the upper quantile.

        Where the whole cluster is full no peak leaves room, and nothing moves: a full replica's
        sequences are better off than those of two full ones.
        """
        cluster, destinations = self._cluster, self._destinations[targets]
        points = 1 if self._weigh.is_load_only else self._memory_points
        held = memory_rows(
            cluster.rows[rows, TOKENS].astype(np.float64),
            cluster.rows[rows, REMAINING_UPPER].astype(np.float64),
            self._target_ahead[targets, :points],
        )
        held += cluster.tokens[destinations, :points]
        limit = self._settings.memory_limit * cluster.capacity_tokens[destinations]
        is_long_enough = cluster.rows[rows, MOST_TOKENS] <= cluster.longest[destinations]
        return np.asarray(is_long_enough & (held.max(axis=1) <= limit))

    def _pays(
        self, rows: NDArray[np.int64], x: Floats, sources: NDArray[np.int64], targets: Targets
    ) -> NDArray[np.bool_]:
        """With which destinations the gain by the lower quantile beats the cost, both in seconds.

        Gain: what a sequence on the slower of the two replicas saves, over the tokens that the
        moved one lasts at least. Cost: the transfer.
        """
        cluster = self._cluster
        sure = x * (cluster.rows[rows, REMAINING_LOWER][:, None] >= TOKENS_AHEAD)
        giver, taker = cluster.load_s[sources], cluster.load_s[self._destinations[targets]]
        drop = np.maximum(giver, taker) - np.maximum(giver - sure, taker + sure)
        saved_s = drop @ TOKENS_BETWEEN
        cost_s = self._costs.seconds(cluster.rows[rows, TOKENS].astype(np.float64))
        return np.asarray(saved_s >= self._settings.cost_factor * cost_s)
