"""`python -m loadgen paper ares`: rescheduling against its baselines, on the simulator.

The figures of ARES §6 under all policies: goodput, throughput and P99 TPOT over request rates
(Figure 10), variance of step times over time (Figures 3 and 13), over bandwidth, with the share
of a migration's transfer in its token's time (Figure 11), over cluster sizes (Figure 12), and a
grid of SLOs; and, because the paper compares with one baseline on one engine: the same loads on
vLLM's behaviour with a full memory and on our own, overload, and lighter loads, each against the
best placement that moves nothing. All figures are figures of a model. The SLO was fixed beforehand:
TTFT ≤ 5 s, TPOT ≤ 1.5 steps at 50 % of the KV memory. Admission, memory and preemption are the same
for all.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from loadgen.options import number, number_from, whole
from loadgen.paper.ares import report
from loadgen.paper.ares.points import (
    ARITHMETIC,
    COMPARED,
    PARTS,
    POINTS,
    PointResult,
    SimPoint,
    run_point,
)
from loadgen.report.experiment import print_line, say, wide_console
from loadgen.report.figures import figures, for_json
from loadgen.report.output import add_out_argument
from loadgen.report.progress import Steps
from loadgen.simulation.loads import SLO_TPOT_FACTOR, SLO_TTFT_S
from quadriga.errors import ConfigError, QuadrigaError

RESULTS_FILE, UNFINISHED_FILE = "ares.jsonl", "ares.partial.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the same points, one shorter run each: within 5 minutes on two quiet cores",
    )
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=list(PARTS), help="figures to make"
    )
    parser.add_argument(
        "--policy", nargs="+", choices=COMPARED, default=list(COMPARED), help="to compare"
    )
    parser.add_argument("--profile", default="rtx4090d-7b", help="cost profile")
    parser.add_argument(
        "--duration-s",
        type=number(0),
        help="arrivals of a run; default: 2000 to 4000 by part, with --quick 1000 to 2000",
    )
    parser.add_argument("--warm-up-s", type=number_from(0, 1e9), default=600.0, help="not counted")
    parser.add_argument("--seeds", type=whole(1), help="loads a point; default: 3, with --quick 1")
    parser.add_argument("--trace", nargs="*", type=Path, default=[], help="traces, scaled to load")
    parser.add_argument(
        "--workers", type=whole(1), default=min(2, os.cpu_count() or 1), help="processes"
    )
    add_out_argument(parser, "results/paper")


def run(args: argparse.Namespace) -> int:
    """Run every point; prints tables and one JSON line, writes plots and raw figures."""
    started_s = time.perf_counter()
    if args.trace and "traces" not in args.part:
        raise ConfigError("--trace: goes with --part traces", param="trace")
    by_part = {part: POINTS[part](args) for part in args.part}
    left_out = [part for part, of_it in by_part.items() if not of_it and part != ARITHMETIC]
    if left_out and args.part != list(PARTS):
        text = f"--part {' '.join(left_out)}: nothing to run with this --trace and --policy"
        raise ConfigError(text, param="part")
    points = [point for of_it in by_part.values() for point in of_it]
    shortest_s = min((p.duration_s for p in points), default=math.inf)
    if args.warm_up_s >= shortest_s:
        text = f"--warm-up-s: {args.warm_up_s:g} must be less than --duration-s {shortest_s:g}"
        raise ConfigError(text, param="warm-up-s")
    console = wide_console()
    args.out.mkdir(parents=True, exist_ok=True)
    unfinished = args.out / UNFINISHED_FILE
    with unfinished.open("w", encoding="utf-8") as stream:
        outcomes, faults = _run_all(points, args.workers, console, stream)
    unfinished.replace(args.out / RESULTS_FILE)
    report.print_tables(outcomes, console)
    if left_out:
        say(f"left out: {', '.join(left_out)}: nothing to run with this --trace and --policy")
    for point, fault in faults:
        where = f"{point.part}, {point.x}, {point.policy}, seed {point.config.seed}"
        say(f"{where}: the simulation failed\n{fault}")
    print_line(
        "paper ares",
        headline=report.headline(outcomes),
        points=len(outcomes),
        failed_points=len(faults),
        left_out=left_out,
        slo={"ttft_s": SLO_TTFT_S, "tpot_steps": SLO_TPOT_FACTOR},
        profile=args.profile,
        wall_s=round(time.perf_counter() - started_s, 1),
    )
    report.write_plots(outcomes, args.out)
    return 1 if faults else 0


def _run_all(
    points: Sequence[SimPoint], workers: int, console: Console, stream: IO[str]
) -> tuple[list[PointResult], list[tuple[SimPoint, str]]]:
    """Run points in processes of their own, the long ones first.

    Each is written to `stream` as it ends: whatever happens to another one, it is kept.

    Returns:
        The outcomes and the faults of those that failed, both in the order of the points.
    """
    order = sorted(range(len(points)), key=lambda i: -_work(points[i]))
    done: dict[int, PointResult] = {}
    faults: dict[int, str] = {}
    context = multiprocessing.get_context("spawn")
    # Simulations run side by side; none of them shall spread over the cores.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # looked at when numpy is imported: by the workers
    with Steps(console, "simulations", len(points)) as steps, context.Pool(workers) as pool:
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


def _work(point: SimPoint) -> float:
    moves = point.policy in ("reschedule", "ares", "oracle")
    return point.duration_s * point.config.num_decode * (3.0 if moves else 1.0)


def _indexed(job: tuple[int, SimPoint]) -> tuple[int, PointResult | str]:
    """Run a point in a worker; a fault of one point does not end the others: it is returned."""
    try:
        return job[0], run_point(job[1])
    except QuadrigaError as exc:
        return job[0], exc.message
    except Exception:
        return job[0], traceback.format_exc()


def _named(point: SimPoint) -> dict[str, Any]:
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


def _raw(outcome: PointResult) -> dict[str, Any]:
    point = outcome.point
    return _named(point) | {
        "summary": figures(asdict(outcome.summary)),
        "grid": [[s.ttft_s, s.tpot_s] for s in point.grid],
        "grid_goodput": [for_json(v) for v in outcome.grid_goodput],
        "variance": outcome.series,
        "wall_s": round(outcome.wall_s, 3),
    }
