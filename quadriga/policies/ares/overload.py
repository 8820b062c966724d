"""What a full cluster does instead of balancing: it keeps short answers fast, long ones wait.

Below saturation balance is worth having. Above it every replica is as full as the others, each
pauses some of its sequences, and all requests are late. So where more than `ENTER_SHARE` of the
memory of a depth class is promised to those that run, and others wait, the objective of its model
changes:

- A sequence is placed by forecast: a replica has room for it where its memory stays below
  `ROOM_SHARE` until the sequence ends, as the answers that run there grow and end, and with so much
  more as they may be longer than forecast, all together. An upper quantile promised to each for
  itself would leave most of the memory unused: half of the answers are over before the others are
  as long as they become, and who is longer than forecast is made up for by who is shorter.
- Some replicas are *protected*: they take the sequences whose predicted total is short. What counts
  as short follows the load: the shortest of all the sequences there are, up to a share of the
  protected memory. Long ones go there where no other replica has room, and only up to `LONG_SHARE`;
  a protected replica that is fuller than that gives them away.
- Who has no room is held after prefill, unless it is more important than somebody who runs. Of the
  sequences that wait, the shortest asks first.
- Nobody is held for ever: a sequence that has waited for `HOLD_SHARE` of the time it is predicted
  to run is overdue. The oldest of these asks first, and any replica with room takes it; after
  `MAX_HOLD_SHARE` of that time the room for what it has now is enough. Up to `HELD_SHARE` of the
  prefill replicas' rows are held; then admission refuses newcomers, so that those let in have
  their first tokens at once.

The objective ends below `LEAVE_SHARE`, when nobody is held. Where a model is served at several
depths, each class of two replicas or more has protected ones; what is short is the same in all.

Source: ours. ARES balances at any load (§5.2). A request counts as good or not, whatever its size,
and a few long ones hold most of the memory: serving the shortest first keeps the most good.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quadriga.core.forecast import LengthPrediction
from quadriga.policies.ares.cluster import ClusterForecast, RoleAssignment
from quadriga.policies.ares.forecast import (
    FIXED,
    MOST_TOKENS,
    MOVABLE,
    MOVES,
    REMAINING,
    REMAINING_UPPER,
    SINCE_MOVE_S,
    TOKENS,
    memory_rows,
    tokens_ahead,
)
from quadriga.policies.ares.settings import AresSettings

ENTER_SHARE, LEAVE_SHARE = 0.8, 0.65
"""Of the memory of a class, promised."""
PROTECTED_SHARE = 1 / 3
"""Of the replicas of a class that has two or more; at least one, and at least one is left."""
SHORT_SHARE = 0.25
"""Of the protected replicas' memory, that the sequences which count as short may come to fill, by
the upper quantiles of their lengths. The rest is for those that come."""
ROOM_SHARE = 0.9
"""Of a replica's memory, that may be full at any time ahead, by the means of the forecast."""
LONG_SHARE = 1.0 - SHORT_SHARE
"""The same of a protected replica, for a long one: what the short ones may come to fill stays free.
With a half, a sixth of the memory of three replicas stood idle where nearly all are long."""
HOLD_SHARE = 2.0
MAX_HOLD_SHARE = 4.0
"""Of the time that a sequence is predicted to run: see the module."""
HELD_SHARE = 0.5
"""Of the prefill replicas' rows."""
MIN_REMAINING_TOKENS = 300.0
"""A long sequence on a protected replica that ends sooner is not worth its move."""


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """What the overload of one model calls for, until the next tick.

    Attributes:
        protected: Names of the replicas that are kept for short sequences.
        short_tokens: Predicted total, prompt included, up to which a sequence is short.
        spread_tokens: By replica, how far its memory may lie above the forecast at each point of
            the grid: errors of the predictions are taken to be independent.
    """

    protected: frozenset[str]
    short_tokens: float
    spread_tokens: dict[str, list[float]] = field(default_factory=dict)

    def open_to(
        self,
        cluster: ClusterForecast,
        able: NDArray[np.bool_],
        num_tokens: int,
        prediction: LengthPrediction,
        waited_s: float,
    ) -> NDArray[np.bool_]:
        """Return those of the able replicas that may take a sequence: [n]; see the module.

        A short one goes to a protected replica where one has room, else to another; a long one to
        another where one has room, else to a protected one that stays below `LONG_SHARE`, or has
        room at all where it is overdue.

        Args:
            able: Of the cluster's n replicas; those that have room for what it has now.
            num_tokens: Of its KV cache.
            waited_s: Since it was prefilled.
        """
        step_s = float(cluster.step_s.mean())
        if waited_s > MAX_HOLD_SHARE * prediction.mean * step_s:
            return able
        peak = self.peak_share(cluster, num_tokens, prediction)
        fits = np.asarray(able & (peak <= ROOM_SHARE))
        protected = np.array([name in self.protected for name in cluster.names], dtype=bool)
        if num_tokens + prediction.mean <= self.short_tokens:
            inside: NDArray[np.bool_] = fits & protected
            return inside if inside.any() else fits
        outside: NDArray[np.bool_] = fits & ~protected
        if outside.any():
            return outside
        late = is_overdue(waited_s, prediction, step_s)
        return fits if late else np.asarray(fits & (peak <= LONG_SHARE))

    def peak_share(
        self,
        cluster: ClusterForecast,
        num_tokens: int = 0,
        prediction: LengthPrediction | None = None,
    ) -> NDArray[np.float64]:
        """Return the share of each replica's memory that may be held at any time ahead: [n].

        Args:
            num_tokens, prediction: Of one more sequence, that each would take. Then the time until
                it ends counts, and no more.
        """
        certain = [0.0] * len(cluster.grid_s)
        spread = np.array([self.spread_tokens.get(name, certain) for name in cluster.names])
        held = cluster.tokens
        if prediction is not None:
            n, ahead = len(cluster), tokens_ahead(cluster.grid_s, cluster.step_s)
            size, upper = np.full(n, float(num_tokens)), max(prediction.mean, prediction.upper)
            mine = memory_rows(size, np.full(n, prediction.mean), ahead)
            most = memory_rows(size, np.full(n, upper), ahead)
            held = np.where(most > 0.0, held + mine, 0.0)
            spread = np.where(most > 0.0, np.hypot(spread, most - mine), 0.0)
        return np.asarray((held + spread).max(axis=1) / cluster.capacity_tokens)

    def described(self, names: Collection[str], num_held: int) -> str:
        """In a line, for operators; of the replicas of one class."""
        return (
            f"overload: protecting {len(self.protected & set(names))} of {len(names)} replicas for "
            f"sequences of up to {self.short_tokens:,.0f} tokens, {num_held} held"
        )


def may_hold_more(num_held: int, num_rows: int) -> bool:
    """Whether a newcomer may be let in that perhaps has to be held.

    Args:
        num_held: Sequences that wait for room after prefill.
        num_rows: KV rows of the prefill replicas.
    """
    return num_held < HELD_SHARE * num_rows


def is_overdue(waited_s: float, prediction: LengthPrediction, step_s: float) -> bool:
    """Whether a sequence has waited for `HOLD_SHARE` of its predicted run, or longer.

    Args:
        step_s: A decode step of its class, on average.
    """
    return waited_s > HOLD_SHARE * prediction.mean * step_s


def is_overloaded(cluster: ClusterForecast, last: OverloadPlan | None, *, num_held: int) -> bool:
    """Whether there is overload, and something to be done. Arguments as in `plan_overload`."""
    if not cluster.has_predictions or not any(len(members) > 1 for members in _classes(cluster)):
        return False
    share = max(
        cluster.promised_tokens[members].sum() / cluster.capacity_tokens[members].sum()
        for members in _classes(cluster)
    )
    if last is None:
        return bool(share > ENTER_SHARE and num_held > 0)
    return bool(share > LEAVE_SHARE or num_held > 0)


def _classes(cluster: ClusterForecast) -> list[list[int]]:
    """Indices of the replicas of each depth."""
    found: dict[int, list[int]] = {}
    for index, depth in enumerate(cluster.depth.tolist()):
        found.setdefault(depth, []).append(index)
    return list(found.values())


def plan_overload(
    cluster: ClusterForecast, last: OverloadPlan | None, *, num_held: int
) -> OverloadPlan | None:
    """Return what overload calls for at this tick; None where no class is overloaded.

    Args:
        cluster: All replicas of one model.
        last: The plan of the tick before; protected replicas stay protected.
        num_held: Sequences that wait for room after prefill.
    """
    if not is_overloaded(cluster, last, num_held=num_held):
        return None
    before = last.protected if last is not None else frozenset[str]()
    chosen: list[int] = []
    for members in _classes(cluster):
        n = len(members)
        members.sort(key=lambda i: (cluster.names[i] not in before, cluster.tokens[i, 0]))
        chosen += members[: min(n - 1, max(1, round(PROTECTED_SHARE * n)))]
    room = SHORT_SHARE * float(cluster.capacity_tokens[chosen].sum())
    protected = frozenset(cluster.names[i] for i in chosen)
    return OverloadPlan(protected, _short_tokens(cluster, room), _spread_tokens(cluster))


def _spread_tokens(cluster: ClusterForecast) -> dict[str, list[float]]:
    """See `OverloadPlan.spread_tokens`."""
    rows = cluster.rows.astype(np.float64)
    size, mean = rows[:, TOKENS], rows[:, REMAINING]
    ahead = tokens_ahead(cluster.grid_s, cluster.step_s)[cluster.owner]
    above = memory_rows(size, np.maximum(rows[:, REMAINING_UPPER], mean), ahead)
    above -= memory_rows(size, mean, ahead)
    squares = np.zeros_like(cluster.tokens)
    np.add.at(squares, cluster.owner, above * above)
    return dict(zip(cluster.names, np.sqrt(squares).tolist(), strict=True))


def _short_tokens(cluster: ClusterForecast, room: float) -> float:
    """The longest total that fits a room behind all shorter ones.

    Where none does: who is shorter than all that are there and fits the room.
    """
    rows = cluster.rows.astype(np.float64)
    totals = rows[:, TOKENS] + rows[:, REMAINING]
    order = np.argsort(totals, kind="stable")
    filled = np.cumsum((rows[:, TOKENS] + rows[:, REMAINING_UPPER])[order])
    num_short = int(np.searchsorted(filled, room, side="right"))
    if not num_short:
        return min(room, float(totals.min(initial=np.inf)) - 1.0)
    return float(totals[order[num_short - 1]])


def evictions(
    cluster: ClusterForecast,
    plan: OverloadPlan,
    settings: AresSettings,
    *,
    busy: Set[str] = frozenset(),
) -> list[RoleAssignment]:
    """Choose the moves of a tick under overload: long sequences leave protected replicas.

    Those that are forecast to be fuller than `LONG_SHARE` give away their longest, one each, to the
    emptiest other one that its memory, as it is now, has room for: short ones shall not wait, and
    the others may.

    Args:
        busy: Replicas with a move under way; they neither give nor take.
    """
    rows, used = cluster.rows, cluster.tokens[:, 0]
    totals = rows[:, TOKENS] + rows[:, REMAINING]
    is_free = np.array([name not in busy for name in cluster.names], dtype=bool)
    is_protected = np.array([name in plan.protected for name in cluster.names], dtype=bool)
    takes = is_free & ~is_protected & (cluster.num_paused == 0) & (cluster.free_slots > 0)
    gives = is_free & is_protected & (plan.peak_share(cluster) > LONG_SHARE)
    may_go = (rows[:, MOVABLE] != FIXED) & (totals > plan.short_tokens)
    may_go &= (rows[:, REMAINING] > MIN_REMAINING_TOKENS) & (rows[:, MOVES] < settings.max_moves)
    may_go &= rows[:, SINCE_MOVE_S] >= settings.cooldown_s
    moves = []
    for source in np.flatnonzero(gives).tolist():
        mine = np.flatnonzero(may_go & (cluster.owner == source))
        if not len(mine):
            continue
        row = int(mine[np.argmax(totals[mine])])
        able = takes & (used + float(rows[row, TOKENS]) <= ROOM_SHARE * cluster.capacity_tokens)
        able &= cluster.longest >= rows[row, MOST_TOKENS]
        if not able.any():
            continue
        destination = int(np.argmin(np.where(able, used, np.inf)))
        takes[destination] = False
        moves.append(RoleAssignment(row, source, destination, 0.0, is_rescue=True))
    return moves
