"""The plots of `paper helios`: contestants, memory, thresholds (figure 10), intervals (11), and
how many tokens a partial depth may change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.paper.helios.report import ALONE, FIXED, INTERVALS, LIMITS, THRESHOLDS, Row


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what was measured; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for part, draw in _DRAWINGS.items():
        mine = [r for r in rows if r.setting.part == part]
        if not mine:
            continue
        figure, axes = pyplot.subplots(1, 3, figsize=(13.5, 4.0))
        draw(axes, mine)
        figure.tight_layout()
        path = folder / f"helios-{part}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def _contestants(axes: Any, rows: Sequence[Row]) -> None:
    """Speed, right answers, and where the tokens left."""
    names = [r.setting.contestant for r in rows]
    axes[0].barh(names, [r.tokens_per_s for r in rows])
    axes[0].set(title="throughput", xlabel="tokens/s")
    axes[1].barh(names, [100 * r.exact_match for r in rows])
    axes[1].set(title="right answers", xlabel="% exact match")
    left = [0.0] * len(rows)
    for name in sorted({n for r in rows for n in r.exits}):
        shares = [100 * r.exits.get(name, 0.0) for r in rows]
        axes[2].barh(names, shares, left=left, label=name)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes[2].set(title="where tokens left", xlabel="% of tokens")
    axes[2].legend(fontsize=6)
    _upside_down(axes)


def _fixed(axes: Any, rows: Sequence[Row]) -> None:
    """Speed, largest batch and memory."""
    names = [r.setting.contestant for r in rows]
    axes[0].barh(names, [r.tokens_per_s for r in rows])
    axes[0].set(title="throughput in a fixed memory", xlabel="tokens/s")
    axes[1].barh(names, [r.peak_running for r in rows])
    axes[1].set(title="largest batch", xlabel="sequences")
    weights = [r.weight_bytes / 2**20 for r in rows]
    axes[2].barh(names, weights, label="weights")
    axes[2].barh(names, [r.peak_kv_bytes / 2**20 for r in rows], left=weights, label="most KV")
    axes[2].set(title="memory", xlabel="MiB")
    axes[2].legend(fontsize=6)
    _upside_down(axes)


def _thresholds(axes: Any, rows: Sequence[Row]) -> None:
    _lines(axes, rows, lambda r: r.setting.threshold, "threshold")


def _intervals(axes: Any, rows: Sequence[Row]) -> None:
    _lines(axes, rows, lambda r: r.setting.interval, "requests between two assessments")


def _limits(axes: Any, rows: Sequence[Row]) -> None:
    """Speed against right answers, a point for each limit; and what was loaded."""
    for row in rows:
        limit = row.setting.max_changed_share
        name = row.setting.contestant if limit is None else f"HELIOS, at most {limit:g}"
        axes[0].plot(row.tokens_per_s, 100 * row.exact_match, "o", label=name)
    axes[0].set(xlabel="tokens/s", ylabel="% exact match")
    ours = [r for r in rows if r.setting.max_changed_share is not None]
    names = [f"{r.setting.max_changed_share:g}" for r in ours]
    axes[1].barh(names, [100 * r.breach_share for r in ours])
    axes[1].set(title="breaches", xlabel="% of tokens", ylabel="changed tokens allowed")
    left = [0.0] * len(ours)
    for held in sorted({n for r in ours for n in r.held}):
        shares = [100 * r.held.get(held, 0.0) for r in ours]
        axes[2].barh(names, shares, left=left, label=held)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes[2].set(title="loaded", xlabel="% of tokens", ylabel="changed tokens allowed")
    for axis in (axes[0], axes[2]):
        axis.legend(fontsize=6)


def _lines(axes: Any, rows: Sequence[Row], x: Any, label: str) -> None:
    """Speed, right answers, and early and breached tokens over a setting."""
    for name in dict.fromkeys(r.setting.contestant for r in rows):
        mine = [r for r in rows if r.setting.contestant == name]
        at = [x(r) for r in mine]
        axes[0].plot(at, [r.tokens_per_s for r in mine], "-o", ms=4, label=name)
        axes[1].plot(at, [100 * r.exact_match for r in mine], "-o", ms=4, label=name)
        axes[2].plot(at, [100 * r.early_share for r in mine], "-o", ms=4, label=f"{name} early")
        if any(r.breach_share for r in mine):
            shares = [100 * r.breach_share for r in mine]
            axes[2].plot(at, shares, ":s", ms=4, label=f"{name} breaches")
    axes[0].set(ylabel="tokens/s", xlabel=label)
    axes[1].set(ylabel="% exact match", xlabel=label)
    axes[2].set(ylabel="% of tokens", xlabel=label)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)


def _upside_down(axes: Any) -> None:
    for axis in axes:
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)


_DRAWINGS = {
    ALONE: _contestants,
    FIXED: _fixed,
    THRESHOLDS: _thresholds,
    INTERVALS: _intervals,
    LIMITS: _limits,
}
