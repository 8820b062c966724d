"""Pausing, and the relay batch's memory, as metrics."""

from __future__ import annotations

from quadriga.core.replica import RelayMemory
from quadriga.observability.metrics import Registry


class PauseMetrics:
    """Sequences that went to host memory, and came back.

    Args:
        model: For the name that routers read.
    """

    def __init__(self, registry: Registry, model: str) -> None:
        self._paused = registry.gauge("quadriga_paused_sequences", "Sequences in host memory.")
        self._bytes = registry.gauge("quadriga_paused_kv_bytes", "Their KV, in host memory.")
        self._pauses = registry.counter("quadriga_pauses_total", "Moves to host memory.")
        self._resumes = registry.counter("quadriga_resumes_total", "Moves back.")
        self._preemptions = registry.counter(
            "vllm:num_preemptions_total", "Moves to host memory.", ["model_name"]
        ).labels(model_name=model)
        self._seen = (0, 0)

    def update(self, num_paused: int, num_bytes: int, num_pauses: int, num_resumes: int) -> None:
        """Export what is paused now, and the counts since the start."""
        self._paused.set(num_paused)
        self._bytes.set(num_bytes)
        pauses, resumes = self._seen
        self._pauses.inc(num_pauses - pauses)
        self._preemptions.inc(num_pauses - pauses)
        self._resumes.inc(num_resumes - resumes)
        self._seen = (num_pauses, num_resumes)


class RelayMetrics:
    """What the relay batch holds, and how much of its work was padding."""

    def __init__(self, registry: Registry) -> None:
        self._kv = registry.gauge(
            "quadriga_relay_kv_bytes", "K/V memory: of the dense batch, and outside.", ["place"]
        )
        self._rows = registry.gauge("quadriga_relay_rows", "Rows of the dense batch.")
        self._width = registry.gauge("quadriga_relay_width_tokens", "Columns of the dense batch.")
        self._padding = registry.gauge("quadriga_relay_padding_cells", "Cells that hold padding.")
        self._attended = registry.counter(
            "quadriga_relay_attended_cells_total", "Cells (row, column) that steps worked on."
        )
        self._idle = registry.counter(
            "quadriga_relay_idle_cells_total", "Those of them that were padding."
        )
        self._seen = (0, 0)

    def update(self, now: RelayMemory) -> None:
        """Export what is held now, and what has happened since the last call."""
        self._kv.labels(place="batch").set(now.batch_bytes)
        self._kv.labels(place="outside").set(now.row_bytes)
        self._rows.set(now.num_batch_rows)
        self._width.set(now.width)
        self._padding.set(now.padding_cells)
        attended, idle = self._seen
        self._attended.inc(now.attended_cells - attended)
        self._idle.inc(now.idle_cells - idle)
        self._seen = (now.attended_cells, now.idle_cells)
