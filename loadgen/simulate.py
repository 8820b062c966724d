"""`python -m loadgen simulate`: any trace on a simulated cluster, under the cluster's own policies.

The figures are figures of a model (see `quadriga.sim`): admission, queues, placement, moves and
preemption are the code that runs on the cluster; step, prefill and transfer times come from a cost
profile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.load.arrivals import FORMS, parse_arrivals
from loadgen.load.lengths import WORKLOADS
from loadgen.load.traces import MAX_ROWS, read_trace
from loadgen.options import number, number_from, whole
from loadgen.report.experiment import REPORT_WIDTH, print_line, wide_console
from loadgen.report.figures import figures, for_json
from loadgen.report.output import add_out_argument, file_to_write
from loadgen.simulation import report
from loadgen.simulation.capacity import MIN_REQUESTS, Probe, find_capacity, is_hopeless
from loadgen.simulation.loads import (
    MAX_SPAN_S,
    SimLoad,
    make_simulation,
    standard_slo,
    summary_of,
    synthetic_load,
)
from loadgen.simulation.loads import trace_load as load_of_trace
from loadgen.simulation.plots import write_run_plot
from loadgen.simulation.report import COMPLETE, SimOutcome
from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from quadriga.sim.config import Failure, SimConfig, SimExits
from quadriga.sim.policies import POLICY_NAMES, make_policy
from quadriga.sim.profiles import PROFILES, find_profile
from quadriga.sim.recorder import Recorder
from quadriga.sim.records import MEMORY_RULES
from quadriga.sim.results import UNFINISHED, Slo

DEFAULT_DURATION_S = 2000.0
DEFAULT_SHARE = 0.99
DEFAULT_STAYS = 0.07
MAX_TIME_S = 1e8
MIN_BANDWIDTH_GBIT = 1e-3
_GBIT = 1e9 / 8
_NOT_RECORDED = {"trace", "lengths", "record", "out", "no_plots", "no_progress"}
_MAX_NAME_CHARS = 80
_EXAMPLES = """examples:
  python -m loadgen simulate --trace azure.csv.gz --policy current_load ares --decode 6
  python -m loadgen simulate --lengths sharegpt --arrivals poisson:0.17
  python -m loadgen simulate --trace azure.csv.gz --find-capacity"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EXAMPLES
    load = parser.add_argument_group("load")
    source = load.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV, plain or gzip, of [arrival_s,]input_tokens,output_tokens",
    )
    source.add_argument("--lengths", choices=sorted(WORKLOADS), help="lengths made up after ARES")
    load.add_argument("--arrivals", help=f"{FORMS}; default: trace, or poisson:0.15 for --lengths")
    load.add_argument("--limit", type=whole(1), help="use the first N rows of the --trace")
    load.add_argument(
        "--duration-s",
        type=number(0),
        help=f"of arrivals, for --lengths; default: {DEFAULT_DURATION_S:g}",
    )
    load.add_argument("--scale", type=number(0), default=1.0, help="factor of the arrival rate")
    load.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument(
        "--policy",
        nargs="+",
        choices=POLICY_NAMES,
        default=["ares"],
        help="placement and moves, one run each; oracle: ares that knows the lengths",
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
        default="pause",
        help="what becomes of sequences when KV memory is full; a service pauses them",
    )
    cluster.add_argument(
        "--bandwidth-gbit",
        type=number_from(MIN_BANDWIDTH_GBIT, 1e9),
        help="between replicas, Gbit/s; default: the profile's",
    )
    cluster.add_argument(
        "--report-every-s",
        type=number_from(0, 1e9),
        default=0.0,
        help="age of what placement without forecasts looks at; 0: the present",
    )
    cluster.add_argument(
        "--stop-and-copy", action="store_true", help="migrate without pre-copy, as ARES does"
    )
    cluster.add_argument(
        "--depths",
        type=whole(1),
        nargs="+",
        default=[],
        metavar="LAYERS",
        help="layers of each decode replica; a step takes its share of the deepest's",
    )
    cluster.add_argument(
        "--strict-share",
        type=number_from(0.0, 1.0),
        default=0.0,
        help="requests that need the deepest",
    )
    cluster.add_argument(
        "--lock-step",
        action="store_true",
        help="decode replicas step together, each step as long as the slowest one's, as ranks of "
        "data-parallel attention do",
    )
    cluster.add_argument(
        "--front",
        type=number_from(0.01, 0.99),
        metavar="SHARE",
        help="tokens may leave early, after this share of the layers",
    )
    cluster.add_argument(
        "--stays",
        type=number_from(0.003, 0.997),
        help="of the tokens that reach that exit, those that go on; with --front; default: "
        f"{DEFAULT_STAYS:g}",
    )
    cluster.add_argument(
        "--full-depth-share",
        type=number_from(0.0, 1.0),
        default=0.0,
        help="requests whose tokens may not leave early; with --front",
    )
    cluster.add_argument(
        "--quality-budget",
        type=number_from(0.0, 1.0),
        default=0.0,
        help="of a request's tokens, those that may leave below their threshold while memory is "
        "nearly full; with --front",
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
    judge.add_argument(
        "--find-capacity",
        nargs="?",
        type=number(0, 1),
        const=DEFAULT_SHARE,
        metavar="SHARE",
        help="instead of one run, search the largest rate at which this share of the requests is "
        f"good; {DEFAULT_SHARE:g} where none is given",
    )
    judge.add_argument(
        "--record",
        type=file_to_write,
        metavar="FILE",
        help="write every scheduling decision, for replays",
    )
    add_out_argument(parser, "results/simulate")
    judge.add_argument("--no-plots", action="store_true", help="write figures only")
    judge.add_argument("--no-progress", action="store_true", help="show no progress bar")


def run(args: argparse.Namespace) -> int:
    """Simulate under each policy: a table, one JSON line a run, raw figures and a plot.

    What a run had when it was broken off is written down, too.
    """
    _check(args)
    args.stays = DEFAULT_STAYS if args.stays is None else args.stays
    simulations = _Simulations(args)
    return simulations.find_capacity() if args.find_capacity is not None else simulations.run()


def _exits(args: argparse.Namespace) -> SimExits | None:
    if args.front is None:
        return None
    return SimExits(
        args.front, args.stays, full_share=args.full_depth_share, quality_budget=args.quality_budget
    )


def parse_failure(text: str) -> Failure:
    """An argparse type: AT_S:REPLICA:DOWN_S."""
    try:
        at_s, replica, down_s = text.split(":")
        failure = Failure(float(at_s), int(replica), float(down_s))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not AT_S:REPLICA:DOWN_S") from None
    if not (0 <= failure.at_s <= MAX_TIME_S and 0 < failure.down_s <= MAX_TIME_S):
        raise argparse.ArgumentTypeError(
            f"{text!r}: times of AT_S:REPLICA:DOWN_S must lie in 0..{MAX_TIME_S:g} s"
        )
    return failure


def _check(args: argparse.Namespace) -> None:
    """Raises: ConfigError for an option that would be ignored, or that contradicts another."""
    source = "trace" if args.trace is not None else "lengths"
    for name, wanted in (("limit", "trace"), ("duration_s", "lengths")):
        if source != wanted and getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option}: not for --{source}, but for --{wanted}; leave it out", param=option
            )
    for name in ("stays", "full_depth_share", "quality_budget", "strict_share"):
        needed = "depths" if name == "strict_share" else "front"
        if getattr(args, name) and not getattr(args, needed):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: goes with --{needed}; leave it out", param=option)
    if args.record is None:
        return
    if len(set(args.policy)) > 1 or args.find_capacity is not None:
        raise ConfigError(
            "--record: takes the decisions of one run; give one --policy and no --find-capacity",
            param="record",
        )
    if make_policy(args.policy[0]).rescheduler is None:
        raise ConfigError(
            f"--record: {args.policy[0]} moves nothing, so there are no decisions to record; use "
            "reschedule, ares or oracle",
            param="record",
        )
    if args.depths:
        raise ConfigError("--record: not with --depths, which a recording lacks", param="record")


def _load(args: argparse.Namespace, factor: float) -> SimLoad:
    """The load of the options, `factor` times as fast."""
    if args.trace is not None:
        trace = read_trace(args.trace, limit=args.limit)
        arrivals = args.arrivals or "trace"
        return load_of_trace(trace, arrivals=arrivals, scale=args.scale * factor, seed=args.seed)
    duration_s, rate = args.duration_s or DEFAULT_DURATION_S, _rate_given(args) * factor
    return synthetic_load(args.lengths, rate=rate, duration_s=duration_s, seed=args.seed)


def _rate_given(args: argparse.Namespace) -> float:
    """The rate at which made-up lengths arrive."""
    arrivals = parse_arrivals(args.arrivals or "poisson:0.15")
    if arrivals.process != "poisson":
        raise ConfigError("--arrivals: made-up lengths arrive by poisson:RATE", param="arrivals")
    return arrivals.rate * float(args.scale)


class _Simulations:
    """The runs of one command: its load and its cluster, under each policy.

    Raises:
        ConfigError: The options leave no request.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._load = load = _load(args, 1.0)
        self._config = SimConfig(
            profile=find_profile(args.profile),
            num_decode=args.decode,
            num_prefill=args.prefill,
            seed=args.seed,
            bandwidth_bytes_per_s=args.bandwidth_gbit and args.bandwidth_gbit * _GBIT,
            memory=MEMORY_RULES[args.on_full],
            precopy=not args.stop_and_copy,
            report_every_s=args.report_every_s,
            failures=tuple(args.fail),
            depths=tuple(args.depths),
            strict_share=args.strict_share,
            lock_step=args.lock_step,
            exits=_exits(args),
        )
        if not (load.arrivals_s >= args.warm_up_s).any():
            raise ConfigError(
                f"--warm-up-s: {args.warm_up_s:g} leaves no request: the last arrives at "
                f"{load.arrivals_s[-1]:g} s",
                param="warm-up-s",
            )
        standard = standard_slo(self._config)
        self._slo = Slo(args.slo_ttft_s or standard.ttft_s, args.slo_tpot_s or standard.tpot_s)
        self._console = wide_console(REPORT_WIDTH)
        args.out.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """One run under each policy."""
        outcomes: list[SimOutcome] = []
        try:
            for policy in dict.fromkeys(self._args.policy):
                outcomes.append(self._simulate(policy))
                self._write(outcomes[-1])
        finally:  # the runs that were over are told of a command that is broken off, too
            if outcomes:
                report.print_outcomes(self._console, outcomes, self._slo, self._title())
            for outcome in outcomes:
                summary = figures(asdict(outcome.summary))
                self._print_line(outcome.policy, report.headline(outcome), summary=summary)
        return int(any(outcome.ended != COMPLETE for outcome in outcomes))

    def find_capacity(self) -> int:
        """Search each policy's largest rate; prints every run of the search, and what it found."""
        if not self._load.rate > 0.0:
            raise ConfigError(
                "--find-capacity: all requests arrive at once, so there is no rate to change",
                param="find-capacity",
            )
        share = self._args.find_capacity
        conclusions = []
        try:
            for policy in dict.fromkeys(self._args.policy):
                found = find_capacity(partial(self._probe, policy), *self._factors())
                document = {
                    "share": share,
                    "kept": found.kept and figures(asdict(found.kept)),
                    "broken": found.broken and figures(asdict(found.broken)),
                    "probes": [figures(asdict(one)) for one in found.probes],
                }
                conclusions.append((policy, found, document))
                line = document | {"config": self._options(policy)}
                path = self._path(policy).with_suffix(".capacity.json")
                write_atomically(path, json.dumps(line, allow_nan=False).encode())
        finally:  # what was found is told of a search that is broken off, too
            for policy, found, _ in conclusions:
                self._say(report.conclusion(policy, found, share), style="bold")
            for policy, found, document in conclusions:
                headline = {
                    "largest_rate": None if found.kept is None else for_json(found.kept.rate),
                    "next_rate": None if found.broken is None else for_json(found.broken.rate),
                    "good_share": share,
                }
                self._print_line(policy, headline, capacity=document)
        return 0

    def _simulate(self, policy: str) -> SimOutcome:
        """Run one policy; a run that is broken off has what came of it until then.

        Raises:
            KeyboardInterrupt, SystemExit: The run was interrupted; what it had is written.
        """
        args, load = self._args, self._load
        recorder = None if args.record is None else Recorder(args.record, self._config, policy)
        shows = self._console.is_terminal and not args.no_progress
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[at]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not shows,
        )
        task = progress.add_task(policy, total=len(load), at="")

        def on_tick(now_s: float, num_open: int) -> None:
            progress.update(task, completed=len(load) - num_open, at=f"{now_s:,.0f} s")

        simulation = make_simulation(
            policy,
            load,
            self._config,
            on_tick=on_tick if shows else None,
            on_decision=None if recorder is None else recorder.decided,
        )
        started_s = time.perf_counter()

        def outcome(ended: str) -> SimOutcome:
            result, took_s = simulation.result, time.perf_counter() - started_s
            summary = summary_of(result, load, self._slo, from_s=args.warm_up_s)
            return SimOutcome(policy, result, summary, ended, took_s)

        try:
            with progress:
                simulation.run()
            return outcome(COMPLETE)
        except (KeyboardInterrupt, SystemExit):
            _say_kept(policy, self._write(outcome("interrupted")))
            raise
        except Exception as exc:  # a fault of the simulator: other policies' runs are not lost
            traceback.print_exc()
            broken = outcome(f"{type(exc).__name__}: {exc}")
            _say_kept(policy, self._path(policy, broken.ended))
            return broken
        finally:
            if recorder is not None:
                recorder.close()

    def _probe(self, policy: str, factor: float) -> Probe:
        """Simulate the load at a factor of its rate, until the share cannot be met any more."""
        args, load, share, slo = self._args, self._load, self._args.find_capacity, self._slo
        if args.trace is not None:
            rate, load, warm_up_s = load.rate, load.faster(factor), args.warm_up_s / factor
        else:
            rate, load, warm_up_s = _rate_given(args), _load(args, factor), args.warm_up_s
        stop = is_hopeless(load, slo, share, from_s=warm_up_s)
        run = make_simulation(policy, load, self._config, stop=stop).run()
        summary = summary_of(run, load, slo, from_s=warm_up_s)
        is_cut = stop(run.end_s, run)
        failures = {r: n for r, n in summary.failures.items() if r != UNFINISHED}
        probe = Probe(
            factor=factor,
            rate=rate * factor,
            good_share=None if is_cut else summary.good_share,
            is_kept=not is_cut and summary.good_share >= share - 1e-9,
            failures=failures,
        )
        self._say(report.probe_line(policy, probe))
        return probe

    def _factors(self) -> tuple[float, float]:
        """The slowest and the fastest load that can be simulated, as factors of the rate given."""
        load = self._load
        if self._args.trace is not None:
            return float(load.arrivals_s[-1]) / MAX_SPAN_S, math.inf
        num_counted = int((load.arrivals_s >= self._args.warm_up_s).sum())
        return MIN_REQUESTS / num_counted, MAX_ROWS / len(load)

    def _options(self, policy: str) -> dict[str, Any]:
        """All options that decide a run's figures."""
        args, load, slo = self._args, self._load, self._slo
        options = {name: value for name, value in vars(args).items() if name not in _NOT_RECORDED}
        return options | {
            "load": load.name,
            "load_sha256": load.fingerprint(),
            "rate": for_json(load.rate),
            "requests": len(load),
            "policy": policy,
            "fail": [[f.at_s, f.replica, f.down_s] for f in args.fail],
            "slo_ttft_s": slo.ttft_s,
            "slo_tpot_s": for_json(slo.tpot_s),
        }

    def _path(self, policy: str, ended: str = COMPLETE) -> Path:
        """The file of a run: no two runs with different options have the same."""
        args, name = self._args, self._load.name[:_MAX_NAME_CHARS]
        digest = hashlib.sha256(json.dumps(self._options(policy), sort_keys=True).encode())
        part = "" if ended == COMPLETE else ".partial"
        name = f"{name}-{policy}-{args.decode}d-x{args.scale:g}-s{args.seed}"
        return Path(args.out / f"{name}-{digest.hexdigest()[:8]}{part}.json")

    def _write(self, outcome: SimOutcome) -> Path:
        """Write a run's raw figures, and its plot where it is complete."""
        load, policy = self._load, outcome.policy
        path = self._path(policy, outcome.ended)
        text = json.dumps(report.raw(outcome, load, self._options(policy)), allow_nan=False)
        write_atomically(path, text.encode())
        if outcome.ended == COMPLETE:
            self._path(policy, "").unlink(missing_ok=True)
        if not self._args.no_plots and outcome.ended == COMPLETE:
            title = f"{load.name}, {policy}"
            write_run_plot(path.with_suffix(".png"), outcome.run, load, self._slo, title)
        return path

    def _title(self) -> str:
        args, load = self._args, self._load
        span = f"in {load.arrivals_s[-1]:,.0f} s, {load.rate:.3g}/s" if load.rate > 0 else "at once"
        return (
            f"{load.name}: {len(load):,} requests {span}; {args.prefill} prefill + {args.decode} "
            f"decode × {args.profile} (simulated)"
        )

    def _print_line(self, policy: str, headline: dict[str, Any], **more: Any) -> None:
        print_line("simulate", headline=headline, **more, config=self._options(policy))

    def _say(self, text: str, **options: Any) -> None:
        self._console.print(text, markup=False, highlight=False, **options)


def _say_kept(policy: str, path: Path) -> None:
    print(f"{policy}: the run was broken off; what it had is in {path}", file=sys.stderr)
