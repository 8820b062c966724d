"""`python -m loadgen bench scheduler`: how long one rescheduling decision takes.

From packed snapshots, as replicas report them, to migration orders: unpacking, classification,
filter, selection of every move of the tick. Predictions are on; at least 30 % of the replicas are
overloaded. One thread, as in the scheduler's process.

Source: ARES §6.4 reports under 300 ms for 256 replicas.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass

import numpy as np

from loadgen.options import whole
from loadgen.report.experiment import print_line, show
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.policies.ares.cluster import classify, unpack, weights
from quadriga.policies.ares.forecast import RUNS, StepCosts, forecast_rows, pack
from quadriga.policies.ares.rescheduler import Rescheduler
from quadriga.policies.ares.settings import AresSettings, TransferCosts, horizon_s

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
WARM_UP = 3

_STEP_S, _BASE_S, _PER_TOKEN_S = 18e-3, 10e-3, 73e-9
_CAPACITY_TOKENS = 1_000_000
_COSTS = TransferCosts(bytes_per_token=57_344, bandwidth_bytes_per_s=25e9 / 8)
_CLASS = DepthClass("bench", 28)


@dataclass(frozen=True, slots=True)
class Timed:
    """One cluster size.

    Attributes:
        median_ms, p99_ms: Of a whole tick, wall time.
        median_cpu_ms: Its processor time: what a busy machine's wall time would be on a quiet one.
        overloaded: Share of the replicas that may give.
        num_moves: Orders of one tick, mean.
    """

    replicas: int
    sequences: int
    median_ms: float
    p99_ms: float
    median_cpu_ms: float
    overloaded: float
    underloaded: float
    num_moves: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--replicas", nargs="+", type=whole(2, 16_384), default=list(SIZES), help="of the clusters"
    )
    parser.add_argument("--sequences", type=whole(1, 4096), default=64, help="on each replica")
    parser.add_argument("--repeats", type=whole(1), default=50, help="ticks timed at each size")
    parser.add_argument("--clusters", type=whole(1), default=5, help="random clusters at each size")
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything random")


def run(args: argparse.Namespace) -> int:
    """Time every size; prints a table and one JSON line."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # looked at when numpy is imported: by the child
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        timed = pool.starmap(_measure, [(n, args) for n in args.replicas])
    show(
        timed,
        {
            "replicas": lambda t: t.replicas,
            "median ms": lambda t: f"{t.median_ms:.2f}",
            "P99 ms": lambda t: f"{t.p99_ms:.2f}",
            "CPU ms": lambda t: f"{t.median_cpu_ms:.2f}",
            "overloaded": lambda t: f"{t.overloaded:.0%}",
            "underloaded": lambda t: f"{t.underloaded:.0%}",
            "moves": lambda t: f"{t.num_moves:.0f}",
        },
        title=f"one rescheduling tick, {args.sequences} sequences a replica",
    )
    medians = {t.replicas: round(t.median_ms, 3) for t in timed}
    cpu = {t.replicas: round(t.median_cpu_ms, 3) for t in timed}
    print_line(
        "bench scheduler",
        headline={"ms_256": medians.get(256), "ms_1024": medians.get(1024)},
        cpu={"ms_256": cpu.get(256), "ms_1024": cpu.get(1024)},
        sizes=[asdict(t) for t in timed],
        packages=("numpy",),
    )
    return 0


def _measure(num_replicas: int, args: argparse.Namespace) -> Timed:
    rescheduler = Rescheduler()
    times_s: list[float] = []
    cpu_s: list[float] = []
    orders, over, under = 0, 0.0, 0.0
    for index in range(args.clusters):
        rng = np.random.default_rng([args.seed, num_replicas, index])
        snapshots = random_snapshots(rng, num_replicas, args.sequences)
        shares = _roles(snapshots, rescheduler.settings)
        over, under = over + shares[0] / args.clusters, under + shares[1] / args.clusters
        repeats = math.ceil(args.repeats / args.clusters)
        for repeat in range(-WARM_UP, repeats):
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            found = rescheduler.tick(snapshots, _COSTS)
            if repeat >= 0:
                times_s.append(time.perf_counter() - started_s)
                cpu_s.append(time.process_time() - started_cpu_s)
        orders += len(found)
    return Timed(
        replicas=num_replicas,
        sequences=args.sequences,
        median_ms=1e3 * float(np.median(times_s)),
        p99_ms=1e3 * float(np.percentile(times_s, 99)),
        median_cpu_ms=1e3 * float(np.median(cpu_s)),
        overloaded=over,
        underloaded=under,
        num_moves=orders / args.clusters,
    )


def random_snapshots(
    rng: np.random.Generator, num_replicas: int, num_sequences: int
) -> list[ReplicaSnapshot]:
    """Packed snapshots of a cluster of which at least 30 % is overloaded."""
    is_heavy = rng.permutation(num_replicas) < math.ceil(0.32 * num_replicas)
    return [_snapshot(rng, i, num_sequences, bool(h)) for i, h in enumerate(is_heavy)]


def _snapshot(
    rng: np.random.Generator, index: int, num_sequences: int, is_heavy: bool
) -> ReplicaSnapshot:
    """Heavy replicas hold 3 times the tokens of the others, spread by ± 10 %; any length left."""
    mean = (3000.0 if is_heavy else 1000.0) * rng.uniform(0.9, 1.1)
    tokens = np.rint(rng.uniform(0.05, 1.95, num_sequences) * mean) + 1.0
    remaining = np.rint(rng.pareto(1.2, num_sequences) * 2000.0 + 20.0).clip(max=32_768.0)
    grid_s = horizon_s(_STEP_S)
    step_s = _BASE_S + _PER_TOKEN_S * float(tokens.sum())
    rows = forecast_rows(
        tokens=tokens,
        remaining=remaining,
        lower=0.6 * remaining,
        upper=1.6 * remaining,
        moves=np.zeros(num_sequences),
        since_move_s=np.full(num_sequences, np.inf),
        movable=np.full(num_sequences, RUNS),
    )
    name = f"decode-{index:05}"
    return ReplicaSnapshot(
        info=ReplicaInfo(name, Role.DECODE, _CLASS, "", name, 2 * num_sequences, _CAPACITY_TOKENS),
        taken_unix_s=0.0,
        num_running=num_sequences,
        used_tokens=int(tokens.sum()),
        reserved_tokens=int(tokens.sum()),
        step_time_s=step_s,
        forecast=pack(
            rows,
            [f"{name}-{i}" for i in range(num_sequences)],
            grid_s=grid_s,
            step_s=step_s,
            base_s=_BASE_S,
            costs=StepCosts(0.0, _PER_TOKEN_S),
        ),
    )


def _roles(snapshots: list[ReplicaSnapshot], settings: AresSettings) -> tuple[float, float]:
    """Shares of replicas that are overloaded and underloaded."""
    cluster = unpack(snapshots)
    if cluster is None:
        return 0.0, 0.0
    roles = classify(cluster, settings, weights(settings, load_only=False), frozenset())
    return len(roles.sources) / len(cluster), len(roles.destinations) / len(cluster)
