"""The table, the figures and the headline of `paper baton`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from loadgen.paper.baton.record import Record

if TYPE_CHECKING:
    from loadgen.paper.baton.experiment import Measured, Setting

_BASE = "run_to_completion"
_STYLES = {"baton": "-", "run_to_completion": "--", "orca": "-."}


def print_table(rows: Sequence[Measured], console: Console) -> None:
    """Print one line a contestant and setting."""
    table = Table(title="One core each, same model, same queries: time to answer them all")
    for name in (
        "set", "batch", "contestant", "s", "wall s", "× to completion", "ceiling", "ms/step",
        "idle", "KV in use", "KV peak MiB", "query mean s", "query P99 s", "gap P99 ms", "ties",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in ("set", "contestant") else "right")
    for row in rows:
        plain = as_row(row)
        ratio = speedup(rows, row.setting, _BASE, row.contestant)
        table.add_row(
            row.setting.name, str(row.setting.batch), row.contestant, f"{row.seconds:.1f}",
            f"{plain['wall_s']:.1f}", "" if ratio is None else f"{ratio:.2f}",
            f"{plain['step_ceiling']:.2f}", f"{1e3 * plain['step_s']:.2f}",
            f"{plain['idle_share']:.1%}", f"{plain['kv_in_use']:.1%}",
            f"{plain['kv_peak_bytes'] / 2**20:.1f}", f"{plain['query_mean_s']:.1f}",
            f"{plain['query_p99_s']:.1f}", f"{1e3 * plain['gap_p99_s']:.0f}", str(row.ties),
        )  # fmt: skip
    console.print(table)


def headline(rows: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return the ratios that the experiment stands for, by batch size."""
    return {
        "vs_orca_120": _ratios(rows, "mixed", "orca"),
        "vs_run_to_completion_120": _ratios(rows, "mixed", _BASE),
        "vs_run_to_completion_30": _ratios(rows, "brief", _BASE),
    }


def speedup(rows: Sequence[Measured], setting: Setting, base: str, name: str) -> float | None:
    """Median over the rounds of base's time over name's; None where one did not run."""
    found = {r.contestant: r for r in rows if r.setting == setting}
    if base not in found or name not in found:
        return None
    pairs = zip(found[base].records, found[name].records, strict=True)
    return statistics.median(b.seconds / n.seconds for b, n in pairs)


def as_row(row: Measured) -> dict[str, Any]:
    """Everything measured of one contestant in one setting, plain."""
    records = row.records

    def middle(figure: Callable[[Record], float]) -> float:
        return statistics.median(figure(r) for r in records)

    return {
        "set": row.setting.name,
        "queries": row.setting.num_queries,
        "batch": row.setting.batch,
        "contestant": row.contestant,
        "seconds": row.seconds,
        "seconds_by_round": [r.seconds for r in records],
        "wall_s": statistics.median(row.wall_s),
        "step_ceiling": statistics.median(row.ceilings),
        "steps": int(middle(lambda r: r.steps)),
        "step_s": middle(lambda r: r.seconds / max(1, r.steps)),
        "idle_share": middle(lambda r: r.idle_share),
        "kv_in_use": middle(lambda r: r.memory_in_use),
        "kv_peak_bytes": int(middle(lambda r: r.peak_bytes)),
        "query_mean_s": middle(lambda r: statistics.fmean(r.done_s.values())),
        "query_p99_s": middle(lambda r: _quantile(sorted(r.done_s.values()), 0.99)),
        "first_token_mean_s": middle(lambda r: statistics.fmean(r.first_s.values())),
        "gap_p99_s": middle(lambda r: _quantile(r.gaps_s(), 0.99)),
        "ties": row.ties,
    }


def write_plots(rows: Sequence[Measured], folder: Path) -> list[Path]:
    """Draw the paper's figures 6 to 8 for each set, from the first round."""
    paths = []
    for name in sorted({r.setting.name for r in rows}):
        mine = [r for r in rows if r.setting.name == name]
        for figure, label, curve in (
            ("queries", "queries completed", _completed),
            ("tokens", "output tokens", _tokens),
            ("memory", "KV memory, MiB", _memory),
        ):
            paths.append(_panels(mine, label, curve, folder / f"baton_{name}_{figure}.png"))
    return paths


def _panels(
    rows: Sequence[Measured],
    label: str,
    curve: Callable[[Record], tuple[list[float], list[float]]],
    path: Path,
) -> Path:
    """One panel a batch size, one line a contestant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted({r.setting.batch for r in rows})
    figure, axes = pyplot.subplots(
        1, len(batches), figsize=(4.2 * len(batches), 3.4), squeeze=False
    )
    for axis, batch in zip(axes[0], batches, strict=True):
        for row in (r for r in rows if r.setting.batch == batch):
            times, values = curve(row.records[0])
            style = _STYLES.get(row.contestant, ":")
            axis.step(times, values, style, where="post", label=row.contestant, linewidth=1.1)
        axis.set(title=f"{row.setting.name} set, batch {batch}", xlabel="s")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(label)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _completed(record: Record) -> tuple[list[float], list[float]]:
    times = sorted(record.done_s.values())
    return [0.0, *times], [float(i) for i in range(len(times) + 1)]


def _tokens(record: Record) -> tuple[list[float], list[float]]:
    times, counts, total = [0.0], [0.0], 0
    for time_s, indices in record.tokens:
        total += len(indices)
        times.append(time_s)
        counts.append(float(total))
    return times, counts


def _memory(record: Record) -> tuple[list[float], list[float]]:
    samples = record.memory
    return [m.time_s for m in samples], [m.taken_bytes / 2**20 for m in samples]


def _ratios(rows: Sequence[Measured], name: str, base: str) -> dict[str, float]:
    settings = {r.setting: None for r in rows if r.setting.name == name}
    found = {s.batch: speedup(rows, s, base, "baton") for s in settings}
    return {str(batch): round(ratio, 3) for batch, ratio in found.items() if ratio is not None}


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[int(share * (len(ascending) - 1))] if ascending else 0.0
