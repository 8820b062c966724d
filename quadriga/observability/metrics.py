"""Metrics of every process, and the one view of the whole cluster that any ingress can answer.

Each process owns one `Registry`, counts into it, and pushes `snapshot()` bytes to the hub (held by
the controller) every second; an ingress that is scraped pushes its own first and then asks the hub.
Values are cumulative and absolute, so a lost push costs nothing, and a push that arrives late is
recognised by its sequence number: no counter ever falls from scrape to scrape. That holds over the
hub's own death too, where its owner keeps `MetricsHub.dump` before it shows a page, and gives it to
the successor's `restore`.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    600.0,
    3600.0,
)
FINE_LATENCY_BUCKETS_S = (
    *(
        round(step * 10.0**power, 5)
        for power in (-3, -2, -1, 0)
        for step in (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)
    ),
    10.0,
    16.0,
    25.0,
    40.0,
    60.0,
    120.0,
    300.0,
)
"""Ten a decade: a percentile of what clients feel is known to a tenth."""
SIZE_BUCKETS_BYTES = tuple(float(4**k) for k in range(5, 18))
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGE_MAX_AGE_S = 10.0
MAX_SOURCES = 256
MAX_KEYS = 20_000


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric as it was declared; its page adds the label `replica` where the hub made it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...]


class Readings:
    """The series of one counter or gauge whose values are read, not counted as things happen.

    Attributes:
        values: The present value by labels; replaced as a whole, never changed.
    """

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self.values: dict[tuple[Any, ...], float] = {} if declared.labels else {(): 0.0}

    def family(self) -> list[Any]:
        """As `_to_tree` writes one."""
        name, labels = self._declared.name, self._declared.labels
        rows = [
            (name, sorted(zip(labels, map(str, texts), strict=True)), value)
            for texts, value in self.values.items()
        ]
        return [name, self._declared.kind, self._declared.text, rows]


class Registry:
    """One process's metric objects and the numbering of its snapshots.

    Args:
        source: Unique name of the actor or ingress that counts; becomes the label `replica`.

    Attributes:
        declared: What it holds, with or without values yet.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.registry = CollectorRegistry(auto_describe=False)
        self.declared: list[Declared] = []
        self._readings: list[Readings] = []
        # Starts at the clock, so that a successor of the same name outranks its predecessor.
        self._seq = time.time_ns()

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        self.declared.append(Declared(name, "counter", text, tuple(labels)))
        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        self.declared.append(Declared(name, "gauge", text, tuple(labels)))
        return Gauge(name, text, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        self.declared.append(Declared(name, "histogram", text, tuple(labels)))
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def readings(
        self, kind: Literal["counter", "gauge"], name: str, text: str, labels: Sequence[str] = ()
    ) -> Readings:
        declared = Declared(name, kind, text, tuple(labels))
        self.declared.append(declared)
        self._readings.append(Readings(declared))
        return self._readings[-1]

    def snapshot(self) -> bytes:
        """Return every value as of now, numbered; what `MetricsHub.push` takes."""
        self._seq += 1
        families = [one.family() for one in self._readings if one.values]
        for metric in self.registry.collect():
            samples = [
                (s.name, sorted(s.labels.items()), s.value)
                for s in metric.samples
                if not s.name.endswith("_created")
            ]
            if samples:
                name = f"{metric.name}_total" if metric.type == "counter" else metric.name
                families.append([name, metric.type, metric.documentation, samples])
        return _packed({"seq": self._seq, "families": families})


Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]
"""Sample name and labels."""


@dataclass(slots=True)
class Family:
    """One metric of one source: (sample name, labels) → value, in exposition order."""

    kind: str
    text: str
    samples: dict[Key, float]

    @property
    def cumulative(self) -> bool:
        return self.kind in ("counter", "histogram")


@dataclass(slots=True)
class _Source:
    seq: int
    seen_s: float
    families: dict[str, Family] = field(default_factory=dict)


class MetricsHub:
    """Last values of every source, dead ones included; owned by one process, not thread-safe.

    A source that falls silent keeps the counters and histograms that it counted in and loses its
    gauges, which speak of a present it no longer has. Beyond `MAX_SOURCES` the longest silent are
    forgotten: added to another source, all that they counted would be news to who asks for rates.
    """

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}
        self._keys: dict[Key, Key] = {}  # most are those of many sources

    def push(self, source: str, families: bytes, *, now_s: float) -> bool:
        """Take a snapshot; return False when a newer one of this source is already here.

        Raises: ValueError when the bytes are not a snapshot.
        """
        if len(self._keys) > MAX_KEYS:
            self._keys.clear()
        try:
            seq, parsed = _from_tree(json.loads(families), self._keys)
        except (ValueError, KeyError, TypeError) as exc:
            raise ValueError(f"not a metrics snapshot: {exc}") from exc
        known = self._sources.get(source)
        if known is not None and seq <= known.seq:
            return False
        if known is None:  # perhaps in the place of one that died
            for other in self._sources.values():
                if now_s - other.seen_s > GAUGE_MAX_AGE_S:
                    other.families = _cumulative(other.families)
        self._sources[source] = _Source(seq, now_s, parsed)
        if len(self._sources) > MAX_SOURCES:
            seen_s, oldest = min((s.seen_s, name) for name, s in self._sources.items())
            if now_s - seen_s > GAUGE_MAX_AGE_S:
                del self._sources[oldest]
        return True

    def dump(self) -> bytes:
        """Pack the cumulative values of every source, for a hub that comes after this one."""
        sources = {
            name: _to_tree(source.seq, _cumulative(source.families))
            for name, source in dict(self._sources).items()  # others may push meanwhile
        }
        return zlib.compress(_packed(sources))

    def restore(self, data: bytes, *, now_s: float) -> None:
        """Take over what an earlier hub dumped; harmless twice, and after newer pushes.

        Raises: ValueError when the bytes are not a dump; nothing is taken then.
        """
        try:
            sources = {
                name: _from_tree(tree, self._keys)
                for name, tree in json.loads(zlib.decompress(data)).items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as exc:
            raise ValueError(f"not a dump of a metrics hub: {exc}") from exc
        for name, (seq, families) in sources.items():
            known = self._sources.get(name)
            if known is None or known.seq < seq:
                self._sources[name] = _Source(seq, now_s, families)

    def exposition(self, *, now_s: float) -> bytes:
        """Return all sources as one Prometheus text page, each series labelled `replica`."""
        present: list[tuple[str, dict[str, Family]]] = []
        for name, source in self._sources.items():
            fresh = now_s - source.seen_s <= GAUGE_MAX_AGE_S
            present.append((name, source.families if fresh else _cumulative(source.families)))
        return merge(present)

    def values(self, name: str) -> dict[str, dict[Labels, float]]:
        """Return the series of one counter or gauge, by source and labels."""
        return {
            source: {labels: value for (_, labels), value in family.samples.items()}
            for source, family in self.family(name).items()
        }

    def family(self, name: str) -> dict[str, Family]:
        """Return one metric of every source that counts it."""
        found = {source: kept.families.get(name) for source, kept in self._sources.items()}
        return {s: f for s, f in found.items() if f is not None}

    def present(self, name: str, *, now_s: float) -> dict[str, Family]:
        """Return one gauge of every source that was heard of lately."""
        return {
            source: family
            for source, family in self.family(name).items()
            if now_s - self._sources[source].seen_s <= GAUGE_MAX_AGE_S
        }

    def seen_s(self) -> dict[str, float]:
        """Return when each source was last heard of."""
        return {name: source.seen_s for name, source in self._sources.items()}


def merge(sources: Iterable[tuple[str, dict[str, Family]]]) -> bytes:
    """Return the Prometheus text exposition of several sources, label `replica` naming each."""
    lines_of: dict[str, list[str]] = {}
    for source, families in sources:
        for name, family in families.items():
            lines = lines_of.setdefault(name, _header(name, family))
            lines.extend(_lines(family, (("replica", source),)))
    text = "\n".join(line for name in sorted(lines_of) for line in lines_of[name])
    return (text + "\n").encode() if text else b""


def render(families: dict[str, Family]) -> bytes:
    """Return the exposition of one source whose labels say everything already."""
    lines = [x for n, f in families.items() for x in (*_header(n, f), *_lines(f, ()))]
    return ("\n".join(lines) + "\n").encode()


def _header(name: str, family: Family) -> list[str]:
    return [f"# HELP {name} {_escape_help(family.text)}", f"# TYPE {name} {family.kind}"]


def _lines(family: Family, more: Labels) -> Iterator[str]:
    for (sample, labels), value in family.samples.items():
        pairs = ",".join(f'{key}="{_escape_label(text)}"' for key, text in (*labels, *more))
        yield f"{sample}{{{pairs}}} {_number(value)}" if pairs else f"{sample} {_number(value)}"


def parse_exposition(text: str) -> dict[str, float]:
    """Return series → value of a text page; for tests, load tools and the dashboard."""
    series: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            series[match[1]] = float(match[2])
    return series


_SAMPLE = re.compile(r"^([a-zA-Z_:][^ {]*(?:\{.*\})?) (\S+)$")


def _cumulative(families: dict[str, Family]) -> dict[str, Family]:
    """What is kept of a silent source: it may have died, and processes come and go."""
    return {n: f for n, f in families.items() if f.cumulative and any(f.samples.values())}


def _packed(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode()


def _to_tree(seq: int, families: dict[str, Family]) -> dict[str, Any]:
    rows = [
        [name, f.kind, f.text, [[sample, labels, v] for (sample, labels), v in f.samples.items()]]
        for name, f in families.items()
    ]
    return {"seq": seq, "families": rows}


def _from_tree(tree: Any, keys: dict[Key, Key]) -> tuple[int, dict[str, Family]]:
    """Raises: ValueError, KeyError or TypeError where it is no tree of ours.

    Args:
        keys: Those that are there already, to be shared.
    """

    def shared(sample: str, labels: Iterable[tuple[Any, Any]]) -> Key:
        key = (sample, tuple((str(k), str(v)) for k, v in labels))
        return keys.setdefault(key, key)

    families = {
        name: Family(kind, text, {shared(s, labels): float(value) for s, labels, value in samples})
        for name, kind, text, samples in tree["families"]
    }
    return int(tree["seq"]), families


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
