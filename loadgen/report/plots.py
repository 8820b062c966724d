"""Draw a run: latency distributions; `loadgen.report.timeline` draws what happened over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from loadgen.checker import Outcome
from loadgen.report.metrics import inter_token_gaps_s, stalls_s, tpot_s, ttft_s
from loadgen.report.timeline import draw_timeline
from loadgen.runner import RunResult

_MAX_POINTS = 4000


def write_plots(folder: Path, result: RunResult, title: str) -> list[Path]:
    """Write `latency.png` (CDFs) and `timeline.png`; returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for name, draw in (("latency.png", _draw_latency), ("timeline.png", draw_timeline)):
        figure = draw(pyplot, result)
        figure.suptitle(title)
        figure.tight_layout()
        path = folder / name
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        paths.append(path)
    return paths


def _draw_latency(pyplot: Any, result: RunResult) -> Any:
    good = [record for record in result.records if record.verdict.outcome is Outcome.OK]
    panels = {
        "TTFT (ms)": [v for r in good if (v := ttft_s(r)) is not None],
        "TPOT (ms)": [v for r in good if (v := tpot_s(r)) is not None],
        "inter-token and stall (ms)": [gap for r in good for gap in inter_token_gaps_s(r)],
        "end to end (ms)": [record.ended_s - record.sent_s for record in good],
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7))
    for axis, (name, values) in zip(axes.flat, panels.items(), strict=True):
        draw_cdf(axis, values, "all gaps" if "stall" in name else None)
        if "stall" in name:
            draw_cdf(axis, [gap for r in good for gap in stalls_s(r)], "between arrivals")
            axis.legend()
            axis.set_xscale("symlog", linthresh=1.0)
        axis.set_xlabel(name)
        axis.set_ylabel("share at or below")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
    return figure


def draw_cdf(axis: Any, values: list[float], label: str | None, colour: str | None = None) -> None:
    """Draw the cumulative distribution of times in seconds, in ms; nothing where there are none."""
    if values:
        shares = np.linspace(0, 100, min(_MAX_POINTS, max(2, len(values))))
        axis.plot(np.percentile(values, shares) * 1e3, shares / 100, label=label, color=colour)
