"""Figures as a reader sees them: with their unit, and a dash where there is none."""

from __future__ import annotations

import math
from typing import Any

NONE = "–"


def shown(value: float | None, form: str = ",.2f") -> str:
    """Return a figure in a format, or a dash where it is None or NaN."""
    return NONE if value is None or math.isnan(value) else format(value, form)


def several(*values: float | None, form: str = ",.2f", unit: str = "", factor: float = 1.0) -> str:
    """Return figures with one unit, as in `1.20 / 3.40 ms`; a dash where there is none at all.

    Args:
        factor: From the values' unit to the one shown.
    """
    if all(value is None or math.isnan(value) for value in values):
        return NONE
    cells = [shown(None if value is None else factor * value, form) for value in values]
    return " / ".join(cells) + (f" {unit}" if unit else "")


def milliseconds(*values_s: float | None) -> str:
    """Return times with their unit; see `several`."""
    return several(*values_s, form=",.1f", unit="ms", factor=1e3)


def for_json(value: float | None, digits: int = 6) -> float | int | None:
    """Return a figure for JSON: rounded to significant digits, None for NaN and infinity."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def figures(value: Any, digits: int = 6) -> Any:
    """Return a record of figures, lists of them included, as JSON has them; see `for_json`."""
    if isinstance(value, dict):
        return {key: figures(inner, digits) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [figures(inner, digits) for inner in value]
    return for_json(value, digits) if isinstance(value, float) else value
