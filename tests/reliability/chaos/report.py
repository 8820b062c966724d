"""The table and the last line: what every cell gave, and why others were not run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table

from loadgen.report.figures import shown
from tests.reliability.chaos.cell_results import CellResult
from tests.reliability.chaos.fault_matrix import Cell

SHOWN = ("runs", "streams", "waiting", "rebuilt", "lost", "duplicated", "differing", "hung")


def table(results: Sequence[CellResult]) -> Table:
    """Cell, runs, and how many streams were lost, duplicated, differing or hung."""
    made = Table("cell", *SHOWN)
    for name in ("recovery P50 s", "P99 s", "whole again"):
        made.add_column(name)
    for r in results:
        made.add_row(
            str(r.cell),
            *(str(getattr(r, name)) for name in SHOWN),
            *(shown(r.percentile_s(share)) for share in (0.5, 0.99)),
            "no" if r.not_restored else "yes",
        )
    return made


def faults(results: Sequence[CellResult]) -> list[str]:
    """What went wrong, in words: a line for each stream, and for each run that was none."""
    return [f"{r.cell}: {word}" for r in results for word in (*r.troubles, *r.faults)]


def not_run(cells: Sequence[Cell]) -> Table:
    """The cells of the product that are none, with the reason."""
    made = Table("why not", "cells")
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.why_not is not None:
            reasons.setdefault(cell.why_not, []).append(str(cell))
    for reason, names in reasons.items():
        made.add_row(f"{len(names)}: {reason}", "; ".join(names), end_section=True)
    return made


def summary(results: Sequence[CellResult], *, seconds: float) -> str:
    """The last line: one JSON object."""
    recovery_s = sorted(t for r in results for t in r.recovery_s)
    return json.dumps(
        {
            "cells": len(results),
            "failed": [str(r.cell) for r in results if not r.is_ok],
            "streams": sum(r.streams for r in results),
            "rebuilt": sum(r.rebuilt for r in results),
            "lost": sum(r.lost for r in results),
            "duplicated": sum(r.duplicated for r in results),
            "differing": sum(r.differing for r in results),
            "hung": sum(r.hung for r in results),
            "recovery_s": [round(t, 3) for t in recovery_s],
            "seconds": round(seconds, 1),
        }
    )
