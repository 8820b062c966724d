"""The figures of `paper helios`: rows, tables, headline, plots."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadgen.paper.helios.record import SCORED_EVERY, Shadow, StreamRun
from loadgen.report.experiment import drawn, least, rounded, show, stacked_bars

LOSSLESS = "-lossless"
ALONE, BATCHED, FIXED, THRESHOLDS, INTERVALS = "alone", "batched", "fixed", "tau", "ri"
LIMITS = "changed"
HELIOS = "helios-"
MIB = 2.0**20
TITLES = {
    ALONE: "One request at a time",
    BATCHED: "Batched",
    FIXED: "Batched, in a fixed memory for weights and KV",
    THRESHOLDS: "Thresholds (figure 10), one request at a time",
    INTERVALS: "Requests between two assessments (figure 11), one at a time",
    LIMITS: "Tokens that a partial depth may change, one request at a time",
}


@dataclass(frozen=True, slots=True)
class HeliosSetting:
    """A row before it is measured.

    Attributes:
        part: Experiment it belongs to.
        contestant: `only-s`, `only-l`, both also `-adaptive` and `-lossless`; `helios-SLO`, also
            `-lossless`.
        threshold: That requests ask for; None: each model's own.
        interval: Requests between two assessments.
        clients: Requests at a time.
        max_changed_share: See `HeliosConfig`; None: the paper's rule, only breaches count.
    """

    part: str
    contestant: str
    threshold: float | None
    interval: int
    clients: int
    memory_bytes: int | None = None
    max_changed_share: float | None = None


@dataclass(slots=True)
class HeliosRow:
    """Medians over the rounds; shares over all of them together.

    Attributes:
        ttft_s, tpot_s: Means over requests, and over tokens after the first.
        exits: "model@layers" → share of the tokens after the first ones (Table 4's form).
        held: "model@depth" → share of these tokens that were decoded while it was loaded.
        early_share: Of these tokens: left before their model's last layer, at or above the
            threshold.
        breach_share: Of these tokens: left the deepest loaded exit below it.
        shadow: Of the first round.
        rounds: Each figure that a ratio is taken of, by round.
    """

    setting: HeliosSetting
    tokens_per_s: float
    requests_per_s: float
    ttft_s: float
    tpot_s: float
    perplexity: float | None
    exact_match: float
    exits: dict[str, float]
    held: dict[str, float]
    early_share: float
    breach_share: float
    weight_bytes: float
    peak_weight_bytes: float
    kv_bytes: float
    peak_kv_bytes: float
    peak_running: int
    joules_per_token: float
    energy_source: str
    switches: float
    resizes: float
    trips: float
    profiles: float
    shadow: Shadow | None = None
    rounds: dict[str, list[float]] = field(default_factory=dict)
    log: list[tuple[float, str]] = field(default_factory=list)


MEDIANS: dict[str, Callable[[StreamRun], float]] = {
    "tokens_per_s": lambda r: r.tokens_per_s,
    "requests_per_s": lambda r: len(r.requests) / r.seconds,
    "ttft_s": lambda r: statistics.fmean(q.ttft_s for q in r.requests),
    "tpot_s": lambda r: r.tpot_s,
    "exact_match": lambda r: sum(r.right) / len(r.right),
    "weight_bytes": lambda r: r.memory.mean_weight_bytes,
    "peak_weight_bytes": lambda r: r.memory.peak_weight_bytes,
    "kv_bytes": lambda r: r.memory.mean_kv_bytes,
    "peak_kv_bytes": lambda r: r.memory.peak_kv_bytes,
    "joules_per_token": lambda r: r.joules / r.num_tokens,
    "switches": lambda r: r.switches,
    "resizes": lambda r: r.resizes,
    "trips": lambda r: r.trips,
    "profiles": lambda r: r.profiles,
}


def summarise(
    setting: HeliosSetting, runs: Sequence[StreamRun], num_layers: dict[str, int]
) -> HeliosRow:
    """Make a row of a setting's rounds.

    Args:
        num_layers: Of each model.
    """
    decoded = sum((run.decoded for run in runs), Counter[tuple[str, int]]())
    held = sum((Counter({str(c): n for c, n in run.held.items()}) for run in runs), Counter[str]())
    total = max(1, decoded.total())
    early = sum(n for (model, layers), n in decoded.items() if layers < num_layers[model])
    breaches = sum(run.breaches for run in runs)
    # Profiles are scored as well, and HELIOS alone has them: perplexity is of the same for all.
    requests = [q for run in runs for q in run.requests if q.index % SCORED_EVERY == 0]
    scored = sum(q.num_scored for q in requests)
    rounds = {name: list(map(figure, runs)) for name, figure in MEDIANS.items()}
    medians: dict[str, Any] = {name: statistics.median(rounds[name]) for name in rounds}
    rounds["peak_running"] = [run.peak_running for run in runs]
    return HeliosRow(
        setting=setting,
        perplexity=math.exp(sum(q.nll for q in requests) / scored) if scored else None,
        exits={f"{m}@{k}": n / total for (m, k), n in sorted(decoded.items())},
        held={name: n / total for name, n in sorted(held.items())},
        early_share=(early - breaches) / total,
        breach_share=breaches / total,
        peak_running=max(run.peak_running for run in runs),
        energy_source=runs[0].energy_source,
        rounds=rounds,
        log=runs[0].log,
        **medians,
    )


# The headline


def best_of(rows: Sequence[HeliosRow], part: str, contestant: str) -> HeliosRow | None:
    """A contestant's row; of one that may leave exits out or not, the faster of both."""
    names = {contestant, f"{contestant}-adaptive"}
    found = [r for r in rows if r.setting.part == part and r.setting.contestant in names]
    return max(found, key=lambda r: r.tokens_per_s, default=None)


def headline(rows: Sequence[HeliosRow], slo: str = "throughput") -> dict[str, Any]:
    """The figures that the experiment stands for, one request at a time unless they say otherwise.

    Ratios over 1, and positive savings, are in favour of HELIOS. They are medians of the ratios of
    rounds, in each of which all had the same stream and took turns.
    """
    ours, s, large = (best_of(rows, ALONE, c) for c in (HELIOS + slo, "only-s", "only-l"))
    tight, *tight_single = (best_of(rows, FIXED, c) for c in (HELIOS + slo, "only-s", "only-l"))
    accuracy = max((r.exact_match for r in (s, large) if r is not None), default=None)
    shadow = ours.shadow if ours is not None else None
    drafting = best_of(rows, ALONE, HELIOS + slo + LOSSLESS)
    delta = 100 * (ours.exact_match - accuracy) if ours and accuracy is not None else None
    return {
        "throughput_ratio_vs_s": _ratio(ours, s, "tokens_per_s"),
        "throughput_ratio_vs_l": _ratio(ours, large, "tokens_per_s"),
        "throughput_ratio_fixed_memory": least(
            _ratio(tight, r, "tokens_per_s") for r in tight_single
        ),
        "tpot_reduction_vs_l": _saving(ours, large, "tpot_s"),
        "tpot_reduction_vs_s": _saving(ours, s, "tpot_s"),
        "ttft_ratio_vs_s": _ratio(s, ours, "ttft_s"),
        "ttft_ratio_vs_l": _ratio(large, ours, "ttft_s"),
        "early_token_share": rounded(ours.early_share if ours else None),
        "breach_share": rounded(ours.breach_share if ours else None),
        "unchanged_share": rounded(shadow.sure_share if shadow else None),
        "exact_match_delta_points": rounded(delta),
        "weight_memory_saving": _saving(ours, large, "weight_bytes"),
        "weight_memory_saving_vs_s": _saving(ours, s, "weight_bytes"),
        "energy_saving_vs_s": _saving(ours, s, "joules_per_token"),
        "energy_saving_vs_l": _saving(ours, large, "joules_per_token"),
        "energy_source": ours.energy_source if ours else None,
        "batch_ratio": least(_ratio(tight, r, "peak_running") for r in tight_single),
        "lossless_throughput_ratio_vs_s": _ratio(drafting, s, "tokens_per_s"),
        "lossless_exact_match_delta_points": rounded(
            100 * (drafting.exact_match - accuracy)
            if drafting is not None and accuracy is not None
            else None
        ),
        "switches": ours.switches if ours else None,
        "resizes": ours.resizes if ours else None,
    }


def _ratio(above: HeliosRow | None, below: HeliosRow | None, figure: str) -> float | None:
    if above is None or below is None:
        return None
    rounds = zip(above.rounds[figure], below.rounds[figure], strict=True)
    return rounded(statistics.median(a / b for a, b in rounds))


def _saving(ours: HeliosRow | None, other: HeliosRow | None, figure: str) -> float | None:
    ratio = _ratio(ours, other, figure)
    return None if ratio is None else rounded(1.0 - ratio)


# For people and for files


def plain(row: HeliosRow) -> dict[str, Any]:
    """A row for JSON."""
    shown = asdict(row)
    return {**shown.pop("setting"), **shown}


def print_tables(rows: Sequence[HeliosRow]) -> None:
    """Print what was measured, part by part, and where the tokens left."""
    for part, title in TITLES.items():
        mine = [r for r in rows if r.setting.part == part]
        if mine:
            show(mine, SPEED, title=title)
            show(mine, MEMORY, title="Memory, MiB, and what was loaded", left=(LOADED,))
    alone = [r for r in rows if r.setting.part == ALONE]
    names = sorted({n for r in alone for n in r.exits}, key=_by_layer)
    if alone:
        columns: dict[str, Callable[[HeliosRow], object]] = {
            "contestant": lambda r: r.setting.contestant
        }
        columns |= {
            n: lambda r, n=n: f"{r.exits[n]:.1%}" if n in r.exits else None  # type: ignore[misc]
            for n in names
        }
        show(alone, columns, title="Where the tokens left (Table 4)")


LOADED = "loaded (share of the tokens)"
SPEED: dict[str, Callable[[HeliosRow], object]] = {
    "contestant": lambda r: r.setting.contestant,
    "τ": lambda r: "own" if r.setting.threshold is None else f"{r.setting.threshold:g}",
    "RI": lambda r: r.setting.interval if r.setting.contestant.startswith(HELIOS) else None,
    "changed": lambda r: _limit(r.setting, "≤ "),
    "at a time": lambda r: r.setting.clients,
    "tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
    "TTFT ms": lambda r: f"{1e3 * r.ttft_s:.2f}",
    "TPOT ms": lambda r: f"{1e3 * r.tpot_s:.3f}",
    "perplexity": lambda r: None if r.perplexity is None else f"{r.perplexity:.4f}",
    "exact": lambda r: f"{r.exact_match:.3f}",
    "early": lambda r: f"{r.early_share:.3f}",
    "breaches": lambda r: f"{r.breach_share:.3f}",
    "unchanged": lambda r: _share(r.shadow.sure_share if r.shadow else None),
    "of breaches": lambda r: _share(r.shadow.breached_share if r.shadow else None),
    "mJ/token": lambda r: f"{_mark(r)}{1e3 * r.joules_per_token:.2f}",
    "switches": lambda r: f"{r.switches:g}",
    "resizes": lambda r: f"{r.resizes:g}",
    "trips": lambda r: f"{r.trips:g}",
}
MEMORY: dict[str, Callable[[HeliosRow], object]] = {
    "contestant": lambda r: r.setting.contestant,
    "weights": lambda r: f"{r.weight_bytes / MIB:.1f}",
    "most weights": lambda r: f"{r.peak_weight_bytes / MIB:.1f}",
    "KV": lambda r: f"{r.kv_bytes / MIB:.2f}",
    "most KV": lambda r: f"{r.peak_kv_bytes / MIB:.2f}",
    "largest batch": lambda r: r.peak_running,
    LOADED: lambda r: ", ".join(f"{name} {share:.2f}" for name, share in r.held.items()),
}


def _limit(setting: HeliosSetting, before: str) -> str | None:
    limit = setting.max_changed_share
    return None if limit is None else f"{before}{limit:g}"


def _mark(row: HeliosRow) -> str:
    return "~" if row.energy_source == "estimate" else ""


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _by_layer(name: str) -> tuple[str, int]:
    model, _, layers = name.rpartition("@")
    return model, int(layers)


# Plots: contestants, memory, thresholds (figure 10), intervals (figure 11), changed tokens


def write_plots(rows: Sequence[HeliosRow], folder: Path) -> list[Path]:
    """Draw what was measured; returns the files."""
    written = []
    for part, draw in _DRAWINGS.items():
        mine = [r for r in rows if r.setting.part == part]
        if mine:
            written.append(folder / f"helios-{part}.png")
            with drawn(written[-1], 3, size=(4.5, 4.0)) as axes:
                draw(axes[0], mine)
    return written


def _contestants(axes: Any, rows: Sequence[HeliosRow]) -> None:
    names = [r.setting.contestant for r in rows]
    axes[0].barh(names, [r.tokens_per_s for r in rows])
    axes[0].set(xlabel="tokens/s")
    if rows[0].setting.part == ALONE:
        axes[1].barh(names, [100 * r.exact_match for r in rows])
        axes[1].set(xlabel="% exact match")
        stacked_bars(axes[2], names, [r.exits for r in rows])
        axes[2].set(xlabel="where tokens left, %")
    else:
        axes[1].barh(names, [r.peak_running for r in rows])
        axes[1].set(xlabel="largest batch, sequences")
        weights = [r.weight_bytes / MIB for r in rows]
        axes[2].barh(names, weights, label="weights")
        axes[2].barh(names, [r.peak_kv_bytes / MIB for r in rows], left=weights, label="most KV")
        axes[2].set(xlabel="memory, MiB")
        axes[2].legend(fontsize=6)
    for axis in axes:
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)


def _limits(axes: Any, rows: Sequence[HeliosRow]) -> None:
    """Speed against right answers, a point for each limit; and what was loaded."""
    for row in rows:
        name = _limit(row.setting, "HELIOS, at most ") or row.setting.contestant
        axes[0].plot(row.tokens_per_s, 100 * row.exact_match, "o", label=name)
    axes[0].set(xlabel="tokens/s", ylabel="% exact match")
    axes[0].legend(fontsize=6)
    ours = [r for r in rows if r.setting.max_changed_share is not None]
    names = [f"{r.setting.max_changed_share:g}" for r in ours]
    axes[1].barh(names, [100 * r.breach_share for r in ours])
    axes[1].set(xlabel="breaches, % of tokens", ylabel="changed tokens allowed")
    stacked_bars(axes[2], names, [r.held for r in ours])
    axes[2].set(xlabel="loaded, % of tokens", ylabel="changed tokens allowed")


def _over(x: Callable[[HeliosRow], Any], label: str) -> Callable[[Any, Sequence[HeliosRow]], None]:
    """Speed, right answers, and early and breached tokens over a setting."""

    def draw(axes: Any, rows: Sequence[HeliosRow]) -> None:
        figures: tuple[tuple[str, Callable[[HeliosRow], float]], ...] = (
            ("tokens/s", lambda r: r.tokens_per_s),
            ("% exact match", lambda r: 100 * r.exact_match),
            ("% of tokens early (–), breaches (:)", lambda r: 100 * r.early_share),
        )
        for name in dict.fromkeys(r.setting.contestant for r in rows):
            mine = [r for r in rows if r.setting.contestant == name]
            at = [x(r) for r in mine]
            for axis, (_, figure) in zip(axes, figures, strict=True):
                axis.plot(at, [figure(r) for r in mine], "-o", ms=4, label=name)
            axes[2].plot(at, [100 * r.breach_share for r in mine], ":s", ms=4)
        for axis, (ylabel, _) in zip(axes, figures, strict=True):
            axis.set(xlabel=label, ylabel=ylabel)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=6)

    return draw


_DRAWINGS = {
    ALONE: _contestants,
    FIXED: _contestants,
    THRESHOLDS: _over(lambda r: r.setting.threshold, "threshold"),
    INTERVALS: _over(lambda r: r.setting.interval, "requests between two assessments"),
    LIMITS: _limits,
}
