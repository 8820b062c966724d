"""Draw what happened over time in a run: requests in flight, tokens/s, and how requests ended."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.checker import Outcome
from loadgen.runner import Record, RunResult

NUM_BINS = 600
NUM_BARS = 100
MIN_BAR_S = 1.0
"""A bar of endings is no narrower, or a short run would be a comb."""
SMOOTH_SHARE = 1 / 100
SMOOTH_MIN_S = 0.25
"""Standard deviation of the smoothing: a share of the run, and at the least."""
COLOURS = {Outcome.OK: "#56b4e9", Outcome.REFUSED: "#e69f00", Outcome.FAILED: "#c0392b"}
NAMES = {Outcome.OK: "passed every check", Outcome.REFUSED: "refused", Outcome.FAILED: "failed"}
MARKS = {Outcome.REFUSED: "v", Outcome.FAILED: "x"}

Floats = NDArray[np.float64]


def running_requests(records: list[Record]) -> tuple[Floats, NDArray[np.int64]]:
    """Return (times, requests in flight from that time on)."""
    times = np.array([t for r in records for t in (r.sent_s, r.ended_s)], dtype=np.float64)
    steps = np.array([step for _ in records for step in (1, -1)], dtype=np.int64)
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(steps[order])


def smoothed(values: Floats, width: float) -> Floats:
    """Return `values` under a Gaussian of standard deviation `width`, in steps of `values`.

    At the ends the weights inside are scaled up, so that a level line stays level.
    """
    reach = int(np.ceil(4 * width))
    if not reach or not len(values):
        return values
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    padded = np.convolve(values, kernel)[reach : reach + len(values)]
    weights = np.convolve(np.ones(len(values)), kernel)[reach : reach + len(values)]
    return np.asarray(padded / weights, dtype=np.float64)


def endings(records: list[Record], start_s: float) -> dict[Outcome, Floats]:
    """Return when requests ended, by how; refusals that were tried again count when it was due."""
    found: dict[Outcome, list[float]] = {outcome: [] for outcome in Outcome}
    for record in records:
        found[record.verdict.outcome].append(record.ended_s - start_s)
        due_s = record.scheduled_s - start_s
        found[Outcome.REFUSED] += [due_s] * (record.attempts - 1)
    return {outcome: np.array(times, dtype=np.float64) for outcome, times in found.items()}


def draw_timeline(axes: Any, result: RunResult) -> None:
    """Draw three panels over one time axis."""
    running, tokens, ended = axes
    if result.records:
        end_s = max(max(r.ended_s for r in result.records) - result.start_s, 1e-3)
        _draw_running(running, result)
        _draw_tokens(tokens, result, end_s)
        _draw_endings(ended, running, result, end_s)
        running.set_xlim(0, end_s)
    running.set_ylabel("requests in flight")
    tokens.set_ylabel("output tokens/s")
    ended.set_ylabel("requests/s ended")
    ended.set_xlabel("s from the start of the run")
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)


def _draw_running(axis: Any, result: RunResult) -> None:
    times, in_flight = running_requests(result.records)
    axis.step(times - result.start_s, in_flight, where="post", color="#0072b2", linewidth=1.2)


def _draw_tokens(axis: Any, result: RunResult, end_s: float) -> None:
    """The smoothed rate over what was counted."""
    edges = np.linspace(0, end_s, NUM_BINS + 1)
    width_s = end_s / NUM_BINS
    writes = [w for r in result.records for c in r.verdict.choices for w in c.writes]
    counts, _ = np.histogram(
        [write.time_s - result.start_s for write in writes],
        bins=edges,
        weights=[write.num_tokens for write in writes],
    )
    rates = counts / width_s
    middles = edges[:-1] + width_s / 2
    sigma_s = max(SMOOTH_MIN_S, SMOOTH_SHARE * end_s)
    line = smoothed(rates, sigma_s / width_s)
    label = f"smoothed over {sigma_s:.2g} s"
    axis.plot(middles, rates, color="#0072b2", alpha=0.18, linewidth=0.8, label="as counted")
    axis.plot(middles, line, color="#0072b2", linewidth=1.8, label=label)
    top = float(line.max(initial=0.0))
    if top > 0:
        axis.set_ylim(0, max(1.3 * top, float(np.quantile(rates, 0.98))))
    axis.legend(loc="upper right")


def _draw_endings(axis: Any, running: Any, result: RunResult, end_s: float) -> None:
    """Stacked bars by how requests ended; marks in the panel above for what did not end well."""
    num_bars = max(1, min(NUM_BARS, round(end_s / MIN_BAR_S)))
    edges = np.linspace(0, end_s, num_bars + 1)
    below = np.zeros(num_bars)
    for outcome, times in endings(result.records, result.start_s).items():
        if not len(times):
            continue
        rates = np.histogram(np.clip(times, 0, end_s), bins=edges)[0] / np.diff(edges)
        label = f"{len(times):,} {NAMES[outcome]}"
        axis.bar(
            edges[:-1],
            rates,
            np.diff(edges),
            bottom=below,
            align="edge",
            color=COLOURS[outcome],
            label=label,
        )
        below += rates
        if outcome in MARKS:
            running.plot(
                times,
                np.zeros(len(times)),
                MARKS[outcome],
                color=COLOURS[outcome],
                label=label,
                clip_on=False,
                zorder=3,
            )
            running.legend(loc="upper right")
    axis.legend(loc="upper right", ncols=3)
