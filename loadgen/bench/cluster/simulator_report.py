"""Figures of `bench simulator`: the real cluster's beside the simulator's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from loadgen.bench.cluster.paced_cluster import Played
from loadgen.bench.cluster.rescheduling_report import step_variances
from loadgen.bench.cluster.simulator_fit import (
    Costs,
    by_load_ms2,
    fitted_over_real,
    load_of,
    ttfts_of,
)
from loadgen.report.experiment import ALL_DIGITS, drawn, table_of
from loadgen.report.figures import for_json, shown
from loadgen.report.metrics import tpot_s
from loadgen.simulation.loads import SimLoad
from quadriga.config.pacing import PaceProfile
from quadriga.sim.results import SimulatedRun, latencies

TABLE_WIDTH = 120
PERCENTILES = (50, 90, 99)
MUST_AGREE = ("tokens_per_s", "requests_per_s", *(f"tpot_p{p}_ms" for p in PERCENTILES))
"""What the simulator is held to; the rest is shown."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """One run of a load, real or simulated.

    Attributes:
        duration_s: First request sent to last token.
        ttft_s, tpot_s: [num_requests], in the order of sending; NaN where there is none.
        load_variance_ms2: Between the replicas' step times, by what their batches held (the fitted
            step, for both), while any runs.
        reported_variance_ms2: As the replicas' own measurements have it; simulated: what the
            measuring adds is added.
        fitted_step: What the fitted model says of the steps that were really made, over what they
            took: 1 where the machine is as it was when it was fitted.
    """

    duration_s: float
    output_tokens: NDArray[np.int64]
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    load_variance_ms2: float
    reported_variance_ms2: float
    num_moves: int
    fitted_step: float = 1.0


def real_outcome(played: Played, step: PaceProfile) -> LoadOutcome:
    """What the cluster did. Raises: ConfigError: A response failed its check."""
    load = load_of(played)
    records = sorted(played.result.records, key=lambda r: r.sent_s)
    return LoadOutcome(
        duration_s=max(r.ended_s for r in records) - records[0].sent_s,
        output_tokens=load.output_tokens,
        ttft_s=ttfts_of(played),
        tpot_s=np.array([np.nan if (v := tpot_s(r)) is None else v for r in records]),
        load_variance_ms2=_mean(by_load_ms2(played.views, step)),
        reported_variance_ms2=_mean(step_variances(played.views)),
        num_moves=max((v.get("outcomes", {}).get("moved", 0) for v in played.views), default=0),
        fitted_step=fitted_over_real(played, step),
    )


def simulated_outcome(run: SimulatedRun, load: SimLoad, costs: Costs) -> LoadOutcome:
    """What the simulator made of the same load."""
    ttft, tpot = latencies(run, load.arrivals_s, load.output_tokens)
    by_load = _mean([s.variance_ms2 for s in run.samples if s.num_running])
    return LoadOutcome(
        duration_s=float(np.nanmax(run.finished_s) - load.arrivals_s[0]),
        output_tokens=load.output_tokens,
        ttft_s=ttft,
        tpot_s=tpot,
        load_variance_ms2=by_load,
        reported_variance_ms2=by_load + costs.measured_ms2,
        num_moves=len(run.migrations),
    )


def figures(outcomes: Sequence[LoadOutcome]) -> dict[str, float]:
    """Figures of several runs, taken together; moves and variances are means of a run."""
    duration_s = sum(o.duration_s for o in outcomes)
    found = {
        "tokens_per_s": float(sum(o.output_tokens.sum() for o in outcomes)) / duration_s,
        "requests_per_s": sum(len(o.output_tokens) for o in outcomes) / duration_s,
    }
    for name in ("ttft", "tpot"):
        values = np.concatenate([getattr(o, f"{name}_s") for o in outcomes])
        for percent in PERCENTILES:
            found[f"{name}_p{percent}_ms"] = 1e3 * float(np.nanpercentile(values, percent))
    found["load_variance_ms2"] = _mean([o.load_variance_ms2 for o in outcomes])
    found["reported_variance_ms2"] = _mean([o.reported_variance_ms2 for o in outcomes])
    found["moves"] = _mean([float(o.num_moves) for o in outcomes])
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def ratios(real: dict[str, float], simulated: dict[str, float]) -> dict[str, float | None]:
    """Simulated over real; None where the real figure is 0."""
    return {n: round(simulated[n] / real[n], 4) if real[n] else None for n in real}


def worst_deviation(ratio: dict[str, float | None]) -> float:
    """Of the figures that must agree, the largest |simulated / real − 1|."""
    return max(abs((ratio[name] or 0.0) - 1.0) for name in MUST_AGREE)


def print_tables(
    console: Console, results: dict[str, dict[str, dict[str, Any]]], costs: Costs
) -> None:
    """Print the fit, and for each policy real, simulated and their ratio."""
    profile, step, delays = costs.profile, costs.profile.step, costs.delays
    console.print(
        f"fitted: step {1e3 * step.base_s:.2f} ms + {1e3 * step.per_sequence_s:.3f} ms a sequence"
        f" + {1e6 * step.per_token_s:.2f} µs a token (error {costs.step.mean_error:.1%} over "
        f"{costs.num_windows} windows); prefill {1e3 * profile.prefill_base_s:.2f} ms + "
        f"{1e6 * profile.prefill_per_token_s:.0f} µs a token ({costs.prefill.mean_error:.1%}); "
        f"hand-off P50 {1e3 * _middle(delays.handoff_s):.0f} ms; "
        f"ingress P50 {1e3 * _middle(delays.ingress_s):.0f} ms; "
        f"a move {1e3 * profile.round_trip_s:.0f} ms (of {costs.num_moves})"
    )
    for policy, result in results.items():
        real, simulated, ratio = result["real"], result["simulated"], result["ratio"]
        columns: dict[str, Callable[[str], object]] = {
            "figure": lambda name: name,
            "real": lambda name, of=real: f"{of[name]:.4g}",  # type: ignore[misc]
            "simulated": lambda name, of=simulated: f"{of[name]:.4g}",  # type: ignore[misc]
            "ratio": lambda name, of=ratio: shown(of[name], ".3f"),  # type: ignore[misc]
            "must agree": lambda name: "yes" if name in MUST_AGREE else None,
        }
        title = f"rescheduling {policy}: another load than the one that was fitted"
        console.print(table_of(real, columns, title=title))


def write_plot(
    path: Path, outcomes: dict[str, tuple[list[LoadOutcome], list[LoadOutcome]]]
) -> None:
    """Draw TTFT and TPOT of each policy: share of requests at or below, real and simulated."""
    with drawn(path, 2, len(outcomes), size=(5.5, 4.0)) as axes:
        for row, (policy, (real, simulated)) in zip(axes, outcomes.items(), strict=True):
            for axis, name in zip(row, ("ttft", "tpot"), strict=True):
                for label, runs in (("real", real), ("simulated", simulated)):
                    values = np.concatenate([getattr(o, f"{name}_s") for o in runs])
                    values = np.sort(1e3 * values[~np.isnan(values)])
                    axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=label)
                axis.set(xlabel=f"{name.upper()}, ms", ylabel="share of requests", title=policy)
                axis.grid(alpha=0.3)
                axis.legend()


def raw(
    costs: Costs, outcomes: dict[str, tuple[list[LoadOutcome], list[LoadOutcome]]]
) -> dict[str, Any]:
    """All that the figures derive from."""
    return {
        "costs": asdict(costs),
        "runs": [
            {
                "policy": policy,
                "is_real": is_real,
                "duration_s": o.duration_s,
                "output_tokens": o.output_tokens.tolist(),
                "ttft_s": _column(o.ttft_s),
                "tpot_s": _column(o.tpot_s),
                "load_variance_ms2": for_json(o.load_variance_ms2, ALL_DIGITS),
                "reported_variance_ms2": for_json(o.reported_variance_ms2, ALL_DIGITS),
                "moves": o.num_moves,
                "fitted_step": for_json(o.fitted_step, ALL_DIGITS),
            }
            for policy, pair in outcomes.items()
            for is_real, runs in zip((True, False), pair, strict=True)
            for o in runs
        ],
    }


def _column(values: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(v) else round(v, 6) for v in values.tolist()]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _middle(quantiles: Sequence[float] | None) -> float:
    return float(np.median(quantiles)) if quantiles else 0.0
