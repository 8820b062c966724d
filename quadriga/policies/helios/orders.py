"""One order at a time: who was asked for what, until when, and who is left alone for a while."""

from __future__ import annotations

from dataclasses import dataclass

from quadriga.core.replica import DepthClass
from quadriga.policies.helios.messages import Order, Resize, Switch

MAX_BACKOFF_S = 3600.0
LATE = "no answer in time"


@dataclass(slots=True)
class _Backoff:
    until_s: float
    delay_s: float


class PendingAction:
    """Writes orders and remembers the one under way.

    Args:
        timeout_s: An order without an answer by then has failed.
        retry_s: A replica whose order failed is left alone for this long, doubling.

    Attributes:
        order: The one under way, or None.
    """

    def __init__(self, timeout_s: float, retry_s: float) -> None:
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._num_orders = 0
        self._backoff: dict[str, _Backoff] = {}
        self.order: Order | None = None

    def write(
        self, replica: str, now: DepthClass, then: DepthClass, reason: str, now_s: float
    ) -> Order:
        """Order a change; there must be none under way."""
        assert self.order is None
        self._num_orders += 1
        kind: type[Order] = Resize if now.model == then.model else Switch
        self.order = kind(self._num_orders, replica, then, now_s + self._timeout_s, reason)
        return self.order

    def take(self, order_id: int) -> Order | None:
        """The order that an answer is about, which is over then; None for a stale answer."""
        order = self.order
        if order is None or order.order_id != order_id:
            return None
        self.order = None
        return order

    def is_late(self, now_s: float) -> bool:
        """Whether the one under way should have been answered."""
        return self.order is not None and now_s >= self.order.deadline_s

    def back_off(self, replica: str, now_s: float) -> float:
        """Leave a replica alone; returns for how long."""
        last = self._backoff.get(replica)
        delay_s = min(2.0 * last.delay_s, MAX_BACKOFF_S) if last else self._retry_s
        self._backoff[replica] = _Backoff(now_s + delay_s, delay_s)
        return delay_s

    def forgive(self, replica: str) -> None:
        """It did as ordered, or will be asked for something else."""
        self._backoff.pop(replica, None)

    def may_ask(self, replica: str, now_s: float) -> bool:
        """Whether its time alone is over."""
        backoff = self._backoff.get(replica)
        return backoff is None or now_s >= backoff.until_s
