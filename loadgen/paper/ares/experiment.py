"""`python -m loadgen paper ares`: rescheduling against its baselines, on the simulator.

The figures of ARES §6 under all policies: goodput, throughput and P99 TPOT over request rates
(Figure 10), variance of step times over time (Figures 3 and 13), over bandwidth, with the share
of a migration's transfer in its token's time (Figure 11), over cluster sizes (Figure 12), and a
grid of SLOs. All figures are figures of a model. The SLO was fixed beforehand: TTFT ≤ 5 s, TPOT
≤ 1.5 steps at 50 % of the KV memory. Admission, memory and preemption are the same for all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console

from loadgen.load.traces import read_trace
from loadgen.options import number, number_from, whole
from loadgen.paper.ares import report
from loadgen.report import provenance
from loadgen.report.figures import figures, for_json
from loadgen.report.output import add_out_argument
from loadgen.report.progress import Steps
from loadgen.simulation.loads import (
    SimLoad,
    make_simulation,
    standard_slo,
    summary_of,
    synthetic_load,
    trace_load,
)
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.policies.ares import AresSettings
from quadriga.sim.config import SimConfig
from quadriga.sim.policies import POLICY_NAMES
from quadriga.sim.profiles import find_profile
from quadriga.sim.results import RunSummary, Slo

PARTS = ("rates", "bandwidth", "sizes", "hardware", "settings", "traces")
SHAREGPT_RATES = (0.10, 0.13, 0.15, 0.17, 0.19, 0.21, 0.23, 0.26)
ALPACA_RATES = (0.10, 0.13, 0.15, 0.17, 0.19, 0.21, 0.23)
PAPER_RATE = 0.17
"""ShareGPT, as printed. Alpaca's 1.7/s would be 14,600 output tokens/s, ten times what three such
devices can make; 0.17 is taken."""
SIZE_RATE = 0.3 / 8
"""Requests/s for each simulated replica, of which 3 in 4 decode (§6.4)."""
SIZES = (8, 16, 32, 64, 128, 256)
BANDWIDTHS_GBIT = (1.0, 5.0, 10.0, 25.0, 100.0)
TTFT_GRID_S = (1.0, 5.0, 10.0)
TPOT_GRID = (1.1, 1.2, 1.35, 1.5, 2.0)
_GBIT = 1e9 / 8
_TABLE_WIDTH = 200
RESULTS_FILE = "ares.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--quick", action="store_true", help="fewer points, within 5 minutes")
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=list(PARTS), help="figures to make"
    )
    parser.add_argument(
        "--policy", nargs="+", choices=POLICY_NAMES, default=list(POLICY_NAMES), help="to compare"
    )
    parser.add_argument("--profile", default="rtx4090d-7b", help="cost profile")
    parser.add_argument(
        "--duration-s", type=number(0), help="arrivals of a run; default: 4000, with --quick 2000"
    )
    parser.add_argument("--warm-up-s", type=number_from(0, 1e9), default=600.0, help="not counted")
    parser.add_argument("--seeds", type=whole(1), help="loads a point; default: 3, with --quick 1")
    parser.add_argument("--trace", nargs="*", type=Path, default=[], help="traces, scaled to load")
    parser.add_argument(
        "--workers", type=whole(1), default=min(2, os.cpu_count() or 1), help="processes"
    )
    add_out_argument(parser, "results/paper")


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation: what varies, before it is run.

    Attributes:
        part: Figure it belongs to.
        x: Value on that figure's axis.
        grid: SLOs to judge the run by, besides the standard one.
    """

    part: str
    x: float | str
    workload: str
    rate: float
    policy: str
    config: SimConfig
    duration_s: float
    warm_up_s: float
    settings: AresSettings = field(default_factory=AresSettings)
    trace: Path | None = None
    grid: tuple[Slo, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A point and its figures; `series` is (times, variance in ms²)."""

    point: Point
    summary: RunSummary
    grid_goodput: tuple[float, ...]
    series: tuple[list[float], list[float]]
    wall_s: float


def run(args: argparse.Namespace) -> int:
    """Run every point; prints tables and one JSON line, writes plots and raw figures."""
    started_s = time.perf_counter()
    points = [p for part in args.part for p in _POINTS[part](args)]
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / RESULTS_FILE).open("w", encoding="utf-8") as stream:
        outcomes, faults = _run_all(points, args.workers, console, stream)
    report.write_plots(outcomes, args.out)
    report.print_tables(outcomes, console)
    for point, fault in faults:
        where = f"{point.part}, {point.x}, {point.policy}, seed {point.config.seed}"
        print(f"{where}: the simulation failed\n{fault}", file=sys.stderr)
    line = {
        "experiment": "paper ares",
        "headline": report.headline(outcomes),
        "points": len(outcomes),
        "failed_points": len(faults),
        "slo": {"ttft_s": 5.0, "tpot_steps": 1.5},
        "profile": args.profile,
        "wall_s": round(time.perf_counter() - started_s, 1),
        "commit": provenance.commit(),
        "machine": provenance.machine(),
    }
    print(json.dumps(line))
    return 1 if faults else 0


def _run_all(
    points: Sequence[Point], workers: int, console: Console, stream: IO[str]
) -> tuple[list[Outcome], list[tuple[Point, str]]]:
    """Run points in processes of their own, the long ones first.

    Each is written to `stream` as it ends: whatever happens to another one, it is kept.

    Returns:
        The outcomes and the faults of those that failed, both in the order of the points.
    """
    order = sorted(range(len(points)), key=lambda i: -_work(points[i]))
    done: dict[int, Outcome] = {}
    faults: dict[int, str] = {}
    context = multiprocessing.get_context("spawn")
    # Simulations run side by side; none of them shall spread over the cores.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # looked at when numpy is imported: by the workers
    with (
        Steps(console, "simulations", len(points)) as steps,
        context.Pool(workers) as pool,
    ):
        jobs = [(i, points[i]) for i in order]
        for index, found in pool.imap_unordered(_indexed, jobs, chunksize=1):
            if isinstance(found, str):
                faults[index] = found
                line = _named(points[index]) | {"fault": found}
            else:
                done[index] = found
                line = _raw(found)
            stream.write(json.dumps(line, allow_nan=False) + "\n")
            stream.flush()
            steps.advance()
    return [done[i] for i in sorted(done)], [(points[i], faults[i]) for i in sorted(faults)]


def _work(point: Point) -> float:
    moves = point.policy in ("reschedule", "ares", "oracle")
    return point.duration_s * point.config.num_decode * (3.0 if moves else 1.0)


def _indexed(job: tuple[int, Point]) -> tuple[int, Outcome | str]:
    """Run a point in a worker; a fault of one point does not end the others: it is returned."""
    try:
        return job[0], run_point(job[1])
    except QuadrigaError as exc:
        return job[0], exc.message
    except Exception:
        return job[0], traceback.format_exc()


def run_point(point: Point) -> Outcome:
    """Simulate one point."""
    started_s = time.perf_counter()
    load = _load(point)
    result = make_simulation(point.policy, load, point.config, settings=point.settings).run()
    window = {"from_s": point.warm_up_s, "to_s": point.duration_s}
    samples = [s for s in result.samples if s.at_s <= point.duration_s]
    return Outcome(
        point=point,
        summary=summary_of(result, load, standard_slo(point.config), **window),
        grid_goodput=tuple(summary_of(result, load, s, **window).window.good for s in point.grid),
        series=([s.at_s for s in samples], [round(s.variance_ms2, 4) for s in samples]),
        wall_s=time.perf_counter() - started_s,
    )


def _load(point: Point) -> SimLoad:
    seed = point.config.seed
    if point.trace is None:
        return synthetic_load(
            point.workload, rate=point.rate, duration_s=point.duration_s, seed=seed
        )
    trace = read_trace(point.trace)
    if trace.arrivals_s is None:
        return trace_load(trace, arrivals=f"poisson:{point.rate!r}", scale=1.0, seed=seed)
    load = trace_load(trace, arrivals="trace", scale=1.0, seed=seed)
    if not load.rate > 0.0:
        raise ConfigError(
            f"--trace: {load.name}: all rows arrive at once, so there is no rate to change",
            param="trace",
        )
    load = load.faster(point.rate / load.rate)
    mine = load.arrivals_s <= point.duration_s
    return SimLoad(
        load.name, load.arrivals_s[mine], load.input_tokens[mine], load.output_tokens[mine]
    )


# The points of each figure


def _base(args: argparse.Namespace) -> SimConfig:
    return SimConfig(find_profile(args.profile), num_decode=3, num_prefill=1)


def _duration_s(args: argparse.Namespace) -> float:
    return float(args.duration_s or (2000.0 if args.quick else 4000.0))


def _seeds(args: argparse.Namespace) -> int:
    return args.seeds or (1 if args.quick else 3)


def _point(args: argparse.Namespace, part: str, x: float | str, **fields: Any) -> Point:
    values: dict[str, Any] = {
        "workload": "sharegpt",
        "rate": PAPER_RATE,
        "config": _base(args),
        "duration_s": _duration_s(args),
        "warm_up_s": args.warm_up_s,
    }
    return Point(part, x, **{**values, **fields})


def _rates(args: argparse.Namespace) -> list[Point]:
    base = _base(args)
    step_s = base.profile.half_memory_step_s
    grid = tuple(Slo(ttft, f * step_s) for ttft in TTFT_GRID_S for f in TPOT_GRID)
    quick = (0.10, 0.17, 0.21, 0.23)
    return [
        _point(
            args, workload, rate, workload=workload, rate=rate, policy=policy,
            config=replace(base, seed=seed), grid=grid,
        )
        for workload, rates in (("sharegpt", SHAREGPT_RATES), ("alpaca", ALPACA_RATES))
        for rate in rates
        if not args.quick or rate in quick
        for seed in range(_seeds(args))
        for policy in args.policy
    ]  # fmt: skip


def _bandwidth(args: argparse.Namespace) -> list[Point]:
    policies = [p for p in args.policy if p in ("reschedule", "ares", "oracle")]
    bandwidths = BANDWIDTHS_GBIT[::2] if args.quick else BANDWIDTHS_GBIT
    return [
        _point(
            args, "bandwidth" if precopy else "bandwidth, stop and copy", gbit, policy=policy,
            config=replace(
                _base(args), seed=seed, bandwidth_bytes_per_s=gbit * _GBIT, precopy=precopy
            ),
        )
        for gbit in bandwidths
        for precopy in (True, False)
        for policy in policies
        for seed in range(_seeds(args))
    ]  # fmt: skip


def _sizes(args: argparse.Namespace) -> list[Point]:
    sizes = (8, 32, 256) if args.quick else SIZES
    policies = [p for p in args.policy if not (args.quick and p == "round_robin")]
    return [
        _point(
            args, "sizes", size, rate=SIZE_RATE * size, policy=policy, duration_s=2000.0,
            config=SimConfig(
                find_profile(args.profile), num_decode=3 * size // 4, num_prefill=size // 4
            ),
        )
        for size in sizes
        for policy in policies
        if not (args.quick and size == 256 and policy in ("reschedule", "oracle"))
    ]  # fmt: skip


def _settings(args: argparse.Namespace) -> list[Point]:
    """The sweep of what the paper leaves open: θ, and how β falls."""
    thetas, decays = (0.05, 0.15, 0.3), (0.6, 0.8, 0.95)
    chosen = [(t, d) for t in thetas for d in decays]
    if args.quick:
        chosen = [(0.05, 0.8), (0.15, 0.8), (0.3, 0.8)]
    return [
        _point(
            args, "settings", f"θ {theta:g}, decay {decay:g}", policy="ares",
            config=replace(_base(args), seed=seed),
            settings=AresSettings(theta=theta, decay=decay),
        )
        for theta, decay in chosen
        for seed in range(_seeds(args))
    ]  # fmt: skip


def _traces(args: argparse.Namespace) -> list[Point]:
    """Real traces, at the rate at which their decode work fills 3 replicas to two thirds."""
    points = []
    for path in args.trace:
        trace = read_trace(path)
        rate = fitting_rate(_base(args), trace.input_tokens, trace.output_tokens)
        points += [
            _point(args, "traces", trace.name, rate=rate, policy=policy, trace=path,
                   workload=trace.name)
            for policy in args.policy
        ]  # fmt: skip
    return points


def fitting_rate(
    config: SimConfig, input_tokens: np.ndarray, output_tokens: np.ndarray, share: float = 2 / 3
) -> float:
    """Requests/s at which the decode replicas' memory is filled to a share, on average.

    A request holds its input plus half of its output, on average, for as long as its steps take.
    """
    profile = config.profile
    tokens = share * profile.kv_capacity_tokens
    held = (input_tokens + output_tokens / 2.0) * output_tokens  # token-steps of a request
    sequences = tokens / (held.mean() / output_tokens.mean())
    step_s = profile.step.step_s(int(sequences), int(tokens))
    return float(config.num_decode * tokens / (held.mean() * step_s))


def _hardware(args: argparse.Namespace) -> list[Point]:
    """Figure 11 is arithmetic; the report makes it from the profiles."""
    return []


_POINTS: dict[str, Callable[[argparse.Namespace], list[Point]]] = {
    "rates": _rates,
    "bandwidth": _bandwidth,
    "sizes": _sizes,
    "hardware": _hardware,
    "settings": _settings,
    "traces": _traces,
}


def _named(point: Point) -> dict[str, Any]:
    return {
        "part": point.part,
        "x": point.x,
        "policy": point.policy,
        "workload": point.workload,
        "rate": point.rate,
        "seed": point.config.seed,
        "decode": point.config.num_decode,
        "duration_s": point.duration_s,
        "warm_up_s": point.warm_up_s,
        "precopy": point.config.precopy,
    }


def _raw(outcome: Outcome) -> dict[str, Any]:
    point = outcome.point
    return _named(point) | {
        "summary": figures(asdict(outcome.summary)),
        "grid": [[s.ttft_s, s.tpot_s] for s in point.grid],
        "grid_goodput": [for_json(v) for v in outcome.grid_goodput],
        "variance": outcome.series,
        "wall_s": round(outcome.wall_s, 3),
    }
