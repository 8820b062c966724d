"""Plots of simulated runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from loadgen.report.experiment import PANEL, drawn
from loadgen.simulation.loads import SimLoad
from quadriga.sim.results import SimulatedRun, Slo, latencies


def write_run_plot(path: Path, run: SimulatedRun, load: SimLoad, slo: Slo, title: str) -> None:
    """Draw one run: step times and their variance, memory, TPOT, migrations."""
    with drawn(path, 2, 2, size=PANEL, title=f"{title} (simulated)") as axes:
        _draw(axes, run, load, slo)


def _draw(axes: Any, run: SimulatedRun, load: SimLoad, slo: Slo) -> None:
    (steps, memory), (tpots, moves) = axes
    at_s = np.array([s.at_s for s in run.samples])
    steps.plot(at_s, [1e3 * s.mean_step_s for s in run.samples], label="mean step, ms")
    steps.plot(at_s, [s.variance_ms2 for s in run.samples], label="variance, ms²", lw=0.8)
    steps.set_xlabel("s")
    steps.legend()
    memory.plot(at_s, [s.most_used for s in run.samples], label="fullest", lw=0.8)
    memory.plot(at_s, [s.mean_used for s in run.samples], label="mean")
    memory.plot(
        at_s, [s.most_wanted for s in run.samples], label="wanted, with those that wait", lw=0.8
    )
    memory.axhline(1.0, color="grey", ls=":")
    memory.set(xlabel="s", ylabel="share of a replica's KV memory")
    memory.legend()
    _, tpot = latencies(run, load.arrivals_s, load.output_tokens)
    values = np.sort(1e3 * tpot[~np.isnan(tpot)])
    if len(values):
        tpots.plot(values, np.arange(1, len(values) + 1) / len(values))
        tpots.set_xscale("log")
    tpots.axvline(1e3 * slo.tpot_s, color="grey", ls=":", label="SLO")
    tpots.set(xlabel="TPOT, ms", ylabel="share of requests at or below")
    tpots.legend()
    moves.plot(
        [m.started_s for m in run.migrations], [m.num_tokens for m in run.migrations], ".", ms=3
    )
    moves.set(xlabel="s", ylabel="KV tokens of a migration")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
