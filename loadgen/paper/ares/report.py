"""Tables, plots and the headline of `paper ares`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from loadgen.paper.ares.points import OWN_RATES, PAPER_RATE, SATURATED_RATES, STATIC, PointResult
from loadgen.report.experiment import drawn, table_of
from loadgen.report.figures import shown
from quadriga.sim.profiles import PROFILES
from quadriga.sim.results import RunSummary

_BASELINE = "current_load"
_LIGHT_RATE = 0.10
_SATURATED = 0.95  # of the requests are good, or less
_GOOD = 0.99  # of the requests, where a rate is one that a cluster carries
_PAPER_P99 = "70.6 % by moves, 74.8 % with predictions, as printed: 96.3, 28.3, 24.3 ms at 0.17/s"
_MOVED_TOKENS = 2000  # a request of the paper's average length (§5.3)
_BANDWIDTHS_GBIT = (1.0, 10.0, 25.0, 100.0, 400.0)
_COLOURS = {
    "round_robin": "tab:grey",
    "current_load": "tab:orange",
    "least_requests": "tab:brown",
    "least_work": "tab:purple",
    "shedding": "tab:olive",
    "reschedule": "tab:green",
    "ares": "tab:blue",
    "oracle": "black",
}
X = TypeVar("X")
Figure = Callable[[RunSummary], float]
_CELLS: dict[str, tuple[Figure, str]] = {
    "arrive/s": (lambda s: s.rate, ".3g"),
    "good": (lambda s: s.good_share, ".1%"),
    "good/s": (lambda s: s.window.good, ".4g"),
    "finished/s": (lambda s: s.window.finished, ".4g"),
    "good/s, all": (lambda s: s.makespan.good, ".4g"),
    "finished/s, all": (lambda s: s.makespan.finished, ".4g"),
    "TPOT P50 ms": (lambda s: 1e3 * s.tpot.p50_s, ".1f"),
    "TPOT P99 ms": (lambda s: 1e3 * s.tpot.p99_s, ".1f"),
    "gap P99 ms": (lambda s: 1e3 * s.gap.p99_s, ".1f"),
    "variance ms²": (lambda s: s.variance_ms2, ".3f"),
    "fullest": (lambda s: s.most_used, ".0%"),
    "out of memory": (lambda s: s.num_full, ".1f"),
    "refused": (lambda s: s.failures.get("overloaded", 0) / s.num_requests, ".1%"),
    "longest wait s": (lambda s: s.room_wait.max_s, ".0f"),
    "moves": (lambda s: s.num_migrations, ".0f"),
    "stall P99 ms": (lambda s: 1e3 * s.stall.p99_s, ".0f"),
}


class FigureData:
    """Outcomes by figure, point and policy; values are means over the seeds."""

    def __init__(self, outcomes: Sequence[PointResult]) -> None:
        self._by_key: dict[tuple[str, float | str, str], list[PointResult]] = {}
        for outcome in outcomes:
            point = outcome.point
            self._by_key.setdefault((point.part, point.x, point.policy), []).append(outcome)

    def parts(self) -> list[str]:
        return list(dict.fromkeys(part for part, _, _ in self._by_key))

    def xs(self, part: str) -> list[float | str]:
        return list(dict.fromkeys(x for p, x, _ in self._by_key if p == part))

    def policies(self, part: str) -> list[str]:
        return list(dict.fromkeys(policy for p, _, policy in self._by_key if p == part))

    def outcomes(self, part: str, x: float | str, policy: str) -> list[PointResult]:
        return self._by_key.get((part, x, policy), [])

    def mean(self, part: str, x: float | str, policy: str, of: Figure) -> float:
        """Mean over the seeds that have the figure, NaN where none has."""
        found = np.array([of(o.summary) for o in self.outcomes(part, x, policy)], dtype=np.float64)
        found = found[~np.isnan(found)]
        return float(found.mean()) if len(found) else float("nan")

    def grid_mean(self, part: str, x: float | str, policy: str, index: int) -> float:
        """Mean goodput under one of the grid's SLOs."""
        values = [o.grid_goodput[index] for o in self.outcomes(part, x, policy)]
        return float(np.mean(values)) if values else float("nan")

    def most_wait_s(self, part: str, x: float | str, policy: str) -> float:
        """The longest that any request waited for a decode replica; 0 where none did."""
        waits = [o.summary.room_wait.max_s for o in self.outcomes(part, x, policy)]
        return max((w for w in waits if not np.isnan(w)), default=0.0)

    def best_static(self, part: str, x: float | str, of: Figure) -> tuple[str, float]:
        """The placement that moves nothing with the greatest figure, and that; ("", NaN): none."""
        found = {p: self.mean(part, x, p, of) for p in STATIC if self.outcomes(part, x, p)}
        best = _best(list(found), found.__getitem__) if found else ""
        return best, found.get(best, float("nan"))

    def least_static(self, part: str, x: float | str, of: Figure) -> float:
        """The least figure of a placement that moves nothing; NaN: there is none."""
        found = [self.mean(part, x, p, of) for p in STATIC if self.outcomes(part, x, p)]
        return _least(found)

    def most(self, part: str, x: float | str) -> float:
        """The most that any policy may have over the best static one: all requests good."""
        best = self.best_static(part, x, _good_share)[1]
        return 1.0 / best if best > 0.0 else float("nan")

    def largest_rate(self, part: str, policy: str) -> float:
        """The largest of the rates up to which nearly all requests are good; NaN: none is."""
        rates = [x for x in self.xs(part) if isinstance(x, float)]
        good = [self.mean(part, x, policy, _good_share) >= _GOOD for x in sorted(rates)]
        kept = good.index(False) if False in good else len(good)
        return sorted(rates)[kept - 1] if kept else float("nan")

    def ratio(self, part: str, x: float | str, of: Figure, against: str = "") -> float:
        """ARES's figure over a baseline's, or over the best static one's; NaN where one lacks."""
        base = self.mean(part, x, against, of) if against else self.best_static(part, x, of)[1]
        return self.mean(part, x, "ares", of) / base if base > 0.0 else float("nan")


def print_tables(outcomes: Sequence[PointResult], console: Console) -> None:
    """Print a table a figure."""
    figures = FigureData(outcomes)
    for part in figures.parts():
        _print_part(figures, part, console)
    _print_ratios(figures, console)
    for part in ("sharegpt", "alpaca"):
        _print_largest_rates(figures, part, console)
        _print_grid(figures, part, console)
    _print_hardware(console)


def _print_part(figures: FigureData, part: str, console: Console) -> None:
    rows = [
        (x, policy)
        for x in figures.xs(part)
        for policy in figures.policies(part)
        if figures.outcomes(part, x, policy)
    ]

    def cell(name: str) -> Callable[[tuple[float | str, str]], str]:
        of, form = _CELLS[name]
        return lambda row: shown(figures.mean(part, *row, of), form)

    columns: dict[str, Callable[[tuple[float | str, str]], object]] = {
        "x": lambda row: row[0] if isinstance(row[0], str) else f"{row[0]:g}",
        "policy": lambda row: row[1],
    }
    columns |= {name: cell(name) for name in _CELLS}
    caption = (
        "good/s and finished/s: what ended while the counted requests arrive, over that time; "
        "“all”: all that were counted, over the time until the last of them ended"
    )
    title = f"{part} (simulated)"
    console.print(table_of(rows, columns, title=title, caption=caption, left=("policy",)))


_PAPER_RATIO = "1.93, 2.63 in its second version (0.17/s, over current load)"


def _print_ratios(figures: FigureData, console: Console) -> None:
    """ARES over each baseline, by both goodputs, and what the paper states."""
    kinds = ("sharegpt", "alpaca", "vllm", "own", "lockstep", "overload", "below")
    rows = [
        (part, x)
        for part in figures.parts()
        if part.split(",")[0] in kinds and "ares" in figures.policies(part)
        for x in figures.xs(part)
    ]
    if not rows:
        return

    def cell(against: str) -> Callable[[tuple[str, float | str]], str]:
        return lambda row: " / ".join(
            shown(figures.ratio(*row, of, against), ".2f")
            for of in (_good_share, _good_per_s, _good_in_all)
        )

    columns: dict[str, Callable[[tuple[str, float | str]], object]] = {
        "part": lambda row: row[0],
        "x": lambda row: row[1] if isinstance(row[1], str) else f"{row[1]:g}",
        "best static": lambda row: figures.best_static(*row, _good_share)[0],
        "over it": cell(""),
        "at most": lambda row: shown(figures.most(*row), ".2f"),
        "P99 TPOT less than current load's": lambda row: shown(
            _p99_reduction(figures, *row), ".1%"
        ),
    }
    columns |= {f"over {policy}": cell(policy) for policy in (*STATIC, "shedding")}
    title = "ares: good requests over those of placements that move nothing (simulated)"
    caption = (
        "good of all that were counted / good per second in the time of arrivals / until the last "
        "of them ended; x: requests/s or decode replicas. "
        f"The paper: {_PAPER_RATIO}; P99 TPOT less: {_PAPER_P99}. At most: all requests good"
    )
    console.print(table_of(rows, columns, title=title, caption=caption, left=("part",)))


def _p99_reduction(figures: FigureData, part: str, x: float | str) -> float:
    """By what share ARES's P99 of time a token is below current load's."""
    theirs = figures.mean(part, x, _BASELINE, _tpot_p99_s)
    return 1.0 - figures.mean(part, x, "ares", _tpot_p99_s) / theirs


def _print_largest_rates(figures: FigureData, part: str, console: Console) -> None:
    columns: dict[str, Callable[[str], object]] = {
        "policy": lambda policy: policy,
        "requests/s": lambda policy: shown(figures.largest_rate(part, policy), "g"),
    }
    title = f"{part}: the largest rate of those run at which {_GOOD:.0%} are good (simulated)"
    if policies := figures.policies(part):
        console.print(table_of(policies, columns, title=title, left=("policy",)))


def _print_grid(figures: FigureData, part: str, console: Console) -> None:
    """Goodput over current load's for each SLO, at each rate: ARES, and the oracle beside it."""
    some = [o for x in figures.xs(part) for o in figures.outcomes(part, x, _BASELINE)]
    if not some or not some[0].point.grid:
        return
    step_s = some[0].point.config.profile.half_memory_step_s
    slos = some[0].point.grid

    def cell(x: float | str) -> Callable[[int], str]:
        def text(index: int) -> str:
            base = figures.grid_mean(part, x, _BASELINE, index)
            both = (figures.grid_mean(part, x, policy, index) for policy in ("ares", "oracle"))
            return " / ".join(shown(v / base if base > 0 else None, ".2f") for v in both)

        return text

    columns: dict[str, Callable[[int], object]] = {
        "TTFT, TPOT in steps at 50 %": lambda i: (
            f"{slos[i].ttft_s:g} s, {slos[i].tpot_s / step_s:.2f}"
        )
    }
    columns |= {f"{x:g}/s": cell(x) for x in figures.xs(part)}
    title = f"{part}: goodput over current load's, ares / oracle, by SLO (simulated)"
    console.print(table_of(range(len(slos)), columns, title=title))


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


def _print_hardware(console: Console) -> None:
    def cell(gbit: float) -> Callable[[str], str]:
        return lambda name: " / ".join(
            f"{transfer_share(name, gbit, precopy=p):.1%}" for p in (False, True)
        )

    columns: dict[str, Callable[[str], object]] = {"device": lambda name: name}
    columns |= {f"{gbit:g} Gbit/s": cell(gbit) for gbit in _BANDWIDTHS_GBIT}
    title = (
        f"transfer's share of the token's time, {_MOVED_TOKENS} tokens moved: "
        "stop and copy / pre-copy (arithmetic)"
    )
    console.print(table_of(PROFILES, columns, title=title))


def headline(outcomes: Sequence[PointResult]) -> dict[str, Any]:
    """Return the figures that the experiment stands for, on ShareGPT-like lengths."""
    figures, part = FigureData(outcomes), "sharegpt"
    rates = [x for x in figures.xs(part) if isinstance(x, float)]
    honest = {k: None if np.isnan(v) else round(v, 4) for k, v in baselines(figures).items()}
    if not rates or not {_BASELINE, "ares"} <= set(figures.policies(part)):
        return honest

    def mean(rate: float, policy: str, of: Figure) -> float:
        return figures.mean(part, rate, policy, of)

    def goodput_ratio(rate: float) -> float:
        base = mean(rate, _BASELINE, _good_per_s)
        return mean(rate, "ares", _good_per_s) / base if base else float("nan")

    def p99_reduction(rate: float) -> float:
        return _p99_reduction(figures, part, rate)

    saturated = next(
        (r for r in rates if mean(r, _BASELINE, lambda s: s.good_share) < _SATURATED), rates[-1]
    )
    paper = min(rates, key=lambda r: abs(r - PAPER_RATE))
    light = min(rates, key=lambda r: abs(r - _LIGHT_RATE))
    best, best_p99 = (_best(rates, of) for of in (goodput_ratio, p99_reduction))
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
        "light_load_ratio": figures.ratio(part, light, _good_per_s),
        "light_load_rate": light,
        "largest_good_rate_ares": figures.largest_rate(part, "ares"),
        "largest_good_rate_best_static": figures.largest_rate(
            part, _best(STATIC, lambda p: figures.largest_rate(part, p))
        ),
    }
    return {k: None if np.isnan(v) else round(v, 4) for k, v in found.items()} | honest


def _best(of: Sequence[X], figure: Callable[[X], float]) -> X:
    """The one with the greatest figure; those without one come last."""
    return max(of, key=lambda one: np.nan_to_num(figure(one), nan=-np.inf))


def _least(values: Iterable[float]) -> float:
    """The least of the figures that there are; NaN without any."""
    return min((value for value in values if not np.isnan(value)), default=np.nan)


def baselines(figures: FigureData) -> dict[str, float]:
    """The headline's ratios against honest baselines, of the parts that were run."""
    parts = figures.parts()

    def ratios(part: str, xs: Sequence[float], against: str = "") -> list[float]:
        there = [x for x in figures.xs(part) if x in xs]
        return [figures.ratio(part, x, _good_per_s, against) for x in there]

    found: dict[str, list[float]] = {}
    if "vllm" in parts:
        found["vllm_vs_current_load"] = ratios("vllm", SATURATED_RATES, _BASELINE)
        found["vllm_vs_best_static"] = ratios("vllm", SATURATED_RATES)
    if "vllm, prefix caching" in parts:
        cached = ratios("vllm, prefix caching", SATURATED_RATES)
        found["vllm_cached_vs_best_static"] = cached
    if "own" in parts:
        found["own_vs_best_static"] = ratios("own", SATURATED_RATES)
        found["own_light_load_ratio"] = [_least(ratios("own", OWN_RATES[:2]))]
    if "lockstep" in parts:
        xs = figures.xs("lockstep")
        found["lock_step_vs_best_static"] = [figures.ratio("lockstep", x, _good_per_s) for x in xs]
        for name, of in (("p50", lambda s: s.tpot.p50_s), ("p99", _tpot_p99_s)):
            found[f"lock_step_{name}_tpot_reduction"] = [
                1.0
                - figures.mean("lockstep", x, "ares", of) / figures.least_static("lockstep", x, of)
                for x in xs
            ]
    below = [p for p in parts if p.split(",")[0] == "below"]
    if below:
        shares = (figures.ratio(p, x, _good_share) for p in below for x in figures.xs(p))
        found["below_ratio"] = [_least(shares)]
    overloads = [p for p in parts if p.split(",")[0] == "overload"]
    for part in overloads:
        name = part.replace(", ", "_")
        for x in figures.xs(part):
            found[f"{name}_{x}"] = [figures.ratio(part, x, _good_or_one)]
            found[f"{name}_{x}_at_most"] = [figures.most(part, x)]
            if "shedding" in figures.policies(part):
                over = figures.ratio(part, x, _good_or_one, "shedding")
                found[f"{name}_{x}_vs_shedding"] = [over]
    if overloads:
        waits = [figures.most_wait_s(p, x, "ares") for p in overloads for x in figures.xs(p)]
        has_run = any("ares" in figures.policies(p) for p in overloads)
        found["overload_longest_wait_s"] = [max(waits) if has_run else float("nan")]
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def _good_share(summary: RunSummary) -> float:
    """Of the counted requests, refused ones included. Under overload what ends while they arrive
    began in part before the cluster was full."""
    return summary.good_share


def _good_or_one(summary: RunSummary) -> float:
    """The same, at least as if one had been good: a ratio over none is at least that over one."""
    return max(summary.good_share, 1.0 / summary.num_requests)


def _good_in_all(summary: RunSummary) -> float:
    """Goodput by makespan: what ended at all, until the last ended."""
    return summary.makespan.good


def _good_per_s(summary: RunSummary) -> float:
    """Goodput: what ended while the counted requests arrive."""
    return summary.window.good


def _tpot_p99_s(summary: RunSummary) -> float:
    return summary.tpot.p99_s


def write_plots(outcomes: Sequence[PointResult], folder: Path) -> None:
    """Draw the rates of each workload, variance over time, bandwidths and sizes."""
    figures = FigureData(outcomes)
    for part in figures.parts():
        if part in ("settings", "traces"):
            continue
        kind, panels = part.split(",")[0], _panels(part)
        xs = [x for x in figures.xs(part) if not isinstance(x, str)]
        with drawn(folder / f"ares-{part.replace(', ', '-')}.png", len(panels)) as axes:
            for axis, (name, of) in zip(axes[0], panels.items(), strict=True):
                for policy in figures.policies(part):
                    values = [figures.mean(part, x, policy, of) for x in xs]
                    axis.plot(xs, values, "o-", ms=3, label=policy, color=_COLOURS[policy])
                axis.set(xlabel=_AXES.get(kind, "requests/s"), ylabel=name)
                axis.grid(alpha=0.3)
                if kind in _AXES:
                    axis.set_xscale("log")
            axes[0][0].legend(fontsize=7)
            axes[0][0].set_title(f"{part} (simulated)")
    if "sharegpt" in figures.parts():
        _variance_plot(figures, folder / "ares-variance.png")


_AXES = {"bandwidth": "Gbit/s", "sizes": "replicas, 3 of 4 decode"}


def _panels(part: str) -> dict[str, Figure]:
    variance: dict[str, Figure] = {"variance of step times, ms²": lambda s: s.variance_ms2}
    p99: dict[str, Figure] = {"P99 TPOT, ms": lambda s: 1e3 * s.tpot.p99_s}
    if part.startswith("bandwidth"):
        return {"stall P99, ms": lambda s: 1e3 * s.stall.p99_s} | variance | p99
    if part == "sizes":
        return variance | p99 | {"good share": lambda s: s.good_share}
    return {
        "good, requests/s": _good_per_s,
        "finished, requests/s": lambda s: s.window.finished,
    } | p99


def _variance_plot(figures: FigureData, path: Path) -> None:
    """Figures 3 and 13: variance over time at the paper's rate."""
    rates = [x for x in figures.xs("sharegpt") if isinstance(x, float)]
    rate = min(rates, key=lambda r: abs(r - PAPER_RATE))
    with drawn(path, size=(9, 3.6)) as axes:
        axis = axes[0][0]
        for policy in figures.policies("sharegpt"):
            for one in figures.outcomes("sharegpt", rate, policy)[:1]:  # none where it failed
                axis.plot(*one.series, lw=0.8, label=policy, color=_COLOURS[policy])
        axis.set(xlabel="s", ylabel="variance of step times, ms²", yscale="symlog")
        axis.set_title(f"sharegpt at {rate:g}/s (simulated)")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
