"""`python -m loadgen simulate`: any trace on a simulated cluster, under the cluster's own policies.

The figures are figures of a model (see `quadriga.sim`): admission, queues, placement, moves and
preemption are the code that runs on the cluster; step, prefill and transfer times come from a cost
profile.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadgen import provenance
from loadgen.load.arrivals import FORMS
from loadgen.load.lengths import WORKLOADS
from loadgen.load.traces import read_trace
from loadgen.options import number, number_from, whole
from loadgen.sim_plots import write_run_plot
from loadgen.simulated import SimLoad, run_policy, standard_slo, summary_of, synthetic_load
from loadgen.simulated import trace_load as load_of_trace
from quadriga.errors import ConfigError
from quadriga.sim.config import Failure, SimConfig
from quadriga.sim.policies import POLICY_NAMES
from quadriga.sim.profiles import PROFILES, find_profile
from quadriga.sim.recorder import Recorder
from quadriga.sim.records import MEMORY_RULES
from quadriga.sim.results import Run, Slo, Summary

_GBIT = 1e9 / 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    load = parser.add_argument_group("load")
    source = load.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, help="CSV(.gz) of [arrival_s,]input_tokens,output_tokens"
    )
    source.add_argument("--lengths", choices=sorted(WORKLOADS), help="lengths made up after ARES")
    load.add_argument("--arrivals", help=f"{FORMS}; default: trace, or poisson:0.15 for --lengths")
    load.add_argument("--limit", type=whole(1), help="use the first N rows of the trace")
    load.add_argument(
        "--duration-s", type=number(0), default=2000.0, help="of arrivals, for --lengths"
    )
    load.add_argument("--scale", type=number(0), default=1.0, help="factor of the arrival rate")
    load.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument(
        "--policy",
        choices=POLICY_NAMES,
        default="ares",
        help="placement and moves; oracle: ares that knows the lengths",
    )
    cluster.add_argument("--decode", type=whole(1, 4096), default=3, help="decode replicas")
    cluster.add_argument("--prefill", type=whole(1, 4096), default=1, help="prefill replicas")
    cluster.add_argument(
        "--profile",
        choices=sorted(PROFILES),
        default="rtx4090d-7b",
        help="cost profile: device and model",
    )
    cluster.add_argument(
        "--on-full",
        choices=sorted(MEMORY_RULES),
        default="recompute",
        help="what becomes of sequences when KV memory is full",
    )
    cluster.add_argument(
        "--bandwidth-gbit", type=number(0), help="between replicas, Gbit/s; default: the profile's"
    )
    cluster.add_argument(
        "--report-every-s",
        type=number_from(0, 1e9),
        default=0.0,
        help="age of what placement by current load looks at; 0: the present",
    )
    cluster.add_argument(
        "--stop-and-copy", action="store_true", help="migrate without pre-copy, as ARES does"
    )
    cluster.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="AT_S:REPLICA:DOWN_S",
        type=parse_failure,
        help="a decode replica is away for DOWN_S seconds; may be repeated",
    )
    judge = parser.add_argument_group("judgement and output")
    judge.add_argument("--slo-ttft-s", type=number(0), help="limit of TTFT; default: 5")
    judge.add_argument(
        "--slo-tpot-s",
        type=number(0),
        help="limit of TPOT; default: 1.5 steps at 50 %% of the KV memory",
    )
    judge.add_argument(
        "--warm-up-s", type=number_from(0, 1e9), default=0.0, help="arrivals not counted"
    )
    judge.add_argument("--record", type=Path, help="write every scheduling decision, for replays")
    judge.add_argument(
        "--out",
        type=Path,
        default=Path("results/simulate"),
        metavar="DIR",
        help="folder for figures",
    )
    judge.add_argument("--no-plots", action="store_true", help="write figures only")
    judge.add_argument("--no-progress", action="store_true", help="show no progress bar")


def run(args: argparse.Namespace) -> int:
    """Simulate; prints a table and one JSON line, writes requests and a plot."""
    load = _load(args)
    config = SimConfig(
        profile=find_profile(args.profile),
        num_decode=args.decode,
        num_prefill=args.prefill,
        seed=args.seed,
        bandwidth_bytes_per_s=args.bandwidth_gbit and args.bandwidth_gbit * _GBIT,
        memory=MEMORY_RULES[args.on_full],
        precopy=not args.stop_and_copy,
        report_every_s=max(0.0, args.report_every_s),
        failures=tuple(args.fail),
    )
    standard = standard_slo(config)
    slo = Slo(args.slo_ttft_s or standard.ttft_s, args.slo_tpot_s or standard.tpot_s)
    console = Console()
    started_s = time.perf_counter()
    result = _simulate(args, load, config, console)
    wall_s = time.perf_counter() - started_s
    summary = summary_of(result, load, slo, from_s=args.warm_up_s)
    _print(console, args, load, slo, summary, result, wall_s)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"{load.name}-{args.policy}-{args.decode}d"
    (args.out / f"{stem}.json").write_text(json.dumps(_raw(load, result)), encoding="utf-8")
    if not args.no_plots:
        write_run_plot(args.out / f"{stem}.png", result, load, slo, f"{load.name}, {args.policy}")
    line = {
        "experiment": "simulate",
        "headline": {
            "wall_s": round(wall_s, 3),
            "goodput": _rounded(summary.goodput),
            "p99_tpot_s": _rounded(summary.tpot_p99_s),
        },
        "summary": {k: _rounded(v) for k, v in asdict(summary).items()},
        "config": {
            "load": load.name, "rate": _rounded(load.rate), "requests": len(load),
            "policy": args.policy, "decode": args.decode, "prefill": args.prefill,
            "profile": args.profile, "on_full": args.on_full, "scale": args.scale,
            "seed": args.seed, "slo_ttft_s": slo.ttft_s, "slo_tpot_s": _rounded(slo.tpot_s),
        },
        "commit": provenance.commit(),
        "machine": provenance.machine(),
    }  # fmt: skip
    print(json.dumps(line))
    return 0


def parse_failure(text: str) -> Failure:
    """An argparse type: AT_S:REPLICA:DOWN_S."""
    try:
        at_s, replica, down_s = text.split(":")
        failure = Failure(float(at_s), int(replica), float(down_s))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not AT_S:REPLICA:DOWN_S") from None
    if not (0 <= failure.at_s < math.inf and 0 < failure.down_s < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: times must be finite and not negative")
    return failure


def _load(args: argparse.Namespace) -> SimLoad:
    if args.trace is not None:
        trace = read_trace(args.trace, limit=args.limit)
        arrivals = args.arrivals or "trace"
        return load_of_trace(trace, arrivals=arrivals, scale=args.scale, seed=args.seed)
    process, _, rate = (args.arrivals or "poisson:0.15").partition(":")
    if process != "poisson":
        raise ConfigError("--arrivals: made-up lengths arrive by poisson:RATE", param="arrivals")
    try:
        per_s = float(rate)
    except ValueError:
        raise ConfigError(f"--arrivals: {rate!r} is not a rate", param="arrivals") from None
    if not 0.0 < per_s < 1e6:
        raise ConfigError(f"--arrivals: {rate!r} must lie in 0..1e6", param="arrivals")
    return synthetic_load(
        args.lengths, rate=per_s * args.scale, duration_s=args.duration_s, seed=args.seed
    )


def _simulate(args: argparse.Namespace, load: SimLoad, config: SimConfig, console: Console) -> Run:
    recorder = None
    if args.record is not None:
        recorder = Recorder(args.record, config, args.policy)
    shows = console.is_terminal and not args.no_progress
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[at]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not shows,
    )
    try:
        with progress:
            task = progress.add_task("requests", total=len(load), at="")

            def on_tick(now_s: float, num_open: int) -> None:
                progress.update(task, completed=len(load) - num_open, at=f"{now_s:,.0f} s")

            return run_policy(
                args.policy,
                load,
                config,
                on_tick=on_tick if shows else None,
                on_decision=None if recorder is None else recorder.decided,
            )
    finally:
        if recorder is not None:
            recorder.close()


def _print(
    console: Console,
    args: argparse.Namespace,
    load: SimLoad,
    slo: Slo,
    summary: Summary,
    result: Run,
    wall_s: float,
) -> None:
    table = Table(
        title=f"{load.name}: {len(load):,} requests at {load.rate:.3g}/s under {args.policy}, "
        f"{args.prefill} + {args.decode} × {args.profile} (simulated)"
    )
    table.add_column("")
    table.add_column("value", justify="right")
    rows = (
        ("goodput", f"{summary.goodput:.4f} requests/s"),
        ("SLO", f"TTFT ≤ {slo.ttft_s:g} s, TPOT ≤ {1e3 * slo.tpot_s:.1f} ms"),
        ("throughput", f"{summary.throughput:.4f} requests/s"),
        ("", f"{summary.tokens_per_s:,.0f} tokens/s"),
        ("TTFT P99", f"{summary.ttft_p99_s:.2f} s"),
        ("TPOT mean / P50 / P99", " / ".join(
            f"{1e3 * v:.2f}" for v in (summary.tpot_mean_s, summary.tpot_p50_s, summary.tpot_p99_s)
        ) + " ms"),
        ("inter-token gap P99", f"{1e3 * summary.gap_p99_s:.2f} ms"),
        ("variance of step times", f"{summary.variance_ms2:.3f} ms²"),
        ("fullest memory", f"{summary.most_used:.0%}"),
        ("out of memory", f"{summary.num_full} preemptions"),
        ("migrations", f"{summary.num_migrations}, given up {result.num_cancelled}, "
         f"stall P99 {1e3 * summary.stall_p99_s:.1f} ms"),
        ("failed", f"{summary.num_failed} of {summary.num_requests}"),
        ("simulated / wall", f"{result.end_s:,.0f} s / {wall_s:.1f} s"),
    )  # fmt: skip
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _raw(load: SimLoad, result: Run) -> dict[str, Any]:
    """Per-request times, and the samples: all that the figures derive from."""

    def column(values: Any) -> list[float | None]:
        return [None if math.isnan(v) else round(v, 6) for v in values.tolist()]

    return {
        "arrival_s": column(load.arrivals_s),
        "input_tokens": load.input_tokens.tolist(),
        "output_tokens": load.output_tokens.tolist(),
        "first_token_s": column(result.first_token_s),
        "finished_s": column(result.finished_s),
        "preempted": result.preempted.tolist(),
        "failures": result.failures,
        "samples": [asdict(s) for s in result.samples],
        "migrations": [asdict(m) for m in result.migrations],
    }


def _rounded(value: float) -> float | None:
    if isinstance(value, int):
        return value
    return None if math.isnan(value) else float(f"{value:.6g}")
