"""Draw a run: latency distributions, and what happened over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.checker import Outcome
from loadgen.metrics import inter_token_gaps_s, stalls_s, tpot_s, ttft_s
from loadgen.runner import Record, RunResult

_MAX_POINTS = 4000
_TIME_BINS = 120


def write_plots(folder: Path, result: RunResult, title: str) -> list[Path]:
    """Write `latency.png` (CDFs) and `timeline.png`; returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for name, draw in (("latency.png", _draw_latency), ("timeline.png", _draw_timeline)):
        figure = draw(pyplot, result)
        figure.suptitle(title)
        figure.tight_layout()
        path = folder / name
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        paths.append(path)
    return paths


def running_requests(records: list[Record]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return (times, requests in flight from that time on)."""
    times = np.array([t for r in records for t in (r.sent_s, r.ended_s)], dtype=np.float64)
    steps = np.array([step for _ in records for step in (1, -1)], dtype=np.int64)
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(steps[order])


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


def _draw_timeline(pyplot: Any, result: RunResult) -> Any:
    figure, (running, tokens) = pyplot.subplots(2, 1, figsize=(11, 7), sharex=True)
    if result.records:
        times, in_flight = running_requests(result.records)
        running.step(times - result.start_s, in_flight, where="post")
        end_s = max(record.ended_s for record in result.records) - result.start_s
        edges = np.linspace(0, max(end_s, 1e-3), _TIME_BINS + 1)
        writes = [w for r in result.records for c in r.verdict.choices for w in c.writes]
        counts, _ = np.histogram(
            [write.time_s - result.start_s for write in writes],
            bins=edges,
            weights=[write.num_tokens for write in writes],
        )
        tokens.step(edges[:-1], counts / np.diff(edges), where="post")
        for outcome, colour in ((Outcome.FAILED, "red"), (Outcome.REFUSED, "orange")):
            ends = [
                record.ended_s - result.start_s
                for record in result.records
                if record.verdict.outcome is outcome
            ]
            if ends:
                running.plot(ends, [0] * len(ends), "x", color=colour, label=str(outcome))
                running.legend()
    running.set_ylabel("requests in flight")
    tokens.set_ylabel("output tokens/s")
    tokens.set_xlabel("s from the start of the run")
    for axis in (running, tokens):
        axis.grid(alpha=0.3)
    return figure
