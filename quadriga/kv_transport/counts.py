"""Counts of the KV that a replica sent to its peers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SentBytes:
    """Parts that arrived, by one transport."""

    parts: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class TransportCounts:
    """Since the replica's start, by transport; failures by transport and error code."""

    sent: dict[str, SentBytes] = field(default_factory=dict)
    failures: dict[tuple[str, str], int] = field(default_factory=dict)

    def arrived(self, transport: str, num_bytes: int, seconds: float) -> None:
        """Count a part that the peer has."""
        sent = self.sent.setdefault(transport, SentBytes())
        sent.parts += 1
        sent.num_bytes += num_bytes
        sent.seconds += seconds

    def failed(self, transport: str, code: str) -> None:
        """Count a part that the peer does not have."""
        self.failures[transport, code] = self.failures.get((transport, code), 0) + 1
