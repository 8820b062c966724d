"""`python -m loadgen run`: send a load, check every response, report."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadgen import report
from loadgen.arrivals import Arrivals, parse_arrivals
from loadgen.capture import LoadClient
from loadgen.client_http import HttpClient, parse_url
from loadgen.clients import open_client
from loadgen.event_loop import run_event_loop
from loadgen.judge import Judgement, score
from loadgen.metrics import Slo, Summary, summarise
from loadgen.options import add_arguments, api_key
from loadgen.plots import write_plots
from loadgen.progress import progress_bar
from loadgen.runner import Live, RunOptions, RunResult, now_s, run_load
from loadgen.scenario import build_specs, config_of, describe
from loadgen.target import Target, find_target
from loadgen.verify_text import verify_texts
from loadgen.workload import RequestSpec
from quadriga.errors import ConfigError

__all__ = ["add_arguments", "run"]

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
MAX_FAILURES_SHOWN = 5
REPORT_WIDTH = 100


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 only when no response failed its check and at least one passed."""
    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    arrivals = parse_arrivals(args.arrivals or ("trace" if args.trace else "closed:8"))
    folder = _output_folder(args.output)
    result, summary = run_event_loop(lambda: _run(args, arrivals, console, folder))
    title = f"{describe(args)} over {args.transport}"
    report.print_summary(console, summary, title)
    if not args.no_plots:
        write_plots(folder, result, title)
    _print_failures(console, result)
    console.print(f"results: {folder}")
    if result.was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.failed or not summary.ok else EXIT_OK


async def _run(
    args: argparse.Namespace, arrivals: Arrivals, console: Console, folder: Path
) -> tuple[RunResult, Summary]:
    live = Live()
    http = HttpClient(
        parse_url(args.url, ca_file=args.ca_file),
        now_s=now_s,
        timeout_s=args.timeout_s,
        api_key=api_key(args),
        on_data=live.on_data if args.transport == "http" else None,
    )
    target = await find_target(http, args.model)
    specs = await build_specs(args, arrivals, http, target)
    judgement = Judgement(target)
    options = RunOptions(arrivals.concurrency, args.honour_retry_after)
    async with open_client(args, http, live) as client:
        await _warm_up(specs[: args.warmup], client, target, judgement)
        async with progress_bar(console, live, enabled=not args.no_progress):
            result = await run_load(specs, client, target.model, judgement, options, live)
    if args.verify_text and not result.was_interrupted:
        await verify_texts(http, target.model, result.records)
    score(result.records)
    summary = summarise(result, Slo(args.slo_ttft_s, args.slo_tpot_s))
    head = report.header(
        scenario=describe(args),
        config={**config_of(args), "model": target.model, "max_model_len": target.max_model_len},
        seed=args.seed,
        warm_up=f"{min(args.warmup, len(specs))} requests one by one before the clock, checked",
        started_unix_s=result.start_unix_s,
    )
    report.write_results(folder, head, result, summary)
    return result, summary


async def _warm_up(
    specs: list[RequestSpec], client: LoadClient, target: Target, judgement: Judgement
) -> None:
    """Send requests one by one, outside the figures; they must pass like any other.

    Raises:
        ConfigError: One failed: there is no point in measuring.
    """
    if not specs:
        return
    specs = [replace(spec, index=index, arrival_s=0.0) for index, spec in enumerate(specs)]
    options = RunOptions(concurrency=1, honour_refusals=3)
    result = await run_load(specs, client, target.model, judgement, options, Live())
    for record in result.records:
        if record.verdict.faults:
            faults = "; ".join(map(str, record.verdict.faults[:3]))
            raise ConfigError(f"warm-up request {record.spec.index} failed: {faults}")


def _output_folder(wanted: str | None) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = Path(wanted) if wanted else Path("results/loadgen") / f"{stamp}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--output: {folder}: {exc}", param="output") from exc
    return folder


def _print_failures(console: Console, result: RunResult) -> None:
    failed = [record for record in result.records if record.verdict.faults]
    for record in failed[:MAX_FAILURES_SHOWN]:
        faults = "; ".join(map(str, record.verdict.faults[:3]))
        console.print(f"request {record.spec.index}: {faults}", style="red", markup=False)
    if len(failed) > MAX_FAILURES_SHOWN:
        console.print(f"… and {len(failed) - MAX_FAILURES_SHOWN} more; see the results")
