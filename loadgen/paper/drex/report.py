"""The table, the plot and the headline of `paper drex`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.paper.drex.bench import CPU, NO_EXITS, Measured, Setting
from loadgen.paper.drex.judged import Decisions

_GROUPED = ("eager", "lazy", "majority")
_SAME_ANSWERS = 0.01  # exact match within a point of the full model
_CEILING_FLOOR = 1.15  # settings below it leave nothing to win


def plain(row: Measured) -> dict[str, Any]:
    """A row for JSON."""
    shown = asdict(row)
    shown = {**shown.pop("setting"), **shown}
    if row.decisions is not None:
        shown["decisions"]["share_right"] = row.decisions.share_right
    return shown


def read_rows(path: Path) -> list[Measured]:
    """Rows that an earlier run left in a JSON file; none where there is no file."""
    if not path.is_file():
        return []
    rows = []
    for shown in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        setting = Setting(**{f.name: shown.pop(f.name) for f in fields(Setting)})
        decisions = shown.pop("decisions")
        if decisions is not None:
            decisions.pop("share_right")
            decisions = Decisions(**decisions)
        rows.append(Measured(setting, **shown, decisions=decisions))
    return rows


def print_table(rows: Sequence[Measured], console: Console) -> None:
    """Print one line a setting."""
    table = Table(title="Rebatching: one decode loop, same prompts, same slots")
    for name in (
        "model", "time", "batch", "τ", "policy", "tokens/s", "× no exits", "of ceiling",
        "gap mean ms", "gap P99 ms", "request s", "exact", "early", "inv. exits", "stays", "MiB",
        "right",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in ("model", "time", "policy") else "right")
    for row in rows:
        base = _other(rows, row, NO_EXITS)
        ratio = row.tokens_per_s / base.tokens_per_s if base else None
        s = row.setting
        share = ratio / row.ceiling if ratio and row.ceiling else None
        right = row.decisions and f"{row.decisions.share_right:.1%} of {row.decisions.count}"
        table.add_row(
            s.model, s.device, str(s.batch), f"{s.threshold:g}", s.policy,
            f"{row.tokens_per_s:,.0f}", _figure(ratio), _figure(share),
            f"{1e3 * row.gap_mean_s:.2f}", f"{1e3 * row.gap_p99_s:.2f}", f"{row.request_s:.2f}",
            f"{row.exact_match:.3f}", f"{row.early_share:.2f}", str(row.involuntary_exits),
            str(row.involuntary_stays), f"{row.peak_bytes / 2**20:.1f}", right or "",
        )  # fmt: skip
    console.print(table)


def headline(rows: Sequence[Measured]) -> dict[str, Any]:
    """Return the figures that the experiment stands for, all of them on the real machine."""
    real = [r for r in rows if r.setting.device == CPU]
    drex = [r for r in real if r.setting.policy == "drex"]
    pairs = [(r, base) for r in drex if (base := _other(rows, r, NO_EXITS)) is not None]
    ratios = [r.tokens_per_s / base.tokens_per_s for r, base in pairs]
    shares = [
        ratio / r.ceiling
        for ratio, (r, _) in zip(ratios, pairs, strict=True)
        if r.ceiling and r.ceiling >= _CEILING_FLOOR
    ]
    return {
        "vs_best_grouped": _least(_vs_best_grouped(rows, r, base) for r, base in pairs),
        "share_of_ceiling": _least(shares),
        "vs_no_exit_equal_memory": _most(ratios),
        "worst_vs_no_exit": _least(ratios),
        "p99_itl_ratio": _most(r.gap_p99_s / base.gap_p99_s for r, base in pairs),
        "mean_request_time_ratio": _most(r.request_s / base.request_s for r, base in pairs),
        "involuntary_exits": max((r.involuntary_exits for r in drex), default=None),
        "decisions_right": _least(r.decisions.share_right for r in drex if r.decisions),
        "early_token_share": _least(r.early_share for r in drex),
        "exact_match_delta_points": _least(
            100 * (r.exact_match - base.exact_match) for r, base in pairs
        ),
        "peak_bytes_ratio": _most(r.peak_bytes / base.peak_bytes for r, base in pairs),
    }


def write_plot(rows: Sequence[Measured], path: Path) -> Path:
    """Draw tokens/s over the batch size, a panel per model and kind of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(r.setting.model, r.setting.device) for r in rows})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False, sharex=True
    )
    for axis, (model, device) in zip(axes[0], panels, strict=True):
        mine = [r for r in rows if (r.setting.model, r.setting.device) == (model, device)]
        for policy, threshold in sorted({(r.setting.policy, r.setting.threshold) for r in mine}):
            line = sorted(
                (r.setting.batch, r.tokens_per_s)
                for r in mine
                if (r.setting.policy, r.setting.threshold) == (policy, threshold)
            )
            style = "-o" if policy == "drex" else "--s" if policy == "off" else ":^"
            axis.plot(*zip(*line, strict=True), style, label=f"{policy} τ {threshold:g}", ms=4)
        axis.set(title=f"{model}, {device}", xlabel="slots", xscale="log")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens/s")
    axes[0][-1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _vs_best_grouped(rows: Sequence[Measured], row: Measured, base: Measured) -> float | None:
    """DREX over the fastest grouped policy whose answers are those of the full model."""
    others = [
        o
        for policy in _GROUPED
        if (o := _other(rows, row, policy)) is not None
        and o.exact_match >= base.exact_match - _SAME_ANSWERS
    ]
    best = max((o.tokens_per_s for o in others), default=None)
    return None if best is None else row.tokens_per_s / best


def _other(rows: Sequence[Measured], row: Measured, policy: str) -> Measured | None:
    """The row of another policy in the same setting."""
    s = row.setting
    return next(
        (
            o
            for o in rows
            if o.setting.policy == policy
            and (o.setting.model, o.setting.batch, o.setting.threshold, o.setting.device)
            == (s.model, s.batch, s.threshold, s.device)
        ),
        None,
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _least(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(min(known), 4) if known else None


def _most(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(max(known), 4) if known else None
