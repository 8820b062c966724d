"""What a full cluster does instead of balancing: it keeps short answers fast, long ones wait.

Below saturation balance is worth having. Above it every replica is as full as the others, each
pauses some of its sequences, and all requests are late. So where more than `ENTER_SHARE` of the
cluster's memory is promised to those that run, and others wait, the objective changes:

- Some replicas are *protected*: they take the sequences whose predicted total is short, and give
  away those that turn out to be long. What counts as short follows the load: the shortest of all
  the sequences there are, up to a share of the protected memory.
- Long ones are confined to the other replicas, and are held after prefill while those have no
  room. Of the sequences that wait, the shortest asks first.
- Nobody is held for ever: a sequence that has waited for `HOLD_SHARE` of the time it is predicted
  to run is overdue. The oldest of these asks first, and any replica with room takes it. Up to
  `HELD_SHARE` of the prefill replicas' rows are held; then admission refuses newcomers, so that
  those let in have their first tokens at once.

The objective ends below `LEAVE_SHARE`, when nobody is held.

Source: ours. ARES balances at any load (§5.2). A request counts as good or not, whatever its size,
and a few long ones hold most of the memory: serving the shortest first keeps the most good.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quadriga.core.forecast import LengthPrediction
from quadriga.policies.ares.cluster import ClusterForecast, RoleAssignment
from quadriga.policies.ares.forecast import (
    FIXED,
    MOVABLE,
    MOVES,
    REMAINING,
    REMAINING_UPPER,
    SINCE_MOVE_S,
    TOKENS,
)
from quadriga.policies.ares.settings import AresSettings

ENTER_SHARE, LEAVE_SHARE = 0.8, 0.65
"""Of the memory of a class, promised."""
PROTECTED_SHARE = 1 / 3
"""Of the replicas of a class; at least one, and at least one is left."""
SHORT_SHARE = 0.25
"""Of the protected replicas' memory, that the sequences which count as short may come to fill, by
the upper quantiles of their lengths. The rest is for those that come."""
HOLD_SHARE = 0.5
HELD_SHARE = 0.5
MIN_REMAINING_TOKENS = 300.0
"""A long sequence on a protected replica that ends sooner is not worth its move."""


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """What the overload of one class calls for, until the next tick.

    Attributes:
        protected: Names of the replicas that are kept for short sequences.
        short_tokens: Predicted total, prompt included, up to which a sequence is short.
    """

    protected: frozenset[str]
    short_tokens: float

    def open_to(
        self,
        names: Sequence[str],
        able: NDArray[np.bool_],
        total_tokens: float,
        *,
        is_overdue: bool,
    ) -> NDArray[np.bool_]:
        """Those of the able replicas that may take a sequence: [n].

        A short one goes to a protected replica where one has room, else to another; a long one to
        the others only. An overdue one goes anywhere.

        Args:
            names, able: Of n replicas; those with room.
            total_tokens: That it is predicted to come to.
        """
        if is_overdue:
            return able
        protected = able & np.array([name in self.protected for name in names], dtype=bool)
        if total_tokens > self.short_tokens:
            return np.asarray(able & ~protected)
        return protected if protected.any() else able

    def described(self, num_replicas: int, num_held: int) -> str:
        """In a line, for operators."""
        return (
            f"overload: protecting {len(self.protected)} of {num_replicas} replicas for sequences "
            f"of up to {self.short_tokens:,.0f} tokens, {num_held} held"
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
    if len(cluster) < 2 or not cluster.has_predictions:
        return False
    share = cluster.promised_tokens.sum() / cluster.capacity_tokens.sum()
    if last is None:
        return bool(share > ENTER_SHARE and num_held > 0)
    return bool(share > LEAVE_SHARE or num_held > 0)


def plan_overload(
    cluster: ClusterForecast, last: OverloadPlan | None, *, num_held: int
) -> OverloadPlan | None:
    """Return what overload calls for at this tick; None where the class is not overloaded.

    Args:
        last: The plan of the tick before; protected replicas stay protected.
        num_held: Sequences that wait for room after prefill.
    """
    n = len(cluster)
    if not is_overloaded(cluster, last, num_held=num_held):
        return None
    num_protected = min(n - 1, max(1, round(PROTECTED_SHARE * n)))
    before = last.protected if last is not None else frozenset[str]()
    order = sorted(range(n), key=lambda i: (cluster.names[i] not in before, cluster.tokens[i, 0]))
    chosen = order[:num_protected]
    room = SHORT_SHARE * float(cluster.capacity_tokens[chosen].sum())
    protected = frozenset(cluster.names[i] for i in chosen)
    return OverloadPlan(protected, _short_tokens(cluster, room))


def _short_tokens(cluster: ClusterForecast, room: float) -> float:
    """A token less than the shortest total that no longer fits a room behind all shorter ones.

    The longest there is, where all fit.
    """
    rows = cluster.rows.astype(np.float64)
    totals = rows[:, TOKENS] + rows[:, REMAINING]
    order = np.argsort(totals, kind="stable")
    filled = np.cumsum((rows[:, TOKENS] + rows[:, REMAINING_UPPER])[order])
    num_short = int(np.searchsorted(filled, room, side="right"))
    if num_short == len(totals):
        return float(totals.max(initial=0.0))
    return float(totals[order[num_short]]) - 1.0


def evictions(
    cluster: ClusterForecast,
    plan: OverloadPlan,
    settings: AresSettings,
    *,
    busy: Set[str] = frozenset(),
) -> list[RoleAssignment]:
    """Choose the moves of a tick under overload: long sequences leave protected replicas.

    The longest first, one of each replica, to the emptiest other one that its memory, as it is
    now, has room for.

    Args:
        busy: Replicas with a move under way; they neither give nor take.
    """
    rows, used = cluster.rows, cluster.tokens[:, 0].copy()
    totals = rows[:, TOKENS] + rows[:, REMAINING]
    is_free = np.array([name not in busy for name in cluster.names], dtype=bool)
    is_protected = np.array([name in plan.protected for name in cluster.names], dtype=bool)
    takes = is_free & ~is_protected & (cluster.num_paused == 0) & (cluster.free_slots > 0)
    may_go = (rows[:, MOVABLE] != FIXED) & (totals > plan.short_tokens)
    may_go &= (rows[:, REMAINING] > MIN_REMAINING_TOKENS) & (rows[:, MOVES] < settings.max_moves)
    may_go &= rows[:, SINCE_MOVE_S] >= settings.cooldown_s
    moves = []
    for source in np.flatnonzero(is_free & is_protected).tolist():
        mine = np.flatnonzero(may_go & (cluster.owner == source))
        if not len(mine):
            continue
        row = int(mine[np.argmax(totals[mine])])
        room = settings.memory_limit * cluster.capacity_tokens - rows[row, TOKENS] - used
        able = takes & (room >= 0.0)
        if not able.any():
            continue
        destination = int(np.argmin(np.where(able, used, np.inf)))
        takes[destination] = False
        moves.append(RoleAssignment(row, source, destination, 0.0, is_rescue=True))
    return moves
