"""Shallow and deep sequences on different decode replicas of one class, where that pays.

A step reads the weights of the layers that it runs once, for however many sequences. Where all of a
replica's tokens leave at the first exit, the layers behind it are not read at all; one sequence
that runs deep makes the step read them for all. So sequences are worth more beside their like: on
some replicas hardly any step goes deep, and on the others the deep layers are read for many.

Once a minute the model below says what a token takes on average, over all sequences, where they
are mixed, and where replicas are split at the best of all cuts. That split is looked at again a
minute later: it is made where it saves `ENTER_GAIN` or more of the sequences that run then. By
those of one moment some cut always looks good, and the next ones are others. What holds is kept
until it saves less than `LEAVE_GAIN`, or the one found a minute ago `CHANGE_GAIN` more. While it
holds,

- a newcomer whose tokens may leave early goes to a shallow replica, one whose tokens may not to a
  deep one (`preferred`). What its prompt says of its depth is next to nothing, as measured, so the
  first shall show its depth where exits are tested;
- a sequence whose expected depth says that it is on the wrong side is moved (`crossings`);
- nobody goes to a side that has more than `SPILL` times as much to do as the other one, by what the
  split gives each: it was made for other sequences than come;
- work is balanced inside each side, and memory is relieved wherever there is room.

The model: a token of a sequence runs the layers up to the first exit in use, the share f of all,
and leaves there with probability u, or runs them all; u follows from the layers that it is expected
to run. Rebatching lets those that stay wait while k passes go from the front. Then in one round

    time = Σ_{j<k} f · (base + Σ_i u_i^j · x_i)
           + (1 − f) · (base · (1 − Π_i u_i^k) + Σ_i (1 − u_i^k) · x_i)
    tokens of sequence i = Σ_{1≤j≤k} u_i^j + 1 − u_i^k

where x is what a sequence adds to a step. The best k is taken whose round is no longer than
`MOST_GAP` full steps, or full steps without exits where these are faster.

Source: ours; the round is DREX's (`policies.drex.plan`) with a rate for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quadriga.policies.ares.cluster import ClusterForecast, RoleAssignment
from quadriga.policies.ares.forecast import MOST_TOKENS, REMAINING, SHARE, TOKENS
from quadriga.policies.ares.settings import AresSettings, num_memory_points

PLAN_EVERY_S = 60.0
ENTER_GAIN, LEAVE_GAIN, CHANGE_GAIN = 0.03, 0.01, 0.02
"""Of a token's time, on average over the sequences, as the model says."""
MIN_ROWS = 4
"""Sequences a replica, on average; fewer are chance."""
MAX_SIZES, MAX_GROUPS = 8, 24
"""Numbers of shallow replicas that are tried, and cuts between the sequences."""
MOST_GAP = 1.5
MARGIN = 0.05
"""Of the layers: a sequence is moved once it is expected to be beyond the cut by so much."""
ROOM_SHARE = 0.6
"""Of the memory of a class, in use or forecast: beyond it, balance is worth more than depth."""
SPILL = 2.0
"""Times the other side's work, each over what the split gives it."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """What a step of one class costs. Source: as measured by its replicas.

    Attributes:
        front_share: f, of the layers: what every token runs.
        base_s, per_sequence_s, per_token_s: Of a step through all layers.
    """

    front_share: float
    base_s: float
    per_sequence_s: float
    per_token_s: float

    def stays(self, share: NDArray[np.float64]) -> NDArray[np.float64]:
        """1 − u: how often a token runs on behind the first exit, of the layers it is expected to
        run: [n]."""
        return np.clip((share - self.front_share) / (1.0 - self.front_share), 0.0, 1.0)

    def token_s(
        self,
        stays: NDArray[np.float64],
        tokens: NDArray[np.float64],
        num: NDArray[np.float64],
        num_replicas: NDArray[np.int64] | int,
    ) -> NDArray[np.float64]:
        """Seconds that a token takes, summed over the sequences of equal replicas: [...].

        Many cases are computed together: a scheduler that computed one by one would stand still.

        Args:
            stays: [groups], of a sequence of each group.
            tokens: [groups], KV tokens of a sequence of each, on average.
            num: [..., groups], sequences of each, on all replicas together.
            num_replicas: [...].
        """
        count = num / np.asarray(num_replicas)[..., None]
        adds = count * (self.per_sequence_s + self.per_token_s * tokens)
        full_s = self.base_s + adds.sum(axis=-1)
        best = num.sum(axis=-1) * full_s
        leaves = 1.0 - stays
        with np.errstate(divide="ignore", invalid="ignore"):
            log_shallow = np.where(count > 0.0, count * np.log(leaves), 0.0).sum(axis=-1)
        front_s, came = np.zeros_like(full_s), np.zeros(len(stays))
        left = np.ones(len(stays))  # u^j
        passes, is_short = 0, np.ones_like(full_s, dtype=bool)
        while is_short.any():
            front_s += self.front_share * (self.base_s + adds @ left)
            left = left * leaves
            came = came + left
            passes += 1
            deep_s = self.base_s * (1.0 - np.exp(passes * log_shallow)) + adds @ (1.0 - left)
            round_s = front_s + (1.0 - self.front_share) * deep_s
            is_short &= (passes == 1) | (round_s <= MOST_GAP * full_s)
            token_s = round_s * (num @ (1.0 / (came + 1.0 - left)))
            best = np.where(is_short, np.minimum(best, token_s), best)
            if passes > 1 and self.front_share * passes > MOST_GAP:
                break
        return np.asarray(best)


@dataclass(frozen=True, slots=True)
class DepthPools:
    """What was decided of one class, until it is looked at again.

    Attributes:
        shallow: Names of the replicas for shallow sequences; none: all are mixed.
        cut: Share of the layers up to which a sequence is shallow.
        gain: Share of a token's time that this split saves now, by the model, or the one that was
            found at the last look; below 0: it costs. At the first look it is the best one's.
        mixed_s, split_s: A token's time, on average over the sequences, mixed and by that split.
        at_unix_s: When it was decided.
        members: All replicas there were.
        work: That the split gives a shallow and a deep replica, over the mean.
        found: Shallow replicas and cut of the best split for the sequences that run now; 0 of
            them where none has room.
    """

    shallow: frozenset[str]
    cut: float
    gain: float
    mixed_s: float
    split_s: float
    at_unix_s: float
    members: frozenset[str]
    work: tuple[float, float] = (1.0, 1.0)
    found: tuple[int, float] = (0, 1.0)

    @property
    def is_on(self) -> bool:
        return bool(self.shallow)

    def looked_at(self) -> list[tuple[float, float]]:
        """Splits that are worth another look, that which holds first: share of the replicas that
        are shallow, and cut."""
        held = [(len(self.shallow), self.cut)] if self.is_on else []
        found = [self.found] if self.found[0] else []
        return [(size / len(self.members), cut) for size, cut in held + found]

    def is_shallow(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """Which replicas are for shallow sequences: [n]."""
        return np.array([name in self.shallow for name in names], dtype=bool)

    def side_of(self, name: str) -> str:
        """For which sequences a replica is; empty where they are mixed."""
        if not self.is_on:
            return ""
        return "shallow" if name in self.shallow else "deep"

    def described(self) -> str:
        """In a line, for operators."""
        figure = f"{100 * self.gain:.1f} % of a token's time by the model"
        if not self.is_on:
            return f"depths mixed: a split would save {figure}"
        return (
            f"depths apart: {len(self.shallow)} of {len(self.members)} replicas for sequences of "
            f"up to {self.cut:.2f} of the layers, saves {figure}"
        )


def is_due(last: DepthPools | None, names: Sequence[str], now_unix_s: float) -> bool:
    """Whether a class is to be looked at again: after a minute, or as replicas came or went."""
    if last is None or last.members != frozenset(names):
        return True
    return now_unix_s - last.at_unix_s >= PLAN_EVERY_S


def plan_pools(
    cluster: ClusterForecast, settings: AresSettings, last: DepthPools | None, now_unix_s: float
) -> DepthPools | None:
    """Decide whether the replicas of one class are split, and how.

    Args:
        cluster: With the rows of all replicas.
        last: Of the minute before; shallow replicas stay shallow.

    Returns:
        None where nothing can be said: one replica, no exit in use, or hardly any sequence. Mixed
        where memory is short: what holds it is spread evenly then.
    """
    n = len(cluster)
    if n < 2 or cluster.front_share >= 1.0 or len(cluster.rows) < MIN_ROWS * n:
        return None
    splits = _Splits(cluster, settings)
    mixed_s, (best_s, found) = splits.mixed_s, splits.best()
    chosen_s, size, cut = best_s, 0, 1.0
    was_on = last is not None and last.is_on
    if last is not None:
        for share_of_replicas, before in last.looked_at():
            some = min(max(round(share_of_replicas * n), 1), n - 1)
            here_s = splits.token_s(some, before)
            if not size or here_s < chosen_s - was_on * CHANGE_GAIN * mixed_s:
                chosen_s, size, cut = here_s, some, before
    gain = 1.0 - chosen_s / mixed_s if chosen_s < np.inf else 0.0
    points = num_memory_points(settings, cluster.grid_s)
    peak = cluster.tokens[:, :points].sum(axis=0).max() / cluster.capacity_tokens.sum()
    has_room = peak <= ROOM_SHARE and not cluster.num_paused.any()
    is_on = size > 0 and has_room and gain >= (LEAVE_GAIN if was_on else ENTER_GAIN)
    return DepthPools(
        shallow=_shallow(cluster, last, size) if is_on else frozenset(),
        cut=cut if is_on else 1.0,
        gain=gain,
        mixed_s=mixed_s / len(cluster.rows),
        split_s=mixed_s * (1.0 - gain) / len(cluster.rows),
        at_unix_s=now_unix_s,
        members=frozenset(cluster.names),
        work=splits.work(size, cut) if is_on else (1.0, 1.0),
        found=found,
    )


class _Splits:
    """What a token takes by the ways to split a class, for the sequences that run now."""

    def __init__(self, cluster: ClusterForecast, settings: AresSettings) -> None:
        self._n = n = len(cluster)
        costs = cluster.measured
        self._model = StepModel(
            cluster.front_share, cluster.base_s, costs.per_sequence_s, costs.per_token_s
        )
        self._share, self._tokens, self._num = _groups(cluster.rows.astype(np.float64))
        self._stays = self._model.stays(self._share)
        self._slots = (cluster.free_slots + np.bincount(cluster.owner, minlength=n)).mean()
        self._room = settings.memory_limit * cluster.capacity_tokens.mean()
        self.mixed_s = float(self._model.token_s(self._stays, self._tokens, self._num, n))

    def best(self) -> tuple[float, tuple[int, float]]:
        """The least that a token takes, summed, with the number of shallow replicas and the cut;
        infinite, and 0 replicas, where no split has room."""
        share, sizes = self._share, np.array(_sizes(self._n))
        all_s = self._summed_s(np.tri(len(share) - 1, len(share), dtype=bool), sizes)
        if not np.isfinite(all_s).any():
            return np.inf, (0, 1.0)
        size, at = np.unravel_index(all_s.argmin(), all_s.shape)
        return float(all_s[size, at]), (int(sizes[size]), float(share[at : at + 2].mean()))

    def token_s(self, size: int, cut: float) -> float:
        """What a token takes, summed, by one split; infinite where a side lacks room."""
        return float(self._summed_s((self._share <= cut)[None], np.array([size]))[0, 0])

    def work(self, size: int, cut: float) -> tuple[float, float]:
        """What a shallow and a deep replica get of a split, over the mean of all."""
        work, is_shallow = self._num * self._share, self._share <= cut
        mean = work.sum() / self._n
        shallow, deep = work[is_shallow].sum() / size, work[~is_shallow].sum() / (self._n - size)
        return float(shallow / mean), float(deep / mean)

    def _summed_s(
        self, is_shallow: NDArray[np.bool_], sizes: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Of sides of the groups [cuts, groups] and numbers of shallow replicas: [sizes, cuts]."""
        replicas = np.stack((sizes, self._n - sizes))[:, :, None]
        held = self._num * np.stack((is_shallow, ~is_shallow))[:, None]
        has_slots = held.sum(axis=-1) <= self._slots * replicas
        fits = has_slots & (held @ self._tokens <= self._room * replicas)
        both_s = self._model.token_s(self._stays, self._tokens, held, replicas).sum(axis=0)
        return np.where(fits.all(axis=0), both_s, np.inf)


def _groups(
    rows: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Sequences of about the same depth together: share, KV tokens of one, number; ascending."""
    order = np.argsort(rows[:, SHARE], kind="stable")
    share, tokens = rows[order, SHARE], rows[order, TOKENS]
    starts = np.flatnonzero(np.diff(share, prepend=-1.0) > 0.0)
    if len(starts) > MAX_GROUPS:
        even = np.arange(MAX_GROUPS) * len(share) // MAX_GROUPS
        starts = np.unique(starts[np.searchsorted(starts, even, side="right") - 1])
    num = np.diff(starts, append=len(share)).astype(np.float64)
    return (np.add.reduceat(share, starts) / num, np.add.reduceat(tokens, starts) / num, num)


def _sizes(n: int) -> list[int]:
    """Numbers of shallow replicas to try, of n."""
    if n - 1 <= MAX_SIZES:
        return list(range(1, n))
    return sorted({round(n * (i + 1) / (MAX_SIZES + 1)) for i in range(MAX_SIZES)})


def _shallow(cluster: ClusterForecast, last: DepthPools | None, size: int) -> frozenset[str]:
    """The replicas that were shallow before, then those whose sequences are the shallowest."""
    before = frozenset[str]() if last is None else last.shallow
    held = np.bincount(cluster.owner, minlength=len(cluster))
    sums = np.bincount(cluster.owner, cluster.rows[:, SHARE], minlength=len(cluster))
    mean = sums / np.maximum(held, 1)
    order = sorted(range(len(cluster)), key=lambda i: (cluster.names[i] not in before, mean[i], i))
    return frozenset(cluster.names[i] for i in order[:size])


def preferred(
    pools: DepthPools,
    cluster: ClusterForecast,
    fits: NDArray[np.bool_],
    settings: AresSettings,
    *,
    leaves_early: bool,
) -> NDArray[np.bool_]:
    """Those of the replicas that shall take a newcomer: its own side, unless that is full or has
    far more to do.

    Args:
        fits: [n], those with room.
        leaves_early: Its tokens may leave early.
    """
    is_mine = pools.is_shallow(cluster.names) == leaves_early
    mine, other = fits & is_mine, fits & ~is_mine
    if not mine.any() or not other.any():
        return fits
    over = _over_split(cluster, pools, settings)
    return mine if over[mine].min() <= SPILL * over[other].min() else fits


def _over_split(
    cluster: ClusterForecast, pools: DepthPools, settings: AresSettings
) -> NDArray[np.float64]:
    """Work of each replica over what the split gives one of its side: [n]."""
    shallow, deep = (max(share, 1e-9) for share in pools.work)
    usual = np.where(pools.is_shallow(cluster.names), shallow, deep)
    return np.asarray((cluster.load_s @ settings.weights) / usual)


def crossings(
    cluster: ClusterForecast,
    pools: DepthPools,
    settings: AresSettings,
    rows: NDArray[np.int64],
    *,
    busy: Set[str] = frozenset(),
) -> list[RoleAssignment]:
    """Choose the moves to the other side, one of each replica: most layers × tokens first.

    Args:
        rows: Those that may move, and last long enough for it.
        busy: Replicas with a move under way; they neither give nor take.
    """
    is_shallow = pools.is_shallow(cluster.names)
    is_free = np.array([name not in busy for name in cluster.names], dtype=bool)
    share = cluster.rows[rows, SHARE].astype(np.float64)
    on_shallow = is_shallow[cluster.owner[rows]]
    off = np.where(on_shallow, share - pools.cut, pools.cut - share)
    gain = off * cluster.rows[rows, REMAINING]
    work = cluster.load_s @ settings.weights
    over_split = _over_split(cluster, pools, settings)
    takes = is_free & (cluster.num_paused == 0) & (cluster.free_slots > 0)
    used, moves = cluster.tokens.max(axis=1), []
    for at in np.argsort(-gain, kind="stable").tolist():
        row, source = int(rows[at]), int(cluster.owner[rows[at]])
        if off[at] <= MARGIN or not is_free[source]:
            continue
        room = settings.memory_limit * cluster.capacity_tokens - used
        able = takes & (is_shallow != is_shallow[source]) & (room >= cluster.rows[row, TOKENS])
        able &= over_split <= SPILL * over_split[source]
        able &= cluster.longest >= cluster.rows[row, MOST_TOKENS]
        if not able.any():
            continue
        destination = int(np.argmin(np.where(able, work, np.inf)))
        is_free[source] = takes[destination] = takes[source] = is_free[destination] = False
        moves.append(RoleAssignment(row, source, destination, pools.gain, is_rescue=False))
    return moves
