"""What a replica remembers of sequences that left it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

MAX_REMEMBERED = 8192


class DepartedSequences:
    """The last sequences that were cancelled or that another replica took over; for any thread.

    A cancellation is remembered because the sequence may still be on its way here, the new owner
    because the ingress that cancels may not have heard of it yet.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[str, str | None] = {}  # where it went; None: cancelled

    def is_cancelled(self, sequence_id: str) -> bool:
        return self._peers.get(sequence_id, "") is None

    def cancel(self, sequence_ids: Iterable[str]) -> dict[str, str]:
        """Note cancellations. Returns the new owners of those that went, each of them once."""
        owners = {}
        with self._lock:
            for sequence_id in sequence_ids:
                if peer := self._peers.get(sequence_id):
                    owners[sequence_id] = peer
                self._remember(sequence_id, None)
        return owners

    def move(self, sequence_id: str, peer: str) -> bool:
        """Note a new owner. Returns False where it was cancelled before, which stays noted."""
        with self._lock:
            if self.is_cancelled(sequence_id):
                return False
            self._remember(sequence_id, peer)
            return True

    def come_back(self, sequence_id: str) -> None:
        """Forget where a sequence went that is here again."""
        with self._lock:
            if not self.is_cancelled(sequence_id):
                self._peers.pop(sequence_id, None)

    def _remember(self, sequence_id: str, peer: str | None) -> None:
        self._peers[sequence_id] = peer
        if len(self._peers) > MAX_REMEMBERED:
            del self._peers[next(iter(self._peers))]
