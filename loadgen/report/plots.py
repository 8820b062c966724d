"""Draw a run: latency distributions; `loadgen.report.timeline` draws what happened over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from loadgen.checker import Outcome
from loadgen.report.experiment import PANEL, drawn
from loadgen.report.metrics import inter_token_gaps_s, stalls_s, tpot_s, ttft_s
from loadgen.report.timeline import draw_timeline
from loadgen.runner import RunResult

_MAX_POINTS = 4000


def write_plots(folder: Path, result: RunResult, title: str) -> None:
    """Write `latency.png` (CDFs) and `timeline.png`."""
    with drawn(folder / "latency.png", 2, 2, size=PANEL, title=title) as axes:
        _draw_latency(axes, result)
    heights = {"sharex": True, "height_ratios": (3, 3, 2)}
    with drawn(folder / "timeline.png", 1, 3, size=(11, 2.8), title=title, **heights) as axes:
        draw_timeline(axes[:, 0], result)


def _draw_latency(axes: Any, result: RunResult) -> None:
    good = [record for record in result.records if record.verdict.outcome is Outcome.OK]
    panels = {
        "TTFT (ms)": [v for r in good if (v := ttft_s(r)) is not None],
        "TPOT (ms)": [v for r in good if (v := tpot_s(r)) is not None],
        "inter-token and stall (ms)": [gap for r in good for gap in inter_token_gaps_s(r)],
        "end to end (ms)": [record.ended_s - record.sent_s for record in good],
    }
    for axis, (name, values) in zip(axes.flat, panels.items(), strict=True):
        draw_cdf(axis, values, "all gaps" if "stall" in name else None)
        if "stall" in name:
            draw_cdf(axis, [gap for r in good for gap in stalls_s(r)], "between arrivals")
            if axis.lines:
                axis.legend()
            axis.set_xscale("symlog", linthresh=1.0)
        axis.set_xlabel(name)
        axis.set_ylabel("share at or below")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)


def draw_cdf(axis: Any, values: list[float], label: str | None, colour: str | None = None) -> None:
    """Draw the cumulative distribution of times in seconds, in ms; nothing where there are none."""
    if values:
        shares = np.linspace(0, 100, min(_MAX_POINTS, max(2, len(values))))
        axis.plot(np.percentile(values, shares) * 1e3, shares / 100, label=label, color=colour)
