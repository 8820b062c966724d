"""Metrics as rows of a table: name, meaning, how the value is read, and labels.

A `MetricTable` declares rows in a registry. `update` reads every row that says how: a gauge takes
the value, a counter rises to it. Rows without `read` are counted by name as things happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

from quadriga.observability.metrics import LATENCY_BUCKETS_S, Registry


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of a process.

    Attributes:
        read: The attribute (`"a.b"`), or a function, that gives the present value of a gauge or
            the total so far of a counter: a number; numbers by label, or by tuples of labels; a
            tuple of numbers, labelled 0, 1, …; None where there is nothing to export.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    text: str
    read: str | Callable[[Any], Any] | None = None
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S

    def values(self, source: Any) -> dict[tuple[str, ...], float] | None:
        """What the row reads of a source, by labels; None where it reads nothing."""
        if self.read is None:
            return None
        found = _path(source, self.read) if isinstance(self.read, str) else self.read(source)
        if found is None:
            return None
        if isinstance(found, tuple):
            found = dict(enumerate(found))
        if not isinstance(found, Mapping):
            return {(): found}
        return {k if isinstance(k, tuple) else (str(k),): value for k, value in found.items()}


counter = partial(MetricRow, "counter")
gauge = partial(MetricRow, "gauge")
histogram = partial(MetricRow, "histogram")


def _path(source: Any, path: str) -> Any:
    return reduce(lambda x, name: None if x is None else getattr(x, name), path.split("."), source)


class MetricTable:
    """The metrics of some rows in one registry."""

    def __init__(self, registry: Registry, rows: Iterable[MetricRow]) -> None:
        self._rows = tuple(rows)
        self._metrics: dict[str, Any] = {}
        self._last: dict[str, dict[tuple[str, ...], float]] = {}
        for row in self._rows:
            args = (row.name, row.text, row.labels)
            if row.kind == "histogram":
                self._metrics[row.name] = registry.histogram(*args, row.buckets)
            else:
                declare = registry.counter if row.kind == "counter" else registry.gauge
                self._metrics[row.name] = declare(*args)

    def update(self, source: Any) -> None:
        """Bring every row that reads from `source` up to date.

        A gauge that is not read any more goes to 0; one with labels has no series where they are
        not read. A total that fell has begun anew.
        """
        for row in self._rows:
            values = row.values(source) or {}
            last = self._last.get(row.name, {})
            for labels, value in values.items():
                metric = self.metric(row.name, *labels)
                if row.kind == "gauge":
                    metric.set(value)
                else:
                    before = last.get(labels, 0.0)
                    metric.inc(value - before if value >= before else value)
            gone = last.keys() - values.keys() if row.kind == "gauge" else ()
            for labels in gone:
                if labels:
                    self._metrics[row.name].remove(*labels)
                else:
                    self.metric(row.name).set(0)
            self._last[row.name] = values if row.kind == "gauge" else {**last, **values}

    def metric(self, name: str, *labels: str) -> Any:
        """Return the series of a metric with these labels, to count or observe with."""
        metric = self._metrics[name]
        return metric.labels(*labels) if labels else metric
