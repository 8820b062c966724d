"""Metrics as rows of a table: name, meaning, how the value is read, and labels.

A `MetricTable` declares rows in a registry. `update` reads every row that says how: a gauge takes
the value, a counter rises to it. Rows without `read` are counted by name as things happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

from quadriga.observability.metrics import LATENCY_BUCKETS_S, Readings, Registry


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
        self._counted: dict[str, Any] = {}
        self._read: list[tuple[MetricRow, Readings]] = []
        self._last: dict[str, Mapping[tuple[Any, ...], float]] = {}
        for row in rows:
            args = (row.name, row.text, row.labels)
            if row.kind == "histogram":
                self._counted[row.name] = registry.histogram(*args, row.buckets)
            elif row.read is not None:
                self._read.append((row, registry.readings(row.kind, *args)))
            else:
                declare = registry.counter if row.kind == "counter" else registry.gauge
                self._counted[row.name] = declare(*args)

    def update(self, source: Any) -> None:
        """Bring every row that reads from `source` up to date.

        A gauge that is not read any more goes to 0; one with labels has no series where they are
        not read. A total that fell has begun anew.
        """
        for row, readings in self._read:
            values = row.values(source)
            if row.kind == "gauge":
                if values is None:
                    values = {} if row.labels else {(): 0.0}
                readings.values = {labels: float(value) for labels, value in values.items()}
            elif values:
                last = self._last.get(row.name, {})
                totals = dict(readings.values)
                for labels, value in values.items():
                    before = last.get(labels, 0.0)
                    more = value - before if value >= before else value
                    totals[labels] = totals.get(labels, 0.0) + more
                readings.values, self._last[row.name] = totals, {**last, **values}

    def metric(self, name: str, *labels: str) -> Any:
        """Return the series of a metric that is not read, to count or observe with."""
        metric = self._counted[name]
        return metric.labels(*labels) if labels else metric
