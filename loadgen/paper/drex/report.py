"""The table, the plot and the headline of `paper drex`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from loadgen.paper.drex.bench import CPU, NO_EXITS, DrexRow, DrexSetting
from loadgen.paper.drex.judged import Decisions
from loadgen.report.experiment import drawn, kept_rows, least, most, show

_GROUPED = ("eager", "lazy", "majority")
_SAME_ANSWERS = 0.01  # exact match within a point of the full model
_CEILING_FLOOR = 1.15  # settings below it leave nothing to win


def plain(row: DrexRow) -> dict[str, Any]:
    """A row for JSON."""
    shown = asdict(row)
    shown = {**shown.pop("setting"), **shown}
    if row.decisions is not None:
        shown["decisions"]["share_right"] = row.decisions.share_right
    return shown


def read_rows(path: Path) -> list[DrexRow]:
    """Rows that an earlier run left in a JSON file; none where there is no file."""
    return kept_rows(path, _parse)


def _parse(shown: dict[str, Any]) -> DrexRow:
    setting = DrexSetting(**{f.name: shown.pop(f.name) for f in fields(DrexSetting)})
    decisions = shown.pop("decisions")
    if decisions is not None:
        decisions.pop("share_right")
        decisions = Decisions(**decisions)
    return DrexRow(setting, **shown, decisions=decisions)


def print_table(rows: Sequence[DrexRow]) -> None:
    """Print one line a setting."""

    def ratio(row: DrexRow) -> float | None:
        base = _other(rows, row, NO_EXITS)
        return _over(row, base) if base else None

    def of_ceiling(row: DrexRow) -> str | None:
        over = ratio(row)
        return f"{over / row.ceiling:.2f}" if over and row.ceiling else None

    show(
        rows,
        {
            "model": lambda r: r.setting.model,
            "time": lambda r: r.setting.device,
            "batch": lambda r: r.setting.batch,
            "slots": lambda r: f"{r.slots} of {r.wanted_slots}" if r.wanted_slots else r.slots,
            "τ": lambda r: f"{r.setting.threshold:g}",
            "policy": lambda r: r.setting.policy,
            "tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
            "× no exits": lambda r: None if ratio(r) is None else f"{ratio(r):.2f}",
            "of ceiling": of_ceiling,
            "gap mean ms": lambda r: f"{1e3 * r.gap_mean_s:.2f}",
            "gap P99 ms": lambda r: f"{1e3 * r.gap_p99_s:.2f}",
            "request s": lambda r: f"{r.request_s:.2f}",
            "exact": lambda r: f"{r.exact_match:.3f}",
            "early": lambda r: f"{r.early_share:.2f}",
            "inv. exits": lambda r: r.involuntary_exits,
            "stays": lambda r: r.involuntary_stays,
            "MiB": lambda r: f"{r.peak_bytes / 2**20:.1f}",
            "right": lambda r: (
                f"{r.decisions.share_right:.1%} of {r.decisions.count}"
                if r.decisions and r.decisions.count
                else None
            ),
        },
        title="Rebatching: one decode loop, same prompts, same slots",
        left=("time", "policy"),
    )


def headline(rows: Sequence[DrexRow]) -> dict[str, Any]:
    """Return the figures that the experiment stands for, all of them on the real machine."""
    drex = [r for r in rows if (r.setting.device, r.setting.policy) == (CPU, "drex")]
    pairs = [(r, base) for r in drex if (base := _other(rows, r, NO_EXITS)) is not None]
    ratios = [_over(r, base) for r, base in pairs]
    return {
        "vs_best_grouped": least(_vs_best_grouped(rows, r, base) for r, base in pairs),
        "share_of_ceiling": least(
            ratio / r.ceiling
            for ratio, (r, _) in zip(ratios, pairs, strict=True)
            if r.ceiling and r.ceiling >= _CEILING_FLOOR
        ),
        "vs_no_exit_equal_memory": most(ratios),
        "worst_vs_no_exit": least(ratios),
        "p99_itl_ratio": most(_over(r, base, "gap_p99_s") for r, base in pairs),
        "mean_request_time_ratio": most(_over(r, base, "request_s") for r, base in pairs),
        "involuntary_exits": max((r.involuntary_exits for r in drex), default=None),
        "decisions_right": least(r.decisions.share_right for r in drex if r.decisions),
        "early_token_share": least(r.early_share for r in drex),
        "exact_match_delta_points": least(
            100 * (r.exact_match - base.exact_match) for r, base in pairs
        ),
        "peak_bytes_ratio": most(r.peak_bytes / base.peak_bytes for r, base in pairs),
    }


def write_plot(rows: Sequence[DrexRow], path: Path) -> Path:
    """Draw tokens/s over the batch size, a panel per model and kind of time."""
    panels = sorted({(r.setting.model, r.setting.device) for r in rows})
    with drawn(path, len(panels)) as axes:
        for axis, (model, device) in zip(axes[0], panels, strict=True):
            lines: dict[tuple[str, float], list[tuple[int, float]]] = {}
            for r in rows:
                if (r.setting.model, r.setting.device) == (model, device):
                    line = lines.setdefault((r.setting.policy, r.setting.threshold), [])
                    line.append((r.setting.batch, r.tokens_per_s))
            for (policy, threshold), line in sorted(lines.items()):
                style = {"drex": "-o", "off": "--s"}.get(policy, ":^")
                label = f"{policy} τ {threshold:g}"
                axis.plot(*zip(*sorted(line), strict=True), style, label=label, ms=4)
            axis.set(title=f"{model}, {device}", xlabel="slots", xscale="log")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("tokens/s")
        axes[0][-1].legend(fontsize=6)
    return path


def _vs_best_grouped(rows: Sequence[DrexRow], row: DrexRow, base: DrexRow) -> float | None:
    """DREX over the fastest grouped policy whose answers are those of the full model."""
    others = [o for policy in _GROUPED if (o := _other(rows, row, policy)) is not None]
    same = [o for o in others if o.exact_match >= base.exact_match - _SAME_ANSWERS]
    best = max(same, key=lambda o: o.tokens_per_s, default=None)
    return None if best is None else _over(row, best)


def _over(row: DrexRow, other: DrexRow, figure: str = "tokens_per_s") -> float:
    """The median of the ratios of rounds; of rows without rounds, as old files have, of medians."""
    ours, theirs = (r.rounds.get(figure) or [getattr(r, figure)] for r in (row, other))
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _other(rows: Sequence[DrexRow], row: DrexRow, policy: str) -> DrexRow | None:
    """The row of another policy in the same setting."""
    wanted = asdict(row.setting) | {"policy": policy}
    return next((o for o in rows if asdict(o.setting) == wanted), None)
