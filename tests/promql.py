"""Checks PromQL expressions against the metrics there are (names, types, labels), and evaluates
those of one moment."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import promql_parser as promql

from quadriga.observability.metrics import Declared

SCRAPE_LABELS = frozenset({"job", "instance", "namespace", "pod"})
RATES = frozenset({"rate", "irate", "increase"})
PARTS = ("_bucket", "_sum", "_count")


class Metrics:
    """What a scrape of the service can hold: sample name → type and labels."""

    def __init__(self, declared: list[Declared]) -> None:
        self._samples: dict[str, tuple[str, frozenset[str]]] = {}
        for metric in declared:
            labels = frozenset(metric.labels)
            if metric.kind != "histogram":
                self._samples[metric.name] = (metric.kind, labels)
                continue
            self._samples[f"{metric.name}_bucket"] = ("bucket", labels | {"le"})
            for part in ("sum", "count"):
                self._samples[f"{metric.name}_{part}"] = ("counter", labels)

    def __contains__(self, sample: str) -> bool:
        return sample in self._samples

    def problems(self, expression: str) -> list[str]:
        """What is wrong with an expression; empty where nothing is."""
        try:
            tree = promql.parse(expression)
        except ValueError as exc:
            return [f"does not parse: {exc}"]
        found: list[str] = []
        self._labels(tree, found, rated=False)
        return found

    def _labels(self, node: Any, found: list[str], *, rated: bool) -> frozenset[str]:
        """Walk an expression; returns the labels its result has."""
        if isinstance(node, promql.VectorSelector):
            return self._selected(node, found, rated)
        if isinstance(node, promql.MatrixSelector):
            if not rated:
                found.append(f"{node.vector_selector.name}: a range outside of a rate")
            return self._selected(node.vector_selector, found, rated)
        if isinstance(node, promql.Call):
            return self._called(node, found)
        if isinstance(node, promql.AggregateExpr):
            inner = self._labels(node.expr, found, rated=False)
            return _grouped(node.modifier, inner, found)
        if isinstance(node, promql.BinaryExpr):
            return self._joined(node, found)
        if isinstance(node, promql.ParenExpr | promql.UnaryExpr):
            return self._labels(node.expr, found, rated=rated)
        if isinstance(node, promql.NumberLiteral | promql.StringLiteral):
            return frozenset()
        found.append(f"{type(node).__name__} is not known to this check")
        return frozenset()

    def _selected(self, node: Any, found: list[str], rated: bool) -> frozenset[str]:
        known = self._samples.get(node.name)
        if known is None:
            found.append(f"there is no metric {node.name}")
            return frozenset()
        kind, own = known
        labels = own | SCRAPE_LABELS
        found += [
            f"{node.name} has no label {matcher.name}"
            for matcher in node.matchers.matchers
            if matcher.name not in labels
        ]
        if rated != (kind != "gauge"):
            found.append(f"{node.name} is a {kind}: {'no' if rated else 'a'} rate is wanted")
        return labels

    def _called(self, node: Any, found: list[str]) -> frozenset[str]:
        is_rate = node.func.name in RATES
        results = [self._labels(arg, found, rated=is_rate) for arg in node.args]
        if node.func.name != "histogram_quantile":
            return frozenset().union(*results)
        if "le" not in results[1]:
            found.append("histogram_quantile without le")
        if not all(name.endswith("_bucket") for name in selectors(node)):
            found.append("histogram_quantile of something else than buckets")
        return results[1] - {"le"}

    def _joined(self, node: Any, found: list[str]) -> frozenset[str]:
        left = self._labels(node.lhs, found, rated=False)
        right = self._labels(node.rhs, found, rated=False)
        if node.modifier is not None and node.modifier.matching is not None:
            wanted = frozenset(node.modifier.matching.labels)
            found += [
                f"matched on {sorted(wanted - side)}, which one side lacks"
                for side in (left, right)
                if side and not wanted <= side
            ]
        return left or right


def _grouped(modifier: Any, inner: frozenset[str], found: list[str]) -> frozenset[str]:
    if modifier is None:
        return frozenset()
    named = frozenset(modifier.labels)
    if not named <= inner:
        found.append(f"grouped by {sorted(named - inner)}, which is not there")
    return named & inner if modifier.type == promql.AggModifierType.By else inner - named


def selectors(node: Any) -> Iterator[str]:
    """Names of the metrics an expression reads."""
    return (str(selector.name) for selector in vectors(node))


def vectors(node: Any) -> Iterator[promql.VectorSelector]:
    """The selectors of an expression."""
    if isinstance(node, promql.VectorSelector):
        yield node
    elif isinstance(node, promql.MatrixSelector):
        yield node.vector_selector
    else:
        children = [getattr(node, k, None) for k in ("expr", "lhs", "rhs")]
        for child in [*children, *getattr(node, "args", [])]:
            if child is not None:
                yield from vectors(child)


Vector = dict[frozenset[tuple[str, str]], float]
"""Labels → value."""
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "sum": sum}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


def evaluate(expression: str, samples: Mapping[str, float]) -> Vector:
    """What an expression over one scrape says: aggregates and comparisons with a number.

    Args:
        samples: As `quadriga.observability.metrics.parse_exposition` returns them.

    Raises:
        ValueError: It needs more than that, such as a rate.
    """
    return _value(promql.parse(expression), samples)


def _value(node: Any, samples: Mapping[str, float]) -> Vector:
    if isinstance(node, promql.VectorSelector) and not node.matchers.matchers:
        found: Vector = {}
        for series, value in samples.items():
            name, _, labels = series.partition("{")
            if name == node.name:
                found[frozenset(re.findall(r'(\w+)="([^"]*)"', labels))] = value
        return found
    if isinstance(node, promql.AggregateExpr) and str(node.op) in _AGGREGATES:
        kept = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
        groups: dict[frozenset[tuple[str, str]], list[float]] = {}
        for labels, value in _value(node.expr, samples).items():
            groups.setdefault(frozenset(i for i in labels if i[0] in kept), []).append(value)
        return {labels: _AGGREGATES[str(node.op)](values) for labels, values in groups.items()}
    if isinstance(node, promql.BinaryExpr) and isinstance(node.rhs, promql.NumberLiteral):
        holds = _COMPARISONS[str(node.op)]
        left = _value(node.lhs, samples)
        return {labels: value for labels, value in left.items() if holds(value, node.rhs.val)}
    raise ValueError(f"{node}: cannot be evaluated here")
