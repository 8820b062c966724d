"""KV sent by a replica, as metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.observability.metrics import Registry

if TYPE_CHECKING:
    from actors.kv_transfer.transports.counts import TransportCounts


class TransportMetrics:
    """Counters of a replica's transports, exported as they grow."""

    def __init__(self, registry: Registry) -> None:
        label = ["transport"]
        self._parts = registry.counter(
            "quadriga_kv_sent_parts_total", "Parts of KV caches that reached a peer.", label
        )
        self._bytes = registry.counter("quadriga_kv_sent_bytes_total", "Their bytes.", label)
        self._seconds = registry.counter(
            "quadriga_kv_send_seconds_total", "Time from handing a part over to its arrival.", label
        )
        self._failures = registry.counter(
            "quadriga_kv_send_failures_total",
            "Parts that did not reach a peer, by error code.",
            ["transport", "code"],
        )
        self._seen: dict[str, tuple[int, int, float]] = {}
        self._seen_failures: dict[tuple[str, str], int] = {}

    def update(self, counts: TransportCounts) -> None:
        """Export what has happened since the last call."""
        for transport, sent in counts.sent.items():
            parts, num_bytes, seconds = self._seen.get(transport, (0, 0, 0.0))
            self._parts.labels(transport=transport).inc(sent.parts - parts)
            self._bytes.labels(transport=transport).inc(sent.num_bytes - num_bytes)
            self._seconds.labels(transport=transport).inc(sent.seconds - seconds)
            self._seen[transport] = (sent.parts, sent.num_bytes, sent.seconds)
        for (transport, code), count in counts.failures.items():
            before = self._seen_failures.get((transport, code), 0)
            self._failures.labels(transport=transport, code=code).inc(count - before)
            self._seen_failures[transport, code] = count
