"""Say what a comparison found: the runs, what else differs, the table, a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from loadgen.comparison.comparable import setting_differences
from loadgen.comparison.runs import Row
from loadgen.report.results import CapacityLine, Results

MAX_NAMED = 12  # figures in the sentence
_COLOURS = {"better": "green", "worse": "red"}

Sides = tuple[Sequence[Results], Sequence[Results]]
"""The runs of A, the runs of B."""


def print_comparison(
    console: Console,
    sides: Sides,
    rows: Sequence[Row],
    reasons: Sequence[str],
    confidence: float,
) -> None:
    """Print everything.

    Args:
        reasons: Why the loads differ, where they were to be compared anyway.
    """
    for name, side in zip("AB", sides, strict=True):
        for results in side:
            console.print(
                f"{name}: {results.path} ({results.header.scenario}, "
                f"{len(results.records):,} requests)",
                markup=False,
                highlight=False,
            )
    for reason in reasons:
        console.print(f"different load: {reason}", style="red", markup=False)
    for setting in setting_differences(sides[0][0], sides[1][0]):
        console.print(f"A → B, {setting}", markup=False, highlight=False)
    for name, side in zip("AB", sides, strict=True):
        for other in side[1:]:
            for setting in setting_differences(side[0], other):
                console.print(f"within {name}, {setting}", style="yellow", markup=False)
        for results in side:
            if results.summary.generator_is_slow:
                console.print(
                    f"The generator of {results.path} was late (lag P99 above 10 ms): the run "
                    "says little about the service.",
                    style="yellow",
                    markup=False,
                )
    console.print(_table(rows, confidence))
    levels = [[_level(run.capacity) for run in side if run.capacity] for side in sides]
    if all(levels):
        shown = " → ".join(", ".join(side) for side in levels)
        console.print(f"largest level that kept the SLO: {shown}", highlight=False)
    console.print(_sentence(rows), style="bold", markup=False, highlight=False)


def _level(capacity: CapacityLine) -> str:
    if capacity.kept is None:
        return "none"
    return f"{capacity.kept:.4g}" + ("/s" if capacity.unit == "rate" else " at a time")


def _table(rows: Sequence[Row], confidence: float) -> Table:
    is_grouped = any(row.group for row in rows)
    table = Table()
    if is_grouped:
        table.add_column("step")
    table.add_column("figure")
    for column in ("A", "B", "B / A", "B − A", f"{100 * confidence:g} % interval"):
        table.add_column(column, justify="right")
    table.add_column("runs" if rows[0].difference.is_of_runs else "values", justify="right")
    table.add_column("B is")
    before = None
    for row in rows:
        group = [] if not is_grouped else [row.group if row.group != before else ""]
        before = row.group
        table.add_row(*group, *_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    found = row.difference
    interval = "–"
    if found.low is not None and found.high is not None:
        interval = f"{_signed(found.low)} … {_signed(found.high)}"
    counts = f"{found.num_a:,}"
    if found.num_a != found.num_b:
        counts += f", {found.num_b:,}"
    colour = _COLOURS.get(row.verdict, "default")
    return [
        f"{row.name}, {row.unit}" if row.unit != "/s" else f"{row.name}/s",
        _shown(found.a),
        _shown(found.b),
        "–" if found.ratio is None else f"{found.ratio:.3f}",
        _signed(found.b - found.a),
        interval,
        counts,
        f"[{colour}]{row.verdict}[/{colour}]",
    ]


def _sentence(rows: Sequence[Row]) -> str:
    def names(verdict: str) -> str:
        found = [f"{row.name} {row.group}".strip() for row in rows if row.verdict == verdict]
        return ", ".join(found) if len(found) <= MAX_NAMED else f"{len(found)} figures"

    parts = [f"{verdict}: {found}" for verdict in ("better", "worse") if (found := names(verdict))]
    if not parts:
        return "no difference beyond noise"
    return f"B is {'; '.join(parts)}; the rest is within noise or too few to say"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def _signed(value: float) -> str:
    shown = _shown(value)
    return shown if value < 0 else f"+{shown}"
