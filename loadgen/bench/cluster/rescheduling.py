"""`python -m loadgen bench rescheduling`: a real cluster with and without rescheduling.

One prefill and three decode replicas, paced as devices of their own, memory promised as it is
used, and answers of very different lengths that are not known beforehand: task prompts that the
model ends by itself. The same requests at the same times go to each policy in turn, to a service
started anew; every response is checked, and the answers of all runs are compared.

    off             placement by least work, nothing moves
    least-requests  placement by least requests, nothing moves
    current-load    placement by current load, nothing moves: ARES's baseline
    load            the same, and moves by the present load
    ares            placement by least work, and moves by the forecast of the length heads
    ares-placement  placement by the forecast too, after the prompt is computed

Source: ARES §6.2 and §6.5 (goodput, P99 TPOT, variance of step times between replicas).
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from loadgen.bench.cluster.paced_cluster import (
    INTERVAL_S,
    KV_CAPACITY_TOKENS,
    MAX_TOKENS,
    POLICIES,
    add_cluster_arguments,
    pace_of,
    play,
    settings_of,
    slo_of,
)
from loadgen.bench.cluster.rescheduling_report import (
    PolicyRun,
    count_differences,
    decoding,
    figures,
    headline,
    print_table,
    raw,
    step_variances,
)
from loadgen.checker import Outcome
from loadgen.load.arrivals import parse_arrivals
from loadgen.load.workload import RequestSpec, from_tasks
from loadgen.options import number, whole
from loadgen.report.experiment import drop_rows, keep_rows, print_line, say
from loadgen.report.metrics import summarise, tpot_s
from loadgen.runner import RunResult
from loadgen.wire.client_http import HttpClient
from quadriga.files import write_atomically

__all__ = ["POLICIES", "add_arguments", "make_specs", "run", "settings_of"]

TASKS = "repeat,story,count,copy"
LONG_TOKENS = 20
"""TPOT of shorter answers is mostly the hand-over from prefill; the tail without them is shown
beside."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_cluster_arguments(parser)
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=["off", "least-requests", "ares"],
        help="to compare; the last one with the first",
    )
    parser.add_argument("--rounds", type=whole(1), default=2, help="runs of each policy, in turns")
    parser.add_argument("--duration-s", type=number(0), default=60.0, help="arrivals of a run")
    parser.add_argument("--rate", type=number(0), default=6.0, help="requests per second, Poisson")


def run(args: argparse.Namespace) -> int:
    """Measure; 1 when a response failed its check or runs gave different answers."""
    specs = make_specs(args)
    order = [
        policy
        for turn in range(args.rounds)
        for policy in (args.policies if turn % 2 == 0 else reversed(args.policies))
    ]
    runs: list[PolicyRun] = []
    for turn, policy in enumerate(order):
        runs.append(_measure(args, policy, specs, turn))
        keep_rows("rescheduling", [raw(r) for r in runs], args.out)
    different = count_differences(runs)
    by_run = [count_differences([runs[0], other]) for other in runs]
    results = {policy: figures([r for r in runs if r.policy == policy]) for policy in args.policies}
    print_table(results, different)
    failed = sum(result["failed"] + result["refused"] for result in results.values())
    print_line(
        "bench rescheduling",
        headline=headline(results, args.policies) | {"different_answers": different},
        results=results,
        different_from_first_run=by_run,
        config={
            "model": args.model,
            "rate": args.rate,
            "requests": len(specs),
            "seed": args.seed,
            "decode": args.decode,
            "pace": pace_of(args),
            "kv_capacity_tokens": KV_CAPACITY_TOKENS,
            "tasks": TASKS,
            "interval_s": INTERVAL_S,
            "rounds": args.rounds,
        },
    )
    whole = json.dumps([raw(r) for r in runs]) + "\n"
    write_atomically(args.out / "rescheduling.json", whole.encode())
    drop_rows("rescheduling", args.out)
    return 1 if failed or different else 0


def make_specs(args: argparse.Namespace) -> list[RequestSpec]:
    """Return the requests, the same for every run."""
    count = max(1, round(args.rate * args.duration_s))
    arrivals = parse_arrivals(f"poisson:{args.rate / args.slow!r}")
    return from_tasks(count, arrivals, seed=args.seed, max_tokens=MAX_TOKENS, tasks=TASKS)


def _measure(
    args: argparse.Namespace, policy: str, specs: list[RequestSpec], turn: int
) -> PolicyRun:
    """One run against a service of its own.

    Raises:
        ConfigError: The service did not start.
    """

    async def same(client: HttpClient) -> list[RequestSpec]:
        return specs

    say(f"run {turn + 1}, {policy}: {len(specs)} requests to a service started for it")
    played = play(args, policy, same)
    done = _run_of(args, policy, played.result, played.views)
    say(f"run {turn + 1}, {policy}: P99 TPOT {1e3 * (done.summary.tpot.p99 or 0.0):.1f} ms")
    return done


def _run_of(
    args: argparse.Namespace, policy: str, result: RunResult, samples: list[dict[str, Any]]
) -> PolicyRun:
    passed = [r for r in result.records if r.verdict.outcome is Outcome.OK]
    tpots = [(r, value) for r in passed if (value := tpot_s(r)) is not None]
    return PolicyRun(
        policy=policy,
        summary=summarise(result, slo_of(args)),
        tpot_s=[value for _, value in tpots],
        long_tpot_s=[v for r, v in tpots if r.verdict.choices[0].num_tokens >= LONG_TOKENS],
        step_variance_ms2=step_variances(samples),
        texts={r.spec.index: r.verdict.choices[0].text for r in passed},
        view=samples[-1],
        num_paused=max(
            (sum(r["num_paused"] for r in decoding(sample)) for sample in samples), default=0
        ),
    )
