"""Draw a comparison: both runs' distributions, and every ratio with its interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadgen.checker import Outcome
from loadgen.comparison.report import Sides
from loadgen.comparison.runs import ComparedFigure, e2e_s, longest_stall_s
from loadgen.report.experiment import PANEL, drawn
from loadgen.report.metrics import tpot_s, ttft_s
from loadgen.report.plots import draw_cdf
from loadgen.runner import Record

DISTRIBUTIONS, RATIOS = "distributions.png", "ratios.png"
MAX_RATIOS = 60  # rows of the second plot; more cannot be read
_SIDE_COLOURS = ("tab:blue", "tab:orange")
_COLOURS = {"better": "tab:green", "worse": "tab:red"}


def write_compare_plots(folder: Path, sides: Sides, rows: Sequence[ComparedFigure]) -> None:
    """Draw both sides' distributions, and the ratios."""
    names = [", ".join(results.path.parent.name for results in side) for side in sides]
    title = f"A: {names[0]:.60}   B: {names[1]:.60}"
    with drawn(folder / DISTRIBUTIONS, 2, 2, size=PANEL, title=title) as axes:
        _draw_distributions(axes, sides)
    shown = [row for row in rows if row.difference.a > 0][:MAX_RATIOS]
    with drawn(folder / RATIOS, size=(9, 1.5 + 0.32 * len(shown))) as axes:
        _draw_ratios(axes[0][0], shown)


def _draw_distributions(axes: Any, sides: Sides) -> None:
    panels: dict[str, Callable[[Record], float | None]] = {
        "TTFT (ms)": ttft_s,
        "TPOT (ms)": tpot_s,
        "longest stall (ms)": longest_stall_s,
        "end to end (ms)": e2e_s,
    }
    for axis, (name, value) in zip(axes.flat, panels.items(), strict=True):
        for label, colour, side in zip("AB", _SIDE_COLOURS, sides, strict=True):
            for number, results in enumerate(side):
                passed = (r for r in results.records if r.verdict.outcome is Outcome.OK)
                values = [v for r in passed if (v := value(r)) is not None]
                draw_cdf(axis, values, None if number else label, colour)
        axis.set(xlabel=name, ylabel="share at or below", ylim=(0, 1.02), xscale="log")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()


def _draw_ratios(axis: Any, shown: Sequence[ComparedFigure]) -> None:
    for y, row in enumerate(reversed(shown)):
        found = row.difference
        colour = _COLOURS.get(row.verdict, "grey")
        if found.low is not None and found.high is not None:
            ends = [1 + found.low / found.a, 1 + found.high / found.a]
            axis.plot(ends, [y, y], color=colour, lw=2)
        axis.plot(found.b / found.a, y, "o", color=colour)
    axis.axvline(1.0, color="black", lw=0.8)
    names = [f"{row.group} {row.name}".strip() for row in reversed(shown)]
    axis.set_yticks(range(len(shown)), names)
    axis.set(xlabel="B / A, with its interval", title="green: better, red: worse, grey: noise")
    axis.grid(alpha=0.3, axis="x")
