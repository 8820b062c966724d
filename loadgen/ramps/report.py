"""Say what a ramp found: a line per step while it runs, then a table, a sentence and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.ramps.levels import Ramp
from loadgen.ramps.steps import MIN_REQUESTS, Goal, StepFigures, capacity_of
from loadgen.report.experiment import PANEL, drawn, table_of
from loadgen.report.figures import several


def one_line(figures: StepFigures, ramp: Ramp) -> str:
    """Return a step in one line, for following a ramp."""
    kept = {True: "kept", False: "SLO broken", None: "nothing sent"}[figures.kept]
    good = round(figures.good_share * figures.requests)
    running = f", {figures.unfinished:,} still running" if figures.unfinished else ""
    step = f"step {figures.step.number + 1}/{len(ramp.levels())}"
    return (
        f"{step}, {level_text(figures.step.level, ramp)}: {good:,} of "
        f"{figures.requests:,} requests good{running}, "
        f"TTFT P99 {_ms(figures.ttft.p99)}, TPOT P99 {_ms(figures.tpot.p99)} ms: {kept}"
    )


def level_text(level: float, ramp: Ramp) -> str:
    """Return a level with its unit."""
    return f"{level:.4g} {ramp.users}" + ("/s" if ramp.unit == "rate" else " at a time")


def conclusion(figures: Sequence[StepFigures], ramp: Ramp, goal: Goal) -> str:
    """Return in a sentence the largest level that keeps the SLO."""
    capacity = capacity_of(figures)
    what = (
        f"{100 * goal.share:.4g} % of the requests within TTFT ≤ {_ms(goal.slo.ttft_s)} ms and "
        f"TPOT ≤ {_ms(goal.slo.tpot_s)} ms"
    )
    if capacity.kept is None and capacity.broken is None:
        return "no step was finished: nothing is known"
    if capacity.kept is None:
        assert capacity.broken is not None
        return f"{level_text(capacity.broken, ramp)} is too much already for {what}: begin lower"
    kept = level_text(capacity.kept, ramp)
    if capacity.broken is None:
        return f"up to {kept}, as far as it went, the service keeps {what}"
    broken = level_text(capacity.broken, ramp)
    return f"the service keeps {what} up to {kept}, and no longer at {broken}"


def print_ramp(
    console: Console, figures: Sequence[StepFigures], ramp: Ramp, goal: Goal, title: str
) -> None:
    """Print the table of the steps and what follows from it."""
    columns: dict[str, Callable[[StepFigures], object]] = {
        f"{ramp.users}/s" if ramp.unit == "rate" else "at a time": lambda f: f"{f.step.level:.4g}",
        "sent": lambda f: f"{f.requests:,}",
        "done/s": lambda f: f"{f.requests_per_s:,.2f}",
        "tokens/s": lambda f: f"{f.output_tokens_per_s:,.0f}",
        "goodput/s": lambda f: f"{f.goodput_rps:,.2f}",
        "good": lambda f: f"{f.good_share:.1%}",
        "TTFT ms P50 / 90 / 99": lambda f: _ms(f.ttft.p50, f.ttft.p90, f.ttft.p99),
        "TPOT ms P50 / 90 / 99": lambda f: _ms(f.tpot.p50, f.tpot.p90, f.tpot.p99),
        "errors": lambda f: f"{f.error_share:.1%}",
        "SLO": lambda f: {True: "kept", False: "[red]broken[/red]", None: "–"}[f.kept],
    }
    console.print(table_of(figures, columns, title=title))
    if any(0 < one.requests < MIN_REQUESTS for one in figures):
        console.print(
            f"[yellow]Steps with fewer than {MIN_REQUESTS} requests say little; raise "
            "--step-s.[/yellow]"
        )
    slow = [f"{one.step.level:.4g}" for one in figures if one.generator_is_slow]
    if slow:
        console.print(
            f"[yellow]The generator was late (lag P99 above 10 ms) at {', '.join(slow)}: its "
            "machine, not the service, may be the limit there.[/yellow]"
        )
    console.print(conclusion(figures, ramp, goal), style="bold", markup=False, highlight=False)


def write_ramp_plot(
    folder: Path, figures: Sequence[StepFigures], ramp: Ramp, goal: Goal, title: str
) -> None:
    """Draw throughput, latencies and shares over the level, where a step was finished."""
    if not figures:
        return
    heading = f"{title}: {ramp.rise} ramp"
    with drawn(folder / "ramp.png", 2, 2, size=PANEL, title=heading, sharex=True) as axes:
        _draw(axes, figures, ramp, goal)


def _draw(axes: Any, figures: Sequence[StepFigures], ramp: Ramp, goal: Goal) -> None:
    levels = [one.step.level for one in figures]
    (rates, shares), (firsts, tokens) = axes
    rates.plot(levels, [one.requests_per_s for one in figures], "o-", label="done")
    rates.plot(levels, [one.goodput_rps for one in figures], "o-", label="goodput")
    if ramp.unit == "rate" and ramp.users == "requests":
        rates.plot(levels, levels, ":", color="grey", label="offered")
    rates.set_ylabel("requests/s")
    shares.plot(levels, [one.good_share for one in figures], "o-", label="good")
    shares.plot(levels, [one.error_share for one in figures], "o-", color="red", label="errors")
    shares.axhline(goal.share, color="grey", ls=":", label="wanted")
    shares.set(ylabel="share of the requests", ylim=(-0.02, 1.02))
    for axis, name, limit_s in (
        (firsts, "ttft", goal.slo.ttft_s),
        (tokens, "tpot", goal.slo.tpot_s),
    ):
        for quantile in ("p50", "p90", "p99"):
            values = [getattr(getattr(one, name), quantile) for one in figures]
            shown = [float("nan") if v is None else 1e3 * v for v in values]
            axis.plot(levels, shown, "o-", label=quantile.upper())
        axis.axhline(1e3 * (limit_s or 0.0), color="grey", ls=":", label="SLO")
        axis.set(ylabel=f"{name.upper()}, ms", yscale="log")
        axis.set_xlabel(f"{ramp.users}/s" if ramp.unit == "rate" else f"{ramp.users} at a time")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend()


def _ms(*values_s: float | None) -> str:
    return several(*values_s, form=",.1f", factor=1e3)
