"""`python -m loadgen run`: send a load, check every response, report."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from loadgen.checker.same_answers import EarlierAnswers
from loadgen.event_loop import run_event_loop
from loadgen.load.arrivals import Arrivals, parse_arrivals
from loadgen.load.scenario import cached_apart, title_of
from loadgen.load_options import add_arguments
from loadgen.report import run_report as report
from loadgen.report.experiment import REPORT_WIDTH, wide_console
from loadgen.report.metrics import LoadSlo, LoadSummary, summarise
from loadgen.report.output import output_folder
from loadgen.report.plots import write_plots
from loadgen.report.progress import progress_bar
from loadgen.runner import Live, LoadOptions, RunResult, run_load
from loadgen.stage import exit_status, open_stage, print_failures
from quadriga.errors import ConfigError

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 only when all checks were made, none failed, and a response passed."""
    console = wide_console(REPORT_WIDTH)
    args.arrivals = args.arrivals or ("trace" if args.trace else "closed:8")
    arrivals = parse_arrivals(args.arrivals)
    if args.stream == "false" and (args.slo_ttft_s or args.slo_tpot_s):
        raise ConfigError("--slo-ttft-s, --slo-tpot-s: not for --stream false", param="stream")
    earlier = EarlierAnswers.read(args.same_as) if args.same_as else None
    if earlier and args.output:
        if (args.output / report.RESULTS_FILE).resolve() == earlier.path.resolve():
            text = f"--output: {args.output} holds what --same-as names; name another folder"
            raise ConfigError(text, param="output")
    with output_folder(args.output) as folder:
        result, summary = run_event_loop(lambda: _run(args, arrivals, console, folder, earlier))
        if not args.no_plots:
            write_plots(folder, result, title_of(args))
        console.print(f"results: {folder}")
    return exit_status(result, summary.failed or not summary.ok)


async def _run(
    args: argparse.Namespace,
    arrivals: Arrivals,
    console: Console,
    folder: Path,
    earlier: EarlierAnswers | None,
) -> tuple[RunResult, LoadSummary]:
    live = Live()
    async with open_stage(args, arrivals, live) as stage:
        load, specs = stage.load, stage.load.specs
        if args.warmup and "cache_salt" not in specs[0].extra:
            specs = cached_apart(specs)  # nor does it find what an earlier run sent
        if earlier is not None:
            earlier.check(load.fingerprint(), stage.target.model)
        live.num_requests = load.num_requests
        options = LoadOptions(arrivals.concurrency, args.honour_retry_after)
        with progress_bar(console, live, enabled=not args.no_progress):
            result = await run_load(
                specs,
                stage.client,
                stage.target.model,
                stage.judgement,
                options,
                live,
                follow=load.follow,
                keeps_partial=True,
            )
        try:
            await stage.finish(result)
            if earlier is not None:
                same = f"{earlier.compare(result.records):,} of {len(result.records):,}"
                console.print(f"answers as in {earlier.path}: {same}")
        finally:  # whatever becomes of the checks, what was measured is kept
            unsent = {} if load.dialogues is None else dict(load.dialogues.unsent)
            summary = summarise(result, LoadSlo(args.slo_ttft_s, args.slo_tpot_s), unsent=unsent)
            try:
                report.write_results(folder, stage.header("run", result), result, summary)
            finally:  # and told, also where the disk is full
                report.print_summary(console, summary, title_of(args))
                print_failures(console, result)
    return result, summary
