"""The figures of `paper helios`: rows, tables, headline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from loadgen.paper.helios.record import Run
from loadgen.paper.helios.shadow import Shadow

ALONE, BATCHED, FIXED, THRESHOLDS, INTERVALS = "alone", "batched", "fixed", "tau", "ri"
LIMITS = "changed"
HELIOS = "helios-"
MIB = 2.0**20

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Setting:
    """A row before it is measured.

    Attributes:
        part: Experiment it belongs to.
        contestant: `only-s`, `only-l`, both also `-adaptive`; `helios-SLO`.
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
class Row:
    """Medians over the rounds; shares over all of them together.

    Attributes:
        ttft_s, tpot_s: Means over requests, and over tokens after the first.
        exits: "model@layers" → share of the tokens after the first ones (Table 4's form).
        held: "model@depth" → share of these tokens that were decoded while it was loaded.
        early_share: Of these tokens: left before their model's last layer, at or above the
            threshold.
        breach_share: Of these tokens: left the deepest loaded exit below it.
        shadow: See `helios_shadow`; of the first round.
    """

    setting: Setting
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
    rounds: list[float] = field(default_factory=list)
    log: list[tuple[float, str]] = field(default_factory=list)


def summarise(setting: Setting, runs: Sequence[Run], num_layers: dict[str, int]) -> Row:
    """Make a row of a setting's rounds.

    Args:
        num_layers: Of each model.
    """

    def median(figure: Callable[[Run], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    decoded = _pooled(run.decoded for run in runs)
    held = _pooled(run.held for run in runs)
    total = max(1, sum(decoded.values()))
    early = sum(n for (model, layers), n in decoded.items() if layers < num_layers[model])
    breaches = sum(run.breaches for run in runs)
    return Row(
        setting=setting,
        tokens_per_s=median(lambda r: num_tokens(r) / r.seconds),
        requests_per_s=median(lambda r: len(r.requests) / r.seconds),
        ttft_s=median(lambda r: statistics.fmean(q.ttft_s for q in r.requests)),
        tpot_s=median(tpot_s),
        perplexity=perplexity(runs),
        exact_match=median(lambda r: sum(r.right) / len(r.right)),
        exits={f"{m}@{k}": n / total for (m, k), n in sorted(decoded.items())},
        held={str(c): n / total for c, n in sorted(held.items(), key=lambda i: str(i[0]))},
        early_share=(early - breaches) / total,
        breach_share=breaches / total,
        weight_bytes=median(lambda r: r.memory.mean_weight_bytes),
        peak_weight_bytes=median(lambda r: r.memory.peak_weight_bytes),
        kv_bytes=median(lambda r: r.memory.mean_kv_bytes),
        peak_kv_bytes=median(lambda r: r.memory.peak_kv_bytes),
        peak_running=max(run.peak_running for run in runs),
        joules_per_token=median(lambda r: r.joules / num_tokens(r)),
        energy_source=runs[0].energy_source,
        switches=median(lambda r: r.switches),
        resizes=median(lambda r: r.resizes),
        trips=median(lambda r: r.trips),
        profiles=median(lambda r: r.profiles),
        rounds=[num_tokens(r) / r.seconds for r in runs],
        log=runs[0].log,
    )


def num_tokens(run: Run) -> int:
    """Output tokens, the first ones included."""
    return sum(len(q.token_ids) for q in run.requests)


def tpot_s(run: Run) -> float:
    """Mean time between two tokens of a request, over all of them."""
    seconds = sum(q.decode_s for q in run.requests)
    return seconds / max(1, sum(q.num_decoded for q in run.requests))


def perplexity(runs: Sequence[Run]) -> float | None:
    """Of the scored tokens, by the probabilities they were served with."""
    nll = sum(q.nll for run in runs for q in run.requests)
    scored = sum(q.num_scored for run in runs for q in run.requests)
    return math.exp(nll / scored) if scored else None


def _pooled(counts: Iterable[dict[K, int]]) -> dict[K, int]:
    pooled: dict[K, int] = {}
    for some in counts:
        for key, n in some.items():
            pooled[key] = pooled.get(key, 0) + n
    return pooled


# The headline


def best_of(rows: Sequence[Row], part: str, contestant: str) -> Row | None:
    """A contestant's row; of one that may leave exits out or not, the faster of both."""
    names = {contestant, f"{contestant}-adaptive"}
    found = [r for r in rows if r.setting.part == part and r.setting.contestant in names]
    return max(found, key=lambda r: r.tokens_per_s, default=None)


def headline(rows: Sequence[Row], slo: str = "throughput") -> dict[str, Any]:
    """The figures that the experiment stands for, one request at a time unless they say otherwise.

    Ratios over 1, and positive savings, are in favour of HELIOS.
    """
    ours = best_of(rows, ALONE, HELIOS + slo)
    s, large = best_of(rows, ALONE, "only-s"), best_of(rows, ALONE, "only-l")
    tight = best_of(rows, FIXED, HELIOS + slo)
    tight_s, tight_l = best_of(rows, FIXED, "only-s"), best_of(rows, FIXED, "only-l")
    single = [r for r in (s, large) if r is not None]
    tight_single = [r for r in (tight_s, tight_l) if r is not None]
    accuracy = max((r.exact_match for r in single), default=None)
    shadow = ours.shadow if ours is not None else None
    return {
        "throughput_ratio_vs_s": _ratio(ours, s, "tokens_per_s"),
        "throughput_ratio_vs_l": _ratio(ours, large, "tokens_per_s"),
        "throughput_ratio_fixed_memory": _least(
            _ratio(tight, r, "tokens_per_s") for r in tight_single
        ),
        "tpot_reduction_vs_l": _saving(ours, large, "tpot_s"),
        "tpot_reduction_vs_s": _saving(ours, s, "tpot_s"),
        "ttft_ratio_vs_s": _ratio(s, ours, "ttft_s"),
        "ttft_ratio_vs_l": _ratio(large, ours, "ttft_s"),
        "early_token_share": _rounded(ours.early_share if ours else None),
        "breach_share": _rounded(ours.breach_share if ours else None),
        "unchanged_share": _rounded(shadow.sure_share if shadow else None),
        "exact_match_delta_points": _rounded(
            100 * (ours.exact_match - accuracy) if ours and accuracy is not None else None
        ),
        "weight_memory_saving": _saving(ours, large, "weight_bytes"),
        "weight_memory_saving_vs_s": _saving(ours, s, "weight_bytes"),
        "energy_saving_vs_s": _saving(ours, s, "joules_per_token"),
        "energy_saving_vs_l": _saving(ours, large, "joules_per_token"),
        "energy_source": ours.energy_source if ours else None,
        "batch_ratio": _least(_ratio(tight, r, "peak_running") for r in tight_single),
        "switches": ours.switches if ours else None,
        "resizes": ours.resizes if ours else None,
    }


def _ratio(above: Row | None, below: Row | None, figure: str) -> float | None:
    if above is None or below is None:
        return None
    ratio: float = getattr(above, figure) / getattr(below, figure)
    return round(ratio, 4)


def _saving(ours: Row | None, other: Row | None, figure: str) -> float | None:
    ratio = _ratio(ours, other, figure)
    return None if ratio is None else round(1.0 - ratio, 4)


def _least(values: Iterable[float | None]) -> float | None:
    return min((v for v in values if v is not None), default=None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# For people and for files


def plain(row: Row) -> dict[str, Any]:
    """A row for JSON."""
    shown = asdict(row)
    return {**shown.pop("setting"), **shown}


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Print what was measured, part by part, and where the tokens left."""
    for part, title in TITLES.items():
        mine = [r for r in rows if r.setting.part == part]
        if mine:
            console.print(_speed_table(title, mine))
            console.print(_memory_table(mine))
    alone = [r for r in rows if r.setting.part == ALONE]
    if alone:
        console.print(_exit_table(alone))


TITLES = {
    ALONE: "One request at a time",
    BATCHED: "Batched",
    FIXED: "Batched, in a fixed memory for weights and KV",
    THRESHOLDS: "Thresholds (figure 10), one request at a time",
    INTERVALS: "Requests between two assessments (figure 11), one at a time",
    LIMITS: "Tokens that a partial depth may change, one request at a time",
}


def _speed_table(title: str, rows: Sequence[Row]) -> Table:
    table = _table(
        title, "contestant", "τ", "RI", "changed", "at a time", "tokens/s", "TTFT ms", "TPOT ms",
        "perplexity", "exact", "early", "breaches", "unchanged", "of breaches",
        "mJ/token", "switches", "resizes", "trips",
    )  # fmt: skip
    for row in rows:
        s, shadow = row.setting, row.shadow
        mark = "~" if row.energy_source == "estimate" else ""
        table.add_row(
            s.contestant, "own" if s.threshold is None else f"{s.threshold:g}",
            str(s.interval) if s.contestant.startswith(HELIOS) else "",
            "" if s.max_changed_share is None else f"≤ {s.max_changed_share:g}", str(s.clients),
            f"{row.tokens_per_s:,.0f}", f"{1e3 * row.ttft_s:.2f}", f"{1e3 * row.tpot_s:.3f}",
            "" if row.perplexity is None else f"{row.perplexity:.4f}", f"{row.exact_match:.3f}",
            f"{row.early_share:.3f}", f"{row.breach_share:.3f}",
            _share(shadow.sure_share if shadow else None),
            _share(shadow.breached_share if shadow else None),
            f"{mark}{1e3 * row.joules_per_token:.2f}", f"{row.switches:g}", f"{row.resizes:g}",
            f"{row.trips:g}",
        )  # fmt: skip
    return table


def _memory_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "Memory, MiB, and what was loaded", "contestant", "weights", "most", "KV", "most",
        "largest batch", "loaded (share of the tokens)",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.setting.contestant, f"{row.weight_bytes / MIB:.1f}",
            f"{row.peak_weight_bytes / MIB:.1f}", f"{row.kv_bytes / MIB:.2f}",
            f"{row.peak_kv_bytes / MIB:.2f}", str(row.peak_running),
            ", ".join(f"{name} {share:.2f}" for name, share in row.held.items()),
        )  # fmt: skip
    return table


def _exit_table(rows: Sequence[Row]) -> Table:
    names = sorted({name for row in rows for name in row.exits}, key=_by_layer)
    table = _table("Where the tokens left (Table 4)", "contestant", *names)
    for row in rows:
        shares = (row.exits.get(name) for name in names)
        table.add_row(
            row.setting.contestant, *("" if s is None else f"{s:.1%}" for s in shares)
        )  # fmt: skip
    return table


def _by_layer(name: str) -> tuple[str, int]:
    model, _, layers = name.rpartition("@")
    return model, int(layers)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for name in columns:
        is_text = name == "contestant" or name.startswith("loaded")
        table.add_column(name, justify="left" if is_text else "right")
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
