"""What happens at a decode replica's exits, as metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quadriga.checkpoint.exits import ExitCounters, ExitUse
from quadriga.observability.metrics import Registry

_TOTALS = {
    "involuntary_exits": "Tokens that left a non-final exit below their threshold; 0 by promise.",
    "breaches": "Tokens that left the deepest exit open to them below their threshold.",
    "involuntary_stays": "Tokens that passed an exit and were carried on with their batch.",
    "splits": "Decisions to let tokens leave and the others wait.",
    "stays": "Decisions to carry a whole batch down.",
    "flushes": "Passes over tokens that waited at an exit.",
    "explored": "Decisions taken against the forecast, to keep its times fresh.",
    "buffered": "Tokens that waited at an exit.",
    "filled_tokens": "Positions whose skipped KV was filled in for a deeper pass.",
}


class ExitMetrics:
    """Counters of the engine thread, exported as they grow."""

    def __init__(self, registry: Registry) -> None:
        self._seen = ExitCounters()
        self._tokens = registry.counter(
            "quadriga_exit_tokens_total", "Tokens by the number of layers run.", ["layer"]
        )
        self._totals = {
            field: registry.counter(f"quadriga_{field.removesuffix('_tokens')}_total", text)
            for field, text in _TOTALS.items()
        }
        self._age = registry.counter(
            "quadriga_exit_wait_seconds_total", "Time that tokens waited at exits, together."
        )
        self._copied = registry.counter(
            "quadriga_exit_copied_bytes_total", "Hidden states kept for later fills."
        )
        self._profit = registry.gauge(
            "quadriga_rebatching_profit_seconds",
            "Time saved by splits since the start, as forecast and as measured.",
            ["kind"],
        )
        self._use = registry.gauge(
            "quadriga_exit_use",
            "1 for what is true of an exit now: tested, or why not (not_worth_it, "
            "full_depth_asked, not_loaded, off, idle).",
            ["layer", "use"],
        )
        self._uses: dict[int, ExitUse] = {}
        self._waiting = registry.gauge(
            "quadriga_waiting_at_exit", "Tokens that wait at an exit now.", ["exit"]
        )

    def used(self, uses: Mapping[int, ExitUse]) -> None:
        """Export which exits are in use, and why the others are not."""
        for layer, use in uses.items():
            before = self._uses.get(layer)
            if before != use:
                if before is not None:
                    self._use.labels(layer=str(layer), use=before).set(0)
                self._use.labels(layer=str(layer), use=use).set(1)
        self._uses = dict(uses)

    def update(self, now: ExitCounters, num_at_exits: Sequence[int]) -> None:
        """Export what has happened since the last call."""
        seen = self._seen
        for layer, count in now.tokens.items():
            self._tokens.labels(layer=str(layer)).inc(count - seen.tokens.get(layer, 0))
        for field, counter in self._totals.items():
            counter.inc(getattr(now, field) - getattr(seen, field))
        self._age.inc(now.buffer_age_s - seen.buffer_age_s)
        self._copied.inc(now.copied_bytes - seen.copied_bytes)
        self._profit.labels(kind="predicted").set(now.predicted_profit_s)
        self._profit.labels(kind="realised").set(now.realised_profit_s)
        for index, count in enumerate(num_at_exits):
            self._waiting.labels(exit=str(index)).set(count)
        self._seen = now
