"""`python -m loadgen ramp`: raise the load until the service no longer keeps its SLO."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadgen.event_loop import run_event_loop
from loadgen.load.arrivals import Arrivals, parse_arrivals
from loadgen.load.scenario import title_of
from loadgen.load.workload import RequestSpec
from loadgen.load_options import (
    add_load_arguments,
    add_measurement_arguments,
    add_request_arguments,
)
from loadgen.options import add_service_arguments, number, number_from, number_span, whole
from loadgen.ramps.levels import Ramp, check_concurrency
from loadgen.ramps.report import one_line, print_ramp, write_ramp_plot
from loadgen.ramps.steps import Goal, RampWatch, StepFigures, capacity_of
from loadgen.report import run_report as report
from loadgen.report.experiment import REPORT_WIDTH, wide_console
from loadgen.report.metrics import LoadSlo, summarise
from loadgen.report.output import output_folder
from loadgen.report.plots import write_plots
from loadgen.report.progress import progress_bar
from loadgen.runner import Live, LoadOptions, RunResult, run_load
from loadgen.stage import Stage, exit_status, open_stage, print_failures
from loadgen.wire.capture import now_s
from quadriga.errors import ConfigError

TICK_S = 0.25
_EXAMPLES = """examples:
  python -m loadgen ramp --tasks 200 --rate 1-16
  python -m loadgen ramp --tasks 200 --concurrency 1-64 --rise geometric --steps 7
  python -m loadgen ramp --sessions 50 --rate 0.2-4 --slo-ttft-s 0.5 --slo-tpot-s 0.05"""
MAX_STEPS = 200
_ALL_AT_ONCE = Arrivals("at-once")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EXAMPLES
    add_service_arguments(parser)
    ramp = parser.add_argument_group("ramp (one of --rate, --concurrency)")
    unit = ramp.add_mutually_exclusive_group(required=True)
    unit.add_argument(
        "--rate",
        type=number_span(0, 1e6),
        metavar="LOW-HIGH",
        help="open loop: requests (conversations, with --sessions) begun per second",
    )
    unit.add_argument(
        "--concurrency",
        type=number_span(0, 1e5),
        metavar="LOW-HIGH",
        help="closed loop: requests (conversations) at a time",
    )
    ramp.add_argument(
        "--steps",
        metavar="N",
        type=whole(1, MAX_STEPS),
        default=8,
        help="levels to measure; fewer where no more whole concurrencies lie between",
    )
    ramp.add_argument(
        "--step-s", metavar="SECONDS", type=number(0, 86_400), default=20.0, help="length of a step"
    )
    ramp.add_argument(
        "--settle-s",
        metavar="SECONDS",
        type=number_from(0, 86_400),
        help="beginning of each step that no figure counts; default: a quarter of it",
    )
    ramp.add_argument(
        "--rise",
        choices=("even", "geometric", "linear"),
        default="even",
        help="levels at even distances, at even ratios, or rising all the time",
    )
    ramp.add_argument(
        "--arrivals",
        default="poisson",
        metavar="PROCESS",
        help="with --rate: poisson, constant or gamma:CV",
    )
    ramp.add_argument(
        "--slo-ttft-s", metavar="SECONDS", type=number(0, 86_400), default=1.0, help="limit of TTFT"
    )
    ramp.add_argument(
        "--slo-tpot-s", metavar="SECONDS", type=number(0, 86_400), default=0.1, help="limit of TPOT"
    )
    ramp.add_argument(
        "--slo-share",
        metavar="SHARE",
        type=number(0, 1),
        default=0.9,
        help="a step keeps the SLO when this share of its requests passes within both limits",
    )
    ramp.add_argument(
        "--keep-going", action="store_true", help="go to the end though the SLO is broken"
    )
    ramp.add_argument(
        "--drain-s",
        metavar="SECONDS",
        type=number_from(0, 86_400),
        default=30.0,
        help="what still runs so long after the last request is given up",
    )
    add_load_arguments(parser)
    add_request_arguments(parser)
    add_measurement_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 when no response failed its check and at least one passed."""
    ramp, process, goal = read_ramp(args)
    console = wide_console(REPORT_WIDTH)
    with output_folder(args.output, "ramp-") as folder:
        result, figures = run_event_loop(lambda: drive(args, ramp, process, goal, console, folder))
        if not args.no_plots:
            write_plots(folder, result, title_of(args))
            write_ramp_plot(folder, figures, ramp, goal, title_of(args))
        console.print(f"results: {folder}")
    failed = any(record.verdict.faults for record in result.records)
    return exit_status(result, failed or not any(one.ok for one in figures))


def read_ramp(args: argparse.Namespace) -> tuple[Ramp, Arrivals, Goal]:
    """Return the ramp, the process of its arrivals, and what its steps must keep.

    Raises:
        ConfigError: Options contradict each other.
    """
    low, high = args.rate or args.concurrency
    if args.concurrency is not None:
        check_concurrency(low, high)
    if args.settle_s is None:
        args.settle_s = args.step_s / 4
    if args.settle_s >= args.step_s:
        raise ConfigError(
            f"--settle-s: {args.settle_s:g} leaves nothing of a step of {args.step_s:g} s",
            param="settle-s",
        )
    if args.stream != "true":
        raise ConfigError(
            f"--stream: {args.stream}: only streamed answers have a TTFT to keep", param="stream"
        )
    if args.time_scale != 1.0:
        raise ConfigError("--time-scale: a ramp sets the times itself", param="time-scale")
    ramp = Ramp(
        unit="rate" if args.rate else "concurrency",
        rise=args.rise,
        low=low,
        high=high,
        num_steps=args.steps,
        step_s=args.step_s,
        settle_s=args.settle_s,
        users="requests" if args.sessions is None else "conversations",
    )
    goal = Goal(LoadSlo(args.slo_ttft_s, args.slo_tpot_s), args.slo_share)
    return ramp, _process(args.arrivals), goal


def _process(text: str) -> Arrivals:
    name, _, cv = text.partition(":")
    if name in ("poisson", "constant", "gamma") and bool(cv) == (name == "gamma"):
        return parse_arrivals(f"{name}:1:{cv}" if cv else f"{name}:1")
    raise ConfigError(
        f"--arrivals: {text!r} is none of poisson, constant, gamma:CV", param="arrivals"
    )


async def drive(
    args: argparse.Namespace,
    ramp: Ramp,
    process: Arrivals,
    goal: Goal,
    console: Console,
    folder: Path,
) -> tuple[RunResult, list[StepFigures]]:
    """Send the ramp, judge its steps, write the results.

    Raises:
        ConfigError: An option, a file or the service stands in the way.
    """
    live = Live()
    async with open_stage(args, _ALL_AT_ONCE, live) as stage:
        driver = _Driver(args, stage, ramp, goal, console)
        specs: Iterable[RequestSpec] = stage.load.cycled()
        if ramp.unit == "rate":
            times_s = ramp.times_s(process, seed=args.seed)
            pairs = zip(times_s, stage.load.cycled(), strict=False)
            specs = [replace(spec, arrival_s=float(time_s)) for time_s, spec in pairs]
            live.num_requests = len(specs) if stage.load.dialogues is None else 0
        with progress_bar(console, live, enabled=not args.no_progress):
            result = await driver.run(specs, live)
        try:
            await stage.finish(result)
        finally:  # whatever becomes of the checks, what was measured is kept
            figures = driver.watch.figures(driver.stopped_s)
            found = capacity_of(figures)
            further = [
                *(one.as_dict() for one in figures),
                {"kind": "capacity", "unit": ramp.unit, "kept": found.kept, "broken": found.broken},
            ]
            unsent = {} if stage.load.dialogues is None else dict(stage.load.dialogues.unsent)
            summary = summarise(result, goal.slo, unsent=unsent)
            head = stage.header("ramp", result)
            try:
                report.write_results(folder, head, result, summary, further)
            finally:  # and told, also where the disk is full
                print_ramp(console, figures, ramp, goal, title_of(args))
                print_failures(console, result)
    return result, figures


class _Driver:
    """Runs the load, tells how it goes, and stops it when the SLO breaks.

    Attributes:
        stopped_s: From when on nothing more was sent, on the run's clock.
    """

    def __init__(
        self, args: argparse.Namespace, stage: Stage, ramp: Ramp, goal: Goal, console: Console
    ) -> None:
        self.args = args
        self.stage = stage
        self.ramp = ramp
        self.console = console
        self.watch = RampWatch(ramp.steps(), goal)
        self.stop = asyncio.Event()
        self.stopped_s = 0.0
        self.num_users = 0

    async def run(self, specs: Iterable[RequestSpec], live: Live) -> RunResult:
        """Send the load; returns when it is over, broken and drained, or interrupted.

        Args:
            specs: All of an open loop's users, or users without end for a closed loop.
        """
        self.num_users = len(specs) if isinstance(specs, list) else 0
        stage, is_open = self.stage, self.ramp.unit == "rate"
        places_s = () if is_open else self.ramp.places_s()
        load = asyncio.create_task(
            run_load(
                specs,
                stage.client,
                stage.target.model,
                stage.judgement,
                LoadOptions(None if is_open else len(places_s), place_opens_s=places_s),
                live,
                follow=stage.load.follow,
                observer=self.watch,
                stop=self.stop,
                keeps_partial=True,
            )
        )
        was_interrupted = False
        try:
            await self._supervise(load, live)
        except asyncio.CancelledError:
            was_interrupted = True
            self.stopped_s = self.watch.concluded_s  # what runs yet says nothing of later steps
        finally:
            load.cancel()  # gives up what still runs; nothing where it has ended
        result = await load
        result.was_interrupted = was_interrupted
        return result

    async def _supervise(self, load: asyncio.Task[RunResult], live: Live) -> None:
        while not load.done():
            await asyncio.wait({load}, timeout=TICK_S)
            at_s = now_s()
            self._conclude(at_s)
            ramp_s = at_s - self.watch.start_s
            # A generator that is late sends all the same what was due inside the ramp.
            if ramp_s >= self.ramp.duration_s and self.watch.num_users >= self.num_users:
                self._stop(at_s)
            num_steps = len(self.ramp.levels())
            number = min(int(ramp_s / self.ramp.step_s), num_steps - 1)
            live.note = f"step {number + 1}/{num_steps}"
            if self.stop.is_set():
                live.note = "draining"
                if at_s >= self.stopped_s + self.args.drain_s:
                    return
        # All that was to be sent has been, perhaps before the last step's end.
        self._stop(self.watch.start_s + self.ramp.duration_s)
        self._conclude(self.stopped_s)

    def _conclude(self, at_s: float) -> None:
        for figures in self.watch.conclude(at_s):
            self.console.print(one_line(figures, self.ramp), markup=False, highlight=False)
            if figures.kept is False and not self.args.keep_going:
                self._stop(at_s)

    def _stop(self, at_s: float) -> None:
        if not self.stop.is_set():
            self.stopped_s = at_s
            self.stop.set()
