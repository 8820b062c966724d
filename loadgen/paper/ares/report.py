"""Tables, plots and the headline of `paper ares`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.report.figures import shown
from quadriga.sim.profiles import PROFILES
from quadriga.sim.results import RunSummary

if TYPE_CHECKING:
    from loadgen.paper.ares.experiment import Outcome

_BASELINE = "current_load"
_LIGHT_RATE = 0.10
_PAPER_RATE = 0.17
_SATURATED = 0.95  # of the requests are good, or less
_MOVED_TOKENS = 2000  # a request of the paper's average length (§5.3)
_BANDWIDTHS_GBIT = (1.0, 10.0, 25.0, 100.0, 400.0)
_COLOURS = {
    "round_robin": "tab:grey",
    "current_load": "tab:orange",
    "least_requests": "tab:brown",
    "least_work": "tab:purple",
    "reschedule": "tab:green",
    "ares": "tab:blue",
    "oracle": "black",
}


class Figures:
    """Outcomes by figure, point and policy; values are means over the seeds."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._by_key: dict[tuple[str, float | str, str], list[Outcome]] = {}
        for outcome in outcomes:
            point = outcome.point
            self._by_key.setdefault((point.part, point.x, point.policy), []).append(outcome)

    def parts(self) -> list[str]:
        return list(dict.fromkeys(part for part, _, _ in self._by_key))

    def xs(self, part: str) -> list[float | str]:
        return list(dict.fromkeys(x for p, x, _ in self._by_key if p == part))

    def policies(self, part: str) -> list[str]:
        return list(dict.fromkeys(policy for p, _, policy in self._by_key if p == part))

    def outcomes(self, part: str, x: float | str, policy: str) -> list[Outcome]:
        return self._by_key.get((part, x, policy), [])

    def mean(
        self, part: str, x: float | str, policy: str, of: Callable[[RunSummary], float]
    ) -> float:
        """Mean over the seeds that have the figure, NaN where none has."""
        found = np.array([of(o.summary) for o in self.outcomes(part, x, policy)], dtype=np.float64)
        found = found[~np.isnan(found)]
        return float(found.mean()) if len(found) else float("nan")


def print_tables(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a table a figure."""
    figures = Figures(outcomes)
    for part in figures.parts():
        console.print(_part_table(figures, part))
    for part in ("sharegpt", "alpaca"):
        grid = _grid_table(figures, part)
        if grid is not None:
            console.print(grid)
    console.print(_hardware_table())


def _part_table(figures: Figures, part: str) -> Table:
    table = Table(
        title=f"{part} (simulated)",
        caption="good/s and finished/s: what ended while the counted requests arrive, over that "
        "time; “all”: all that were counted, over the time until the last of them ended",
    )
    for name in (
        "x", "policy", "arrive/s", "good", "good/s", "finished/s", "good/s, all", "finished/s, all",
        "TPOT P50 ms", "TPOT P99 ms", "gap P99 ms", "variance ms²", "fullest", "out of memory",
        "moves", "stall P99 ms",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "policy" else "right")
    for x in figures.xs(part):
        for policy in figures.policies(part):
            if figures.outcomes(part, x, policy):
                table.add_row(*_row(figures, part, x, policy))
        table.add_section()
    return table


def _row(figures: Figures, part: str, x: float | str, policy: str) -> list[str]:
    def mean(of: Callable[[RunSummary], float]) -> float:
        return figures.mean(part, x, policy, of)

    cells: list[tuple[Callable[[RunSummary], float], str]] = [
        (lambda s: s.rate, ".3g"),
        (lambda s: s.good_share, ".1%"),
        (lambda s: s.window.good, ".4g"),
        (lambda s: s.window.finished, ".4g"),
        (lambda s: s.makespan.good, ".4g"),
        (lambda s: s.makespan.finished, ".4g"),
        (lambda s: 1e3 * s.tpot.p50_s, ".1f"),
        (lambda s: 1e3 * s.tpot.p99_s, ".1f"),
        (lambda s: 1e3 * s.gap.p99_s, ".1f"),
        (lambda s: s.variance_ms2, ".3f"),
        (lambda s: s.most_used, ".0%"),
        (lambda s: s.num_full, ".1f"),
        (lambda s: s.num_migrations, ".0f"),
        (lambda s: 1e3 * s.stall.p99_s, ".0f"),
    ]
    name = f"{x:g}" if isinstance(x, float | int) else x
    return [name, policy, *(shown(mean(of), form) for of, form in cells)]


def _grid_table(figures: Figures, part: str) -> Table | None:
    """Goodput over current load's for each SLO, at each rate: ARES, and the oracle beside it."""
    some = [o for x in figures.xs(part) for o in figures.outcomes(part, x, _BASELINE)]
    if not some or not some[0].point.grid:
        return None
    step_s = some[0].point.config.profile.half_memory_step_s
    slos = some[0].point.grid
    table = Table(title=f"{part}: goodput over current load's, ares / oracle, by SLO (simulated)")
    table.add_column("TTFT, TPOT in steps at 50 %")
    for x in figures.xs(part):
        table.add_column(f"{x:g}/s", justify="right")
    for index, slo in enumerate(slos):
        cells = []
        for x in figures.xs(part):
            base = _grid_mean(figures, part, x, _BASELINE, index)
            both = (_grid_mean(figures, part, x, p, index) for p in ("ares", "oracle"))
            cells.append(" / ".join(f"{v / base:.2f}" if base > 0 else "–" for v in both))
        table.add_row(f"{slo.ttft_s:g} s, {slo.tpot_s / step_s:.2f}", *cells)
    return table


def _grid_mean(figures: Figures, part: str, x: float | str, policy: str, index: int) -> float:
    values = [o.grid_goodput[index] for o in figures.outcomes(part, x, policy)]
    return float(np.mean(values)) if values else float("nan")


def transfer_share(profile: str, gbit: float, *, precopy: bool) -> float:
    """Share of a migration's stall in its token's time: Figure 11's form.

    With pre-copy the stall is the tokens made while the bulk was copied, and a round trip.
    """
    p = PROFILES[profile]
    step_s = p.half_memory_step_s
    per_token_s = p.kv_bytes_per_token / (gbit * 1e9 / 8)
    stall_s = _MOVED_TOKENS * per_token_s
    if precopy:
        stall_s = stall_s / step_s * per_token_s
    stall_s += p.round_trip_s
    return stall_s / (stall_s + step_s)


def _hardware_table() -> Table:
    table = Table(
        title=f"transfer's share of the token's time, {_MOVED_TOKENS} tokens moved: "
        "stop and copy / pre-copy (arithmetic)"
    )
    table.add_column("device")
    for gbit in _BANDWIDTHS_GBIT:
        table.add_column(f"{gbit:g} Gbit/s", justify="right")
    for name in PROFILES:
        table.add_row(
            name,
            *(
                " / ".join(f"{transfer_share(name, g, precopy=p):.1%}" for p in (False, True))
                for g in _BANDWIDTHS_GBIT
            ),
        )
    return table


def headline(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures that the experiment stands for, on ShareGPT-like lengths."""
    figures, part = Figures(outcomes), "sharegpt"
    rates = [x for x in figures.xs(part) if isinstance(x, float)]
    if not rates or not {_BASELINE, "ares"} <= set(figures.policies(part)):
        return {}

    def mean(rate: float, policy: str, of: Callable[[RunSummary], float]) -> float:
        return figures.mean(part, rate, policy, of)

    def goodput_ratio(rate: float) -> float:
        base = mean(rate, _BASELINE, _good_per_s)
        return mean(rate, "ares", _good_per_s) / base if base else float("nan")

    def p99_reduction(rate: float) -> float:
        return 1.0 - mean(rate, "ares", _tpot_p99_s) / mean(rate, _BASELINE, _tpot_p99_s)

    saturated = next(
        (r for r in rates if mean(r, _BASELINE, lambda s: s.good_share) < _SATURATED),
        rates[-1],
    )
    paper = min(rates, key=lambda r: abs(r - _PAPER_RATE))
    light = min(rates, key=lambda r: abs(r - _LIGHT_RATE))
    best, best_p99 = max(rates, key=goodput_ratio), max(rates, key=p99_reduction)
    oracle = mean(paper, "oracle", lambda s: s.variance_ms2)
    found = {
        "goodput_ratio": goodput_ratio(saturated),
        "goodput_ratio_rate": saturated,
        "best_goodput_ratio": goodput_ratio(best),
        "best_goodput_ratio_rate": best,
        "paper_rate_goodput_ratio": goodput_ratio(paper),
        "p99_tpot_reduction": p99_reduction(saturated),
        "p99_tpot_reduction_rate": saturated,
        "best_p99_tpot_reduction": p99_reduction(best_p99),
        "best_p99_tpot_reduction_rate": best_p99,
        "oom_ares": mean(paper, "ares", lambda s: s.num_full),
        "oom_baseline": mean(paper, _BASELINE, lambda s: s.num_full),
        "oom_rate": paper,
        "variance_vs_oracle": mean(paper, "ares", lambda s: s.variance_ms2) / (oracle or np.nan),
        "variance_rate": paper,
        "light_load_ratio": goodput_ratio(light),
        "light_load_rate": light,
    }
    return {k: None if np.isnan(v) else round(v, 4) for k, v in found.items()}


def _good_per_s(summary: RunSummary) -> float:
    """Goodput: what ended while the counted requests arrive."""
    return summary.window.good


def _tpot_p99_s(summary: RunSummary) -> float:
    return summary.tpot.p99_s


def write_plots(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Draw the rates of each workload, variance over time, bandwidths and sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = Figures(outcomes)
    written = []
    for part in figures.parts():
        if part in ("settings", "traces"):
            continue
        panels = _panels(part)
        figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6))
        for axis, (name, of) in zip(axes, panels, strict=True):
            xs = [x for x in figures.xs(part) if not isinstance(x, str)]
            for policy in figures.policies(part):
                values = [figures.mean(part, x, policy, of) for x in xs]
                axis.plot(xs, values, "o-", ms=3, label=policy, color=_COLOURS[policy])
            axis.set(xlabel=_AXES.get(part.split(",")[0], "requests/s"), ylabel=name)
            axis.grid(alpha=0.3)
            if part.split(",")[0] in ("bandwidth", "sizes"):
                axis.set_xscale("log")
        axes[0].legend(fontsize=7)
        figure.suptitle(f"{part} (simulated)")
        written.append(_saved(figure, folder / f"ares-{part.replace(', ', '-')}.png", pyplot))
    if "sharegpt" in figures.parts():
        written.append(_variance_plot(figures, folder, pyplot))
    return written


_AXES = {"bandwidth": "Gbit/s", "sizes": "replicas, 3 of 4 decode"}


def _panels(part: str) -> list[tuple[str, Callable[[RunSummary], float]]]:
    variance = ("variance of step times, ms²", lambda s: s.variance_ms2)
    p99 = ("P99 TPOT, ms", lambda s: 1e3 * s.tpot.p99_s)
    if part.startswith("bandwidth"):
        return [("stall P99, ms", lambda s: 1e3 * s.stall.p99_s), variance, p99]
    if part == "sizes":
        return [variance, p99, ("good share", lambda s: s.good_share)]
    return [
        ("good, requests/s", _good_per_s),
        ("finished, requests/s", lambda s: s.window.finished),
        p99,
    ]


def _variance_plot(figures: Figures, folder: Path, pyplot: Any) -> Path:
    """Figures 3 and 13: variance over time at the paper's rate."""
    rates = [x for x in figures.xs("sharegpt") if isinstance(x, float)]
    rate = min(rates, key=lambda r: abs(r - _PAPER_RATE))
    figure, axis = pyplot.subplots(figsize=(9, 3.6))
    for policy in figures.policies("sharegpt"):
        times, variance = figures.outcomes("sharegpt", rate, policy)[0].series
        axis.plot(times, variance, lw=0.8, label=policy, color=_COLOURS[policy])
    axis.set(xlabel="s", ylabel="variance of step times, ms²", yscale="symlog")
    axis.set_title(f"sharegpt at {rate:g}/s (simulated)")
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)
    return _saved(figure, folder / "ares-variance.png", pyplot)


def _saved(figure: Any, path: Path, pyplot: Any) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
