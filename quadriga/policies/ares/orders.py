"""Orders that are out, and what became of the recent ones: what is to be left alone for now.

Soft state: a scheduler that starts anew knows nothing of orders under way. They end by themselves
(source and destination hold the leases), the sequences on their way are marked as such in the
snapshots, and a second order for one of them is refused by its source.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport

SETTLE_S = 3.0
"""After a move its replicas are taken part in no other until both have reported anew, or for this
long: until then their snapshots still show the sequence where it was."""
MAX_BACKOFF_FACTOR = 16.0
MAX_RECENT = 256
MAX_REMEMBERED = 4096
REASONS = {
    MigrationCause.DRAIN: "its replica ends or shall be empty, so all that runs there moves to the "
    "replicas with the most room",
    MigrationCause.ESCALATE: "its request is strict and needs layers that its replica has not "
    "loaded, so it moves to the deepest replica with room",
}
"""Of orders that the controller gives, why."""


@dataclass(slots=True)
class MoveDecision:
    """One order and its end, for operators.

    Attributes:
        explanation: What it was decided by; see `explanation.explain`.
        report: None while it is under way.
    """

    at_unix_s: float
    order: MigrationOrder
    explanation: dict[str, Any] = field(default_factory=dict)
    report: MigrationReport | None = None


class MoveTracker:
    """What takes part in a move, and what is left alone after one that failed.

    Args:
        max_concurrent: Orders out at once.
        backoff_s: Rest of a sequence after its first failure; doubles with each further one.

    Attributes:
        recent: The last decisions, oldest first.
        outcomes: Number of ended orders by outcome.
    """

    def __init__(self, *, max_concurrent: int, backoff_s: float) -> None:
        self.max_concurrent = max_concurrent
        self.backoff_s = backoff_s
        self.recent: deque[MoveDecision] = deque(maxlen=MAX_RECENT)
        self.outcomes: Counter[str] = Counter()
        self._out: dict[str, MoveDecision] = {}
        self._settling: dict[str, float] = {}  # replica → since when its snapshot may be too old
        self._resting: dict[str, float] = {}  # replica → until when
        self._strikes: dict[str, tuple[int, float]] = {}  # sequence → (failures, until when)

    @property
    def under_way(self) -> list[MigrationOrder]:
        return [decision.order for decision in self._out.values()]

    @property
    def num_free(self) -> int:
        """Orders that may still be given."""
        return max(0, self.max_concurrent - len(self._out))

    def busy(self, now_s: float) -> frozenset[str]:
        """Replicas that shall neither give nor take now."""
        self._settling = {n: at for n, at in self._settling.items() if now_s - at < SETTLE_S}
        self._resting = {name: until for name, until in self._resting.items() if until > now_s}
        taking_part = {name for o in self.under_way for name in (o.source, o.destination)}
        return frozenset(taking_part | self._settling.keys() | self._resting.keys())

    def fixed(self, now_s: float) -> frozenset[str]:
        """Sequences that shall stay where they are now."""
        return frozenset(s for s, (_, until) in self._strikes.items() if until > now_s)

    def ordered(
        self, order: MigrationOrder, now_unix_s: float, explanation: dict[str, Any] | None = None
    ) -> None:
        """An order is going out."""
        decision = MoveDecision(now_unix_s, order, explanation or {})
        self._out[order.sequence_id] = decision
        self.recent.append(decision)

    def told(self, order: MigrationOrder, report: MigrationReport, now_unix_s: float) -> None:
        """A replica has carried out an order of the controller's; the same may be told again."""
        for decision in self.recent:
            if decision.order == order:
                decision.report = report
                return
        text = f"{REASONS[order.cause]}{order.reason and f': {order.reason}'}"
        explanation = {"by": "controller", "text": text}
        self.recent.append(MoveDecision(now_unix_s - report.took_s, order, explanation, report))

    def of_request(self, request_id: str) -> list[MoveDecision]:
        """Decisions about the sequences of one request, oldest first; a sequence's id begins with
        its request's."""
        return [
            d
            for d in self.recent
            if d.order.sequence_id == request_id or d.order.sequence_id.startswith(f"{request_id}-")
        ]

    def ended(self, order: MigrationOrder, report: MigrationReport, now_s: float) -> None:
        """An order is over, in whatever way."""
        decision = self._out.pop(order.sequence_id, None)
        if decision is not None:
            decision.report = report
        self.outcomes[report.outcome] += 1
        if report.outcome in ("moved", "unknown"):
            for name in (order.source, order.destination):
                self._settling[name] = now_s
        if report.outcome in ("refused", "failed", "unknown"):
            count = self._strikes.get(order.sequence_id, (0, 0.0))[0] + 1
            pause_s = self.backoff_s * min(2.0 ** (count - 1), MAX_BACKOFF_FACTOR)
            self._strikes[order.sequence_id] = count, now_s + pause_s
            if report.at_fault:
                self._resting[report.at_fault] = now_s + self.backoff_s
            while len(self._strikes) > MAX_REMEMBERED:
                del self._strikes[next(iter(self._strikes))]

    def reported(self, replica: str, now_s: float) -> None:
        """A replica's snapshot has arrived, taken after everything that ended before."""
        if self._settling.get(replica, now_s) < now_s:
            del self._settling[replica]

    def replica_died(self, replica: str) -> None:
        """Nothing is known of it any more; orders it takes part in end by themselves."""
        self._settling.pop(replica, None)
        self._resting.pop(replica, None)
