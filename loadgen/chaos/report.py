"""The table, the file and the last line: what every cell gave, and why others were not run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from loadgen import provenance
from loadgen.chaos.cells import Cell
from loadgen.chaos.verdicts import CellResult

COUNTS = ("runs", "streams", "waiting", "rebuilt", "lost", "duplicated", "differing", "hung")


def table(results: Sequence[CellResult]) -> Table:
    """Cell, runs, and how many streams were lost, duplicated, differing or hung."""
    made = Table("cell", *COUNTS)
    for name in ("recovery P50 s", "P99 s", "whole again"):
        made.add_column(name)
    for r in results:
        made.add_row(
            str(r.cell),
            *(str(getattr(r, name)) for name in COUNTS),
            *(_seconds(r.percentile_s(share)) for share in (0.5, 0.99)),
            "no" if r.not_restored else "yes",
        )
    return made


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


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


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


def write_json(
    path: Path,
    results: Sequence[CellResult],
    cells: Sequence[Cell],
    *,
    seconds: float,
    seed: int,
) -> None:
    """Write all there is to know of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "versions": provenance.versions("ray", "torch", "grpcio"),
        "seed": seed,
        "seconds": round(seconds, 1),
        "cells": [_row(r) for r in results],
        "not_run": {str(c): c.why_not for c in cells if c.why_not is not None},
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _row(result: CellResult) -> dict[str, Any]:
    cell = result.cell
    row: dict[str, Any] = {
        "fault": cell.fault.value,
        "moment": cell.moment.value,
        "victim": cell.victim.value,
        "stage": cell.stage.value,
    }
    row |= {name: getattr(result, name) for name in COUNTS}
    row |= {f"recovery_p{share:g}_s": result.percentile_s(share / 100) for share in (50, 99)}
    return row | {
        "recovery_s": [round(t, 3) for t in result.recovery_s],
        "is_ok": result.is_ok,
        "not_restored": result.not_restored,
        "faults": result.faults,
    }
