"""`python -m loadgen bench simulator`: the simulator against the cluster that it simulates.

One prefill and three decode replicas, paced as devices of their own, serve a heavy-tailed load,
and the simulator's costs are fitted from what that run shows. Then another load (other seed, other
rate) goes to the cluster and, at the times and with the lengths it really had, to the simulator,
with rescheduling off and on. Lengths are exact (end-of-sequence is ignored), so the scheduler knows
how long each answer becomes, and so does the simulator's: `oracle`, placing as the cluster does.

What the scheduler saw and ordered is recorded, and decided again by the simulator's policy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.bench.cluster.paced_cluster import (
    INTERVAL_S,
    KV_CAPACITY_TOKENS,
    POLICIES,
    MakeSpecs,
    Played,
    play,
    settings_of,
)
from loadgen.bench.cluster.simulator_fit import Costs, fit_costs, load_of, ttfts_of, with_ingress
from loadgen.bench.cluster.simulator_report import (
    MUST_AGREE,
    TABLE_WIDTH,
    LoadOutcome,
    figures,
    print_tables,
    ratios,
    raw,
    real_outcome,
    simulated_outcome,
    worst_deviation,
    write_plot,
)
from loadgen.load.arrivals import parse_arrivals
from loadgen.load.traces import Trace
from loadgen.load.workload import RequestSpec, from_trace
from loadgen.options import number, whole
from loadgen.report.experiment import drop_rows, keep_rows, print_line, say, wide_console
from loadgen.report.output import add_out_argument, file_to_write
from loadgen.simulation.loads import SimLoad
from loadgen.target import token_pool
from loadgen.wire.client_http import HttpClient
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.files import write_atomically
from quadriga.policies.ares.governor import settings_of as ares_settings
from quadriga.policies.ares.recording import read_ticks, replay
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import SimConfig
from quadriga.sim.policies import PolicySet, make_policy
from quadriga.sim.records import PAUSE
from quadriga.sim.results import SimulatedRun, latencies

SIMULATED = {
    "off": "least_work",
    "least-requests": "least_requests",
    "current-load": "current_load",
    "load": "reschedule",
    "ares": "oracle",
}
"""The simulator's name of a policy, where the scheduler knows the lengths."""
PACE = "ares-qwen7b-4090d-slow"
"""Steps of 60 ms: what the machine does besides must be little against them, or the second run
meets another machine than the one that was fitted."""
SETTINGS = (f"decode.pace={PACE}", "scheduler.ares.reference_step_s=0.065")
INPUT_TOKENS = (4, 16)
OUTPUT_MEDIAN_TOKENS, OUTPUT_LOG_SPREAD = 24.0, 0.9
OUTPUT_TOKENS = (12, 150)
"""Log-normal answers, cut: most are short, a tenth holds half of the KV memory's time."""


NUM_DRAWS = 8
"""Simulations of each real run: delays are drawn, and the tail of one draw is few requests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.set_defaults(slow=1)  # its own pace is slow already
    parser.add_argument("--model", default="quadriga-s", help="bundled id")
    parser.add_argument(
        "--policies", nargs="+", choices=SIMULATED, default=["off", "ares"], help="to compare"
    )
    parser.add_argument("--rounds", type=whole(1), default=1, help="runs of the second load each")
    parser.add_argument("--duration-s", type=number(0), default=45.0, help="arrivals of a run")
    parser.add_argument(
        "--rates",
        nargs=2,
        type=number(0),
        default=[3.0, 4.0],
        metavar=("FIT", "CHECK"),
        help="requests per second of the load that is fitted, and of the one that checks",
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="the second load has the next")
    parser.add_argument("--decode", type=whole(2, 16), default=3, help="decode replicas")
    parser.add_argument(
        "--tolerance", type=number(0), default=0.15, help="of throughput and TPOT percentiles"
    )
    parser.add_argument(
        "--record", type=file_to_write, metavar="FILE", help="keep the recorded decisions"
    )
    add_out_argument(parser, "results/bench")


def run(args: argparse.Namespace) -> int:
    """Measure, fit, check; 1: a figure or a decision is off, or none was recorded."""
    say(f"fitting: {args.rates[0]:g} requests/s, seed {args.seed}, ares")
    settings = [*settings_of(args, "ares", 1), *SETTINGS]
    config = load_config(dict(s.split("=", 1) for s in settings))
    fitted = play(args, "ares", make_specs(args, 0), more=SETTINGS, counts=True)
    costs = fit_run(args, config, fitted)
    outcomes: dict[str, tuple[list[LoadOutcome], list[LoadOutcome]]] = {
        p: ([], []) for p in args.policies
    }
    decisions = {"ticks": 0, "orders": 0, "different": 0, "unrecorded": 0}
    if args.record is not None:
        args.record.unlink(missing_ok=True)
        args.record.parent.mkdir(parents=True, exist_ok=True)
    for turn in range(args.rounds):
        for policy in args.policies if turn % 2 == 0 else reversed(args.policies):
            say(f"checking, round {turn + 1}, {policy}: {args.rates[1]:g} requests/s")
            played = _recorded(args, policy, decisions)
            real, simulated = outcomes[policy]
            real.append(real_outcome(played, costs.profile.step))
            load = load_of(played)
            for seed in range(NUM_DRAWS):
                done = simulate(args, policy, config, costs, load, seed=NUM_DRAWS * turn + seed)
                simulated.append(simulated_outcome(done, load, costs))
            keep_rows("simulator", [raw(costs, outcomes)], args.out)
    return _report(args, costs, outcomes, decisions)


def make_specs(args: argparse.Namespace, which: int) -> MakeSpecs:
    """Return the maker of the first or the second load."""
    seed, rate = args.seed + which, args.rates[which]
    trace = heavy_tailed(max(1, round(rate * args.duration_s)), seed=seed)

    async def make(client: HttpClient) -> list[RequestSpec]:
        pool = await token_pool(client, args.model)
        return from_trace(trace, parse_arrivals(f"poisson:{rate!r}"), token_ids=pool, seed=seed)

    return make


def heavy_tailed(num_requests: int, *, seed: int) -> Trace:
    """Short prompts, and answers whose lengths are log-normal between two limits."""
    rng = np.random.default_rng([seed, 0x7A11])
    inputs = rng.integers(INPUT_TOKENS[0], INPUT_TOKENS[1], num_requests, endpoint=True)
    drawn = OUTPUT_MEDIAN_TOKENS * np.exp(OUTPUT_LOG_SPREAD * rng.standard_normal(num_requests))
    outputs = np.clip(np.rint(drawn), *OUTPUT_TOKENS).astype(np.int64)
    return Trace("heavy-tailed", None, inputs, outputs)


def fit_run(args: argparse.Namespace, config: QuadrigaConfig, played: Played) -> Costs:
    """Fit everything from one run under `ares`."""
    checkpoint = read_checkpoint(args.model)
    load = load_of(played)
    costs = fit_costs(
        played,
        kv_bytes_per_token=checkpoint.kv_bytes_per_token(checkpoint.num_layers, 4),
        prefill_budget_tokens=resolve(config, Hardware(1)).replicas[0].engine.pass_tokens,
        max_tokens=int(load.output_tokens.max()),
    )
    bare = simulate(args, "ares", config, costs, load, seed=0)
    ttft, _ = latencies(bare, load.arrivals_s, load.output_tokens)
    return with_ingress(costs, ttfts_of(played), ttft)


def simulate(
    args: argparse.Namespace,
    policy: str,
    config: QuadrigaConfig,
    costs: Costs,
    load: SimLoad,
    *,
    seed: int,
) -> SimulatedRun:
    """Give a load to the simulated cluster."""
    simulated = SimConfig(
        profile=costs.profile,
        num_decode=args.decode,
        num_prefill=1,
        seed=seed,
        memory=PAUSE,
        tick_s=INTERVAL_S,
        report_every_s=INTERVAL_S,
        reference_step_s=config.scheduler.ares.reference_step_s,
        learns_link=True,
        delays=costs.delays,
    )
    made = policy_of(policy, config)
    return Simulation(simulated, made, load.arrivals_s, load.input_tokens, load.output_tokens).run()


def policy_of(policy: str, config: QuadrigaConfig) -> PolicySet:
    """The simulator's form of a policy of the cluster: same constants, same placement."""
    settings = ares_settings(config.scheduler)
    made = make_policy(SIMULATED[policy], settings, reservation=config.decode.reservation)
    return replace(made, places_ahead=False)


def _recorded(args: argparse.Namespace, policy: str, decisions: dict[str, int]) -> Played:
    """Play the second load; what was decided meanwhile is decided again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ticks.jsonl"
        more = [*SETTINGS, f"scheduler.ares.record_file={path}"]
        played = play(args, policy, make_specs(args, 1), more=more, counts=True)
        ticks = list(read_ticks(path)) if path.exists() else []
        decisions["ticks"] += len(ticks)
        decisions["orders"] += sum(len(t.orders) for t in ticks)
        decisions["different"] += len(replay(ticks))
        decisions["unrecorded"] += policy == "ares" and not ticks
        if args.record is not None and ticks:
            with args.record.open("ab") as kept:
                kept.write(path.read_bytes())
    return played


def _report(
    args: argparse.Namespace,
    costs: Costs,
    outcomes: dict[str, tuple[list[LoadOutcome], list[LoadOutcome]]],
    decisions: dict[str, int],
) -> int:
    results: dict[str, dict[str, Any]] = {}
    for policy, (real, simulated) in outcomes.items():
        pair = figures(real), figures(simulated)
        results[policy] = {"real": pair[0], "simulated": pair[1], "ratio": ratios(*pair)}
    worst = {policy: round(worst_deviation(r["ratio"]), 4) for policy, r in results.items()}
    print_tables(wide_console(TABLE_WIDTH), results, costs)
    print(
        f"{decisions['ticks']} recorded decisions with {decisions['orders']} orders; "
        f"decided again, {decisions['different']} differ; {decisions['unrecorded']} runs had none"
    )
    is_within = all(value <= args.tolerance for value in worst.values())
    print_line(
        "bench simulator",
        headline={
            "is_within_tolerance": is_within,
            "worst_deviation": worst,
            "of": MUST_AGREE,
            "different_decisions": decisions["different"],
            "decisions": decisions["ticks"],
            "orders": decisions["orders"],
            "fitted_step_over_real": {
                policy: round(float(np.mean([o.fitted_step for o in real])), 4)
                for policy, (real, _) in outcomes.items()
            },
        },
        results=results,
        config={
            "model": args.model,
            "rates": args.rates,
            "seed": args.seed,
            "rounds": args.rounds,
            "duration_s": args.duration_s,
            "decode": args.decode,
            "pace": PACE,
            "kv_capacity_tokens": KV_CAPACITY_TOKENS,
            "interval_s": INTERVAL_S,
            "policies": {p: POLICIES[p] for p in args.policies},
            "tolerance": args.tolerance,
        },
    )
    whole = json.dumps(raw(costs, outcomes), allow_nan=False) + "\n"
    write_atomically(args.out / "simulator.json", whole.encode())
    drop_rows("simulator", args.out)
    write_plot(args.out / "simulator.png", outcomes)
    return 0 if is_within and not decisions["different"] and not decisions["unrecorded"] else 1
