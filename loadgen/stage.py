"""What `run` and `ramp` share: the service, the load made for it, the warm-up, the record."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from loadgen.checker import Outcome
from loadgen.checker.judge import Judgement, score
from loadgen.checker.verify_text import verify_texts
from loadgen.load.arrivals import Arrivals
from loadgen.load.scenario import (
    Load,
    build_load,
    cached_apart,
    check_load,
    choose_load,
    config_of,
    describe,
)
from loadgen.options import api_key
from loadgen.report import run_report as report
from loadgen.runner import Live, LoadOptions, RunResult, run_load
from loadgen.target import Target, find_target
from loadgen.wire.capture import LoadClient
from loadgen.wire.client_http import HttpClient
from loadgen.wire.clients import open_client
from quadriga.errors import ConfigError

MAX_FAILURES_SHOWN = 5
WARM_UP_REFUSALS = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """A service that is warm, and what is to be sent to it.

    Attributes:
        http: For the helper routes.
        client: Of the transport under load.
    """

    args: argparse.Namespace
    http: HttpClient
    client: LoadClient
    target: Target
    load: Load
    judgement: Judgement

    async def finish(self, result: RunResult) -> None:
        """After the load: compare texts with their token ids, score answers."""
        if self.args.verify_text and not result.was_interrupted:
            try:
                await verify_texts(self.http, self.target, result.records)
            except ConfigError as exc:  # what was measured is not lost for it
                result.texts_not_verified = exc.message
            except asyncio.CancelledError:  # Ctrl-C: nor for that
                result.was_interrupted, result.texts_not_verified = True, "interrupted"
        score(result.records)

    def header(self, kind: str, result: RunResult) -> dict[str, Any]:
        """Return the first line of the results file."""
        args = self.args
        facts = {"model": self.target.model, "max_model_len": self.target.max_model_len}
        warm_up = min(args.warmup, len(self.load.specs))
        return report.header(
            kind=kind,
            scenario=describe(args),
            config={**config_of(args), **facts},
            seed=args.seed,
            warm_up=f"{warm_up} requests one by one before the clock, checked",
            started_unix_s=result.start_unix_s,
            fingerprint=self.load.fingerprint(),
        )


@asynccontextmanager
async def open_stage(
    args: argparse.Namespace, arrivals: Arrivals, live: Live
) -> AsyncIterator[Stage]:
    """Find the service, make the load, warm up; closes the connections at the end.

    Raises:
        ConfigError: An option, a file or the service stands in the way.
    """
    check_load(args)
    http = HttpClient(
        args.url,
        timeout_s=args.timeout_s,
        api_key=api_key(args),
        ca_file=args.ca_file,
        on_data=live.on_data if args.transport == "http" else None,
    )
    target = await find_target(http, args.model)
    choose_load(args, target.model)
    load = await build_load(args, arrivals, http, target)
    async with open_client(args, http, live) as client:
        client.prepare(load.specs[0], target.model, "")  # refuses what it cannot send
        stage = Stage(args, http, client, target, load, Judgement(target))
        await _warm_up(stage)
        yield stage


async def _warm_up(stage: Stage) -> None:
    """Send requests one by one, outside the figures; they must pass like any other.

    Raises:
        ConfigError: One failed: there is no point in measuring.
    """
    specs = cached_apart(stage.load.specs[: stage.args.warmup])
    if not specs:
        return
    specs = [replace(spec, index=index, arrival_s=0.0) for index, spec in enumerate(specs)]
    options = LoadOptions(concurrency=1, honour_refusals=WARM_UP_REFUSALS)
    result = await run_load(
        specs, stage.client, stage.target.model, stage.judgement, options, Live()
    )
    for record in result.records:
        if record.verdict.outcome is not Outcome.OK:
            faults = "; ".join(map(str, record.verdict.faults[:3])) or "it was refused each time"
            raise ConfigError(f"warm-up request {record.spec.index} failed: {faults}")


def exit_status(result: RunResult, has_failed: bool | int) -> int:
    """Return 130 after an interruption, 1 where something failed or was not verified, else 0."""
    return 130 if result.was_interrupted else int(bool(has_failed or result.texts_not_verified))


def print_failures(console: Console, result: RunResult) -> None:
    """Print the first failed requests with their first faults, and a check that was not made."""
    failed = [record for record in result.records if record.verdict.faults]
    for record in failed[:MAX_FAILURES_SHOWN]:
        faults = "; ".join(map(str, record.verdict.faults[:3]))
        console.print(f"request {record.spec.index}: {faults}", style="red", markup=False)
    if len(failed) > MAX_FAILURES_SHOWN:
        console.print(f"… and {len(failed) - MAX_FAILURES_SHOWN} more; see the results")
    if result.texts_not_verified:
        console.print(f"texts not verified: {result.texts_not_verified}", style="red", markup=False)
