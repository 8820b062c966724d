"""`python -m loadgen chaos`: start a service, break it cell by cell, print the table."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadgen.bench.service import Service, started_service
from loadgen.chaos.cells import QUICK, Cell
from loadgen.chaos.load import clients_of, make_streams
from loadgen.chaos.strike import run_cell
from loadgen.chaos.verdicts import CellResult
from quadriga.errors import ConfigError

WIDTH = 150
SETTINGS = (
    "deterministic=true",
    "decode.rebatching=drex",
    "decode.pace=steady-15ms",
    "prefill_replicas=2",
    "decode_replicas=2",
    "engine.resources_cpus=0.05",
    "lifecycle.heartbeat_interval_s=0.5",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `chaos`."""
    parser.add_argument("--model", default="quadriga-s")
    parser.add_argument("--runs", type=int, default=1, help="of each cell")
    parser.add_argument("--streams", type=int, default=12, help="under way at once")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        action="append",
        metavar="CELL",
        help=f"these cells alone, as the table names them: {QUICK[0]!s}; may be repeated",
    )
    parser.add_argument(
        "--budget-s", type=float, help="begin no cell after this long; what is skipped has failed"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")


def run(args: argparse.Namespace) -> int:
    """Run the cells; 0 when every stream of every cell survived."""
    cells = choose(args.only)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quadriga-chaos-") as folder:
        settings = [f"model={args.model}", *SETTINGS, *args.set]
        with started_service(settings, log=Path(folder) / "service.log") as service:
            until_s = began_s + args.budget_s if args.budget_s is not None else None
            results = asyncio.run(_run_all(args, cells, service, console, until_s))
    console.print(table(results))
    print(summary(results, seconds=time.monotonic() - began_s))
    return 0 if all(r.is_ok for r in results) else 1


def choose(names: Sequence[str] | None) -> list[Cell]:
    """The cells of these names, or all. Raises: ConfigError: There is none of a name."""
    by_name = {str(cell): cell for cell in QUICK}
    unknown = [name for name in names or () if name not in by_name]
    if unknown:
        raise ConfigError(
            f"--only: there is no cell {unknown[0]!r}; there are: {'; '.join(by_name)}",
            param="only",
        )
    return [by_name[name] for name in names] if names else list(QUICK)


async def _run_all(
    args: argparse.Namespace,
    cells: Sequence[Cell],
    service: Service,
    console: Console,
    until_s: float | None,
) -> list[CellResult]:
    results = [CellResult(cell) for cell in cells]
    rng = random.Random(args.seed)
    specs = make_streams(args.streams, max_tokens=args.max_tokens, seed=args.seed)
    async with clients_of(service) as clients:
        reference = await clients.reference(specs)
        for result in results:
            for _ in range(args.runs):
                began_s = time.monotonic()
                if until_s is not None and began_s > until_s:
                    break
                await run_cell(service, clients, specs, reference, result, rng)
                console.print(_line(result, time.monotonic() - began_s), style="dim")
    return results


def _line(result: CellResult, seconds: float) -> str:
    state = "ok" if result.is_ok else "FAILED " + "; ".join(result.not_restored + result.faults[:6])
    return f"{result.cell}: {result.rebuilt} rebuilt, {seconds:.0f} s, {state}"


def table(results: Sequence[CellResult]) -> Table:
    """Cell, runs, and how many streams were lost, duplicated, differing or hung."""
    made = Table("cell", "runs", "streams", "rebuilt", "lost", "duplicated", "differing", "hung")
    for name in ("recovery P50 s", "P99 s", "whole again"):
        made.add_column(name)
    for r in results:
        made.add_row(
            str(r.cell),
            *map(str, (r.runs, r.streams, r.rebuilt, r.lost, r.duplicated, r.differing, r.hung)),
            *(_seconds(r.percentile_s(share)) for share in (0.5, 0.99)),
            "no" if r.not_restored else "yes",
        )
    return made


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def summary(results: Sequence[CellResult], *, seconds: float) -> str:
    """The last line: one JSON object."""
    recovery_s = sorted(t for r in results for t in r.recovery_s)
    return json.dumps(
        {
            "cells": len(results),
            "failed": [str(r.cell) for r in results if not r.is_ok],
            "streams": sum(r.streams for r in results),
            "rebuilt": sum(r.rebuilt for r in results),
            "lost": sum(r.lost for r in results),
            "duplicated": sum(r.duplicated for r in results),
            "differing": sum(r.differing for r in results),
            "hung": sum(r.hung for r in results),
            "recovery_s": [round(t, 3) for t in recovery_s],
            "seconds": round(seconds, 1),
        }
    )
