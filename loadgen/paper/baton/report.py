"""The table, the figures and the headline of `paper baton`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.paper.baton.record import BatonRow, BatonSetting, QueryRecord
from loadgen.report.experiment import drawn, show

_BASE = "run_to_completion"
_STYLES = {"baton": "-", "run_to_completion": "--", "orca": "-."}
Curve = Callable[[QueryRecord], tuple[list[float], list[float]]]


def print_table(rows: Sequence[BatonRow]) -> None:
    """Print one line a contestant and setting."""

    def ratio(plain: dict[str, Any]) -> str | None:
        found = speedup(rows, plain["setting"], _BASE, plain["contestant"])
        return None if found is None else f"{found:.2f}"

    show(
        [as_row(row) | {"setting": row.setting} for row in rows],
        {
            "set": lambda r: r["set"],
            "batch": lambda r: r["batch"],
            "contestant": lambda r: r["contestant"],
            "s": lambda r: f"{r['seconds']:.1f}",
            "wall s": lambda r: f"{r['wall_s']:.1f}",
            "× to completion": ratio,
            "ceiling": lambda r: f"{r['step_ceiling']:.2f}",
            "ms/step": lambda r: f"{1e3 * r['step_s']:.2f}",
            "idle": lambda r: f"{r['idle_share']:.1%}",
            "KV in use": lambda r: f"{r['kv_in_use']:.1%}",
            "KV peak MiB": lambda r: f"{r['kv_peak_bytes'] / 2**20:.1f}",
            "query mean s": lambda r: f"{r['query_mean_s']:.1f}",
            "query P99 s": lambda r: f"{r['query_p99_s']:.1f}",
            "gap P99 ms": lambda r: f"{1e3 * r['gap_p99_s']:.0f}",
            "ties": lambda r: r["ties"],
        },
        title="One core each, same model, same queries: time to answer them all",
        left=("contestant",),
    )


def headline(rows: Sequence[BatonRow]) -> dict[str, dict[str, float]]:
    """Return the ratios that the experiment stands for, by batch size."""
    return {
        "vs_orca_120": _ratios(rows, "mixed", "orca"),
        "vs_run_to_completion_120": _ratios(rows, "mixed", _BASE),
        "vs_run_to_completion_30": _ratios(rows, "brief", _BASE),
    }


def speedup(rows: Sequence[BatonRow], setting: BatonSetting, base: str, name: str) -> float | None:
    """Median over the rounds of base's time over name's; None where one did not run."""
    found = {r.contestant: r for r in rows if r.setting == setting}
    if base not in found or name not in found:
        return None
    pairs = zip(found[base].records, found[name].records, strict=True)
    return statistics.median(b.seconds / n.seconds for b, n in pairs)


def as_row(row: BatonRow) -> dict[str, Any]:
    """Everything measured of one contestant in one setting, plain."""

    def middle(figure: Callable[[QueryRecord], float]) -> float:
        return statistics.median(map(figure, row.records))

    return {
        "set": row.setting.name,
        "queries": row.setting.num_queries,
        "batch": row.setting.batch,
        "contestant": row.contestant,
        "seconds": row.seconds,
        "seconds_by_round": [r.seconds for r in row.records],
        "wall_s": statistics.median(row.wall_s),
        "step_ceiling": statistics.median(row.ceilings),
        "steps": int(middle(lambda r: r.steps)),
        "step_s": middle(lambda r: r.seconds / max(1, r.steps)),
        "idle_share": middle(lambda r: r.idle_share),
        "kv_in_use": middle(lambda r: r.memory_in_use),
        "kv_peak_bytes": int(middle(lambda r: r.peak_bytes)),
        "query_mean_s": middle(lambda r: statistics.fmean(r.done_s.values())),
        "query_p99_s": middle(lambda r: float(np.percentile(list(r.done_s.values()), 99))),
        "first_token_mean_s": middle(lambda r: statistics.fmean(r.first_s.values())),
        "gap_p99_s": middle(lambda r: float(np.percentile(r.gaps_s() or [0.0], 99))),
        "ties": row.ties,
    }


def write_plots(rows: Sequence[BatonRow], folder: Path) -> list[Path]:
    """Draw the paper's figures 6 to 8 for each set, from the first round."""
    return [
        _panels([r for r in rows if r.setting.name == name], label, curve, folder / file)
        for name in sorted({r.setting.name for r in rows})
        for file, label, curve in (
            (f"baton_{name}_queries.png", "queries completed", _completed),
            (f"baton_{name}_tokens.png", "output tokens", _tokens),
            (f"baton_{name}_memory.png", "KV memory, MiB", _memory),
        )
    ]


def _panels(rows: Sequence[BatonRow], label: str, curve: Curve, path: Path) -> Path:
    """One panel a batch size, one line a contestant."""
    batches = sorted({r.setting.batch for r in rows})
    with drawn(path, len(batches), size=(4.2, 3.4)) as axes:
        for axis, batch in zip(axes[0], batches, strict=True):
            for row in (r for r in rows if r.setting.batch == batch):
                style = _STYLES.get(row.contestant, ":")
                times, values = curve(row.records[0])
                axis.step(times, values, style, where="post", label=row.contestant, linewidth=1.1)
            axis.set(title=f"{rows[0].setting.name} set, batch {batch}", xlabel="s")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel(label)
        axes[0][0].legend(fontsize=7)
    return path


def _completed(record: QueryRecord) -> tuple[list[float], list[float]]:
    times = sorted(record.done_s.values())
    return [0.0, *times], [float(i) for i in range(len(times) + 1)]


def _tokens(record: QueryRecord) -> tuple[list[float], list[float]]:
    times, counts = [0.0], [0.0]
    for time_s, indices in record.tokens:
        times.append(time_s)
        counts.append(counts[-1] + len(indices))
    return times, counts


def _memory(record: QueryRecord) -> tuple[list[float], list[float]]:
    samples = record.memory
    return [m.time_s for m in samples], [m.taken_bytes / 2**20 for m in samples]


def _ratios(rows: Sequence[BatonRow], name: str, base: str) -> dict[str, float]:
    settings = {r.setting: None for r in rows if r.setting.name == name}
    found = {s.batch: speedup(rows, s, base, "baton") for s in settings}
    return {str(batch): round(ratio, 3) for batch, ratio in found.items() if ratio is not None}
