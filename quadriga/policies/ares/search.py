"""Best-first search for the moves that remove the most variance; see `selection` for the sums."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.forecast import (
    NUM_LOADS,
    REMAINING,
    REMAINING_LOWER,
    REMAINING_UPPER,
    TOKENS,
    memory_rows,
    tokens_ahead,
)
from quadriga.policies.ares.roles import Choice, Roles, Weights
from quadriga.policies.ares.settings import (
    PAPER_REPLICAS,
    AresSettings,
    TransferCosts,
    num_memory_points,
)

GAIN_DECIMALS = 12
"""Gains, as shares of the variance, are compared to this many decimals; then ties are broken."""

_CHUNK_ROWS = 512
_SLACK = 2e-5  # what single precision may be wrong by, against the terms of a gain


class Search:
    """Best-first search over candidate rows of one tick.

    A row passes three stages, and most rows only the first: a bound over an imagined destination
    that is the best at every point; a bound over the real ones (the matrix product), in chunks
    of rows; and the exact gain under all conditions.

    Args:
        rows: All of paused sequences, or none.
        of_paused: They may go to every replica with room, and need not gain anything.
        used: Replicas that take part in a move of this tick already.
    """

    def __init__(
        self,
        cluster: ClusterForecast,
        settings: AresSettings,
        costs: TransferCosts,
        weigh: Weights,
        roles: Roles,
        variance: float,
        rows: NDArray[np.int64],
        *,
        of_paused: bool,
        used: Sequence[int],
    ) -> None:
        n = len(cluster)
        self._cluster, self._settings, self._costs, self._weigh = cluster, settings, costs, weigh
        self._of_paused = of_paused
        self._destinations = roles.takers if of_paused else roles.destinations
        self._is_rescue = roles.is_rescue | of_paused
        self._scale = 2.0 / (n * variance)
        self._least = settings.min_gain * min(1.0, PAPER_REPLICAS / n)
        # Differences alone count. Above the least of them no destination's load is negative.
        self._load = cluster.load_s - cluster.load_s[self._destinations].min(axis=0)
        self._w = cluster.load_s @ weigh.load
        self._target_load = self._load[self._destinations]
        self._target_w = self._w[self._destinations]
        self._target_free = ~np.isin(self._destinations, used)
        self._target_ahead = tokens_ahead(cluster.grid_s, cluster.step_s[self._destinations])
        self._memory_points = num_memory_points(settings, cluster.grid_s)
        self._widths = np.diff(cluster.grid_s, prepend=0.0)
        self._source_free = np.zeros(n, dtype=bool)
        self._source_free[roles.sources] = True
        self._source_free[np.array(used, dtype=np.int64)] = False
        self._omega32 = weigh.variance.astype(np.float32)
        self._target_load32 = self._target_load.astype(np.float32)
        bounds = self._first_bounds(rows)
        keep = np.flatnonzero(bounds >= self._floor(rows))
        order = keep[np.argsort(-bounds[keep], kind="stable")]
        self._unseen, self._unseen_bounds = rows[order], bounds[order]
        # (-bound, 0, row) of rows to be looked at; (-gain, 1, ties…, row, target) of those seen.
        self._heap: list[tuple[Any, ...]] = []

    def next(self) -> Choice | None:
        """The best move between replicas that are still free, or None."""
        while True:
            best = -self._heap[0][0] if self._heap else -np.inf
            if len(self._unseen) and self._unseen_bounds[0] >= best:
                self._bound_chunk()
            elif not self._heap:
                return None
            elif (entry := heapq.heappop(self._heap))[1] == 0:
                self._look_at(entry[2])
            elif (choice := self._settled(entry)) is not None:
                return choice

    def _settled(self, entry: tuple[Any, ...]) -> Choice | None:
        """The move of a row that was seen; None where its replicas were used meanwhile."""
        row, target = entry[-2:]
        source = int(self._cluster.owner[row])
        if not (self._source_free[source] and self._target_free[target]):
            self._look_at(row)
            return None
        destination = int(self._destinations[target])
        for replica in (source, destination):
            self._source_free[replica] = False
            self._target_free[self._destinations == replica] = False
        return Choice(row, source, destination, -entry[0], bool(self._is_rescue[source]))

    def _floor(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The least gain a row must promise."""
        if self._of_paused:
            return np.full(len(rows), -np.inf)
        return np.where(self._is_rescue[self._cluster.owner[rows]], 0.0, self._least)

    def _first_bounds(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Upper bounds of the gains over any destination; -1 for a row too large to pass
        the test against ping-pong with any. Single precision, with a slack for it."""
        x = self._cluster.rows[rows, :NUM_LOADS]
        owner = self._cluster.owner[rows]
        load = self._load.astype(np.float32)
        weighted = x * self._omega32
        own = load[owner]
        own -= x
        own *= weighted
        slack = weighted @ (_SLACK * (x.max(axis=0) + 2.0 * np.abs(load).max(axis=0)))
        gains = own.sum(axis=1) + slack
        bounds: NDArray[np.float64] = self._scale * gains.astype(np.float64) + 10.0**-GAIN_DECIMALS

        wx = (x @ self._weigh.load.astype(np.float32)).astype(np.float64)
        theta = self._settings.theta
        w = self._w[owner]
        margin = _SLACK * float(np.abs(self._w).max())
        too_large = wx - margin > (1.0 - theta / 2.0) * (w - self._target_w.min())
        bounds[too_large & ~self._is_rescue[owner]] = -1.0
        return bounds

    def _bound_chunk(self) -> None:
        """Bound the next rows over the real destinations, by one matrix product."""
        is_free = self._source_free[self._cluster.owner[self._unseen]]
        unseen, bounds = self._unseen[is_free], self._unseen_bounds[is_free]
        rows, self._unseen = unseen[:_CHUNK_ROWS], unseen[_CHUNK_ROWS:]
        over_best, self._unseen_bounds = bounds[:_CHUNK_ROWS], bounds[_CHUNK_ROWS:]
        if not len(rows):
            return
        weighted = self._cluster.rows[rows, :NUM_LOADS] * self._omega32
        least = (weighted @ self._target_load32[self._target_free].T).min(axis=1, initial=np.inf)
        over_real = over_best - self._scale * least * (1.0 - _SLACK)
        keep = np.flatnonzero(over_real >= self._floor(rows))
        for bound, row in zip(-over_real[keep], rows[keep].tolist(), strict=True):
            heapq.heappush(self._heap, (float(bound), 0, row))

    def _look_at(self, row: int) -> None:
        """Find the row's best permitted destination, in double precision, and keep it."""
        cluster, settings = self._cluster, self._settings
        source = int(cluster.owner[row])
        if not self._source_free[source]:
            return
        is_rescue = bool(self._is_rescue[source])
        x = cluster.rows[row, :NUM_LOADS].astype(np.float64)
        weighted = self._weigh.variance * x
        load = self._load[source]
        gains = self._scale * (weighted @ (load - x) - self._target_load @ weighted)
        gains = np.round(gains, GAIN_DECIMALS)
        ok = self._target_free & (self._of_paused | (gains > 0.0))
        if self._of_paused:
            ok &= self._destinations != source
        if not is_rescue:
            wx = float(self._weigh.load @ x)
            before = self._w[source] - self._target_w
            ok &= 2.0 * wx - before <= (1.0 - settings.theta) * before
            ok &= gains >= self._least
        for targets in self._best_first(gains, ok):
            good = self._fits(row, targets)
            if not is_rescue:
                good &= self._pays(row, x, source, targets)
            if good.any():
                target = int(targets[np.argmax(good)])
                entry = (
                    -float(gains[target]),
                    1,
                    float(cluster.rows[row, TOKENS]),
                    -float(cluster.rows[row, REMAINING]),
                    cluster.sequence_ids[row],
                    row,
                    target,
                )
                heapq.heappush(self._heap, entry)
                return

    @staticmethod
    def _best_first(
        gains: NDArray[np.float64], ok: NDArray[np.bool_]
    ) -> Iterator[NDArray[np.int64]]:
        """Permitted destinations, the greatest gain first, then the smallest name: the first one,
        which is nearly always good, then all others."""
        permitted = np.flatnonzero(ok)
        if len(permitted):
            first = int(np.argmax(gains[permitted]))
            yield permitted[first : first + 1]
            others = np.delete(permitted, first)
            yield others[np.argsort(-gains[others], kind="stable")]

    def _fits(self, row: int, targets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which destinations have room now and at their forecast peak, by the upper quantile.

        Where the whole cluster is full no peak leaves room, and nothing moves: a full replica's
        sequences are better off than those of two full ones.
        """
        cluster, destinations = self._cluster, self._destinations[targets]
        points = 1 if self._weigh.is_load_only else self._memory_points
        held = memory_rows(
            cluster.rows[row, TOKENS : TOKENS + 1].astype(np.float64),
            cluster.rows[row, REMAINING_UPPER : REMAINING_UPPER + 1].astype(np.float64),
            self._target_ahead[targets, :points],
        )
        limit = self._settings.memory_limit * cluster.capacity_tokens[destinations]
        peaks = (cluster.tokens[destinations, :points] + held).max(axis=1)
        return np.asarray(peaks <= limit)

    def _pays(
        self, row: int, x: NDArray[np.float64], source: int, targets: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """With which destinations the gain by the lower quantile beats the cost, both in seconds.

        Gain: what the slower of the two replicas saves a sequence on it, over the time that the
        moved one lasts at least. Cost: the transfer.
        """
        if self._weigh.is_load_only:
            return np.ones(len(targets), dtype=bool)
        cluster = self._cluster
        ahead = cluster.grid_s / cluster.step_s[source]
        sure = x * (ahead <= cluster.rows[row, REMAINING_LOWER])
        giver, taker = cluster.load_s[source], cluster.load_s[self._destinations[targets]]
        drop = np.maximum(giver, taker) - np.maximum(giver - sure, taker + sure)
        saved_s = (drop / (cluster.base_s[source] + giver + 1e-12)) @ self._widths
        cost_s = self._costs.seconds(float(cluster.rows[row, TOKENS]))
        return np.asarray(saved_s >= self._settings.cost_factor * cost_s)
