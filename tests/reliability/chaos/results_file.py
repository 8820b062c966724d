"""The file that has all results: written after every run, so that a later call can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from loadgen.report import provenance
from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from tests.reliability.chaos.cell_results import CellResult
from tests.reliability.chaos.fault_matrix import Cell

FIELDS = [f.name for f in fields(CellResult) if f.name != "cell"]


class Ledger:
    """All cells that were ever run with the same settings.

    Args:
        settings: What must be alike for runs to be of one kind.
        cells: Those that are asked for, run or not.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], cells: Sequence[Cell]) -> None:
        self._path = path
        self._settings = dict(settings)
        self._not_run = {str(c): c.why_not for c in cells if c.why_not is not None}
        self._before: dict[str, Any] = {}
        self._rows: dict[str, dict[str, Any]] = {}

    def resume(self, results: Sequence[CellResult]) -> None:
        """Fill in what earlier calls have found, failures too; what was not struck is done again.

        Raises: ConfigError: It cannot be read, or was written with other settings.
        """
        if not self._path.exists():
            return
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            rows = {row["cell"]: row for row in document["cells"]}
            for result in results:
                if (row := rows.get(str(result.cell))) is not None:
                    _fill(result, row)
            settings = document["settings"]
            self._before = {key: document[key] for key in ("commits", "machines", "seconds")}
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"--json: {self._path} cannot be gone on with: {exc!r}; name another file",
                param="json",
            ) from exc
        if settings != self._settings:
            raise ConfigError(
                f"--json: {self._path} was written with {settings}, not {self._settings}; "
                "name another file",
                param="json",
            )
        self._rows = rows

    def write(self, results: Sequence[CellResult], *, seconds: float) -> None:
        """Replace the file by what is known now.

        Args:
            seconds: That this call has taken so far.
        """
        self._rows |= {str(r.cell): _row(r) for r in results if r.runs or r.troubles}
        document: dict[str, Any] = {
            "commits": _once(self._before.get("commits", []), provenance.commit()),
            "machines": _once(self._before.get("machines", []), _machine()),
            "versions": provenance.versions("ray", "torch", "grpcio"),
            "settings": self._settings,
            "seconds": round(self._before.get("seconds", 0.0) + seconds, 1),
            "cells": list(self._rows.values()),
            "not_run": self._not_run,
        }
        write_atomically(self._path, (json.dumps(document, indent=1) + "\n").encode())


def _machine() -> dict[str, Any]:
    return {k: v for k, v in provenance.machine().items() if k != "load_average"}


def _once(earlier: list[Any], value: Any) -> list[Any]:
    return earlier if value in earlier else [*earlier, value]


def _fill(result: CellResult, row: Mapping[str, Any]) -> None:
    for name in FIELDS:
        have, value = getattr(result, name), row[name]
        if type(have) is not type(value) or (isinstance(value, int) and value < 0):
            raise ValueError(f"{result.cell}: {name} is {value!r}")
        setattr(result, name, value)
    result.not_struck = []


def _row(result: CellResult) -> dict[str, Any]:
    cell = result.cell
    row: dict[str, Any] = {
        "cell": str(cell),
        "fault": cell.fault.value,
        "moment": cell.moment.value,
        "victim": cell.victim.value,
        "stage": cell.stage.value,
        "is_ok": result.is_ok,
    }
    row |= {name: getattr(result, name) for name in FIELDS}
    row["recovery_s"] = [round(t, 3) for t in result.recovery_s]
    return row | {f"recovery_p{p}_s": result.percentile_s(p / 100) for p in (50, 99)}
