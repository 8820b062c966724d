"""`python -m loadgen chaos`: start a service, break it cell by cell, print the table."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import logging
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console

from loadgen.options import add_setting_argument, check_service, number, whole
from loadgen.report.experiment import wide_console
from loadgen.report.output import file_to_write, folder_to_write
from quadriga.errors import ConfigError
from tests.reliability.chaos.cell_results import CellResult
from tests.reliability.chaos.fault_matrix import (
    MATRIX,
    QUICK,
    QUICK_NEW,
    Cell,
    Fault,
    Moment,
    Stage,
    Victim,
)
from tests.reliability.chaos.report import faults, not_run, summary, table
from tests.reliability.chaos.results_file import ResultsFile
from tests.reliability.chaos.trials import Trials
from tests.reliability.cluster.stages import ServiceUnderTest, started_stage
from tests.reliability.load.streams import clients_of, make_streams

logger = logging.getLogger(__name__)

WIDTH = 150
LIMITED_DEPTH = 4
"""Where depths and models change, all tokens leave here: they are the same ones whatever comes."""
ON_NODES = (Stage.NODES, Stage.CHOOSING_NODES)
DIMENSIONS = {"fault": Fault, "moment": Moment, "victim": Victim, "stage": Stage}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `chaos`."""
    parser.add_argument(
        "--model", default="quadriga-s", help="bundled id, folder, GGUF file, or hub id"
    )
    parser.add_argument("--runs", type=whole(1), help="of each cell; default: 3, with --quick 1")
    parser.add_argument("--streams", type=whole(1), default=12, help="under way at once")
    parser.add_argument("--max-tokens", type=whole(2), default=120, help="of each stream")
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    parser.add_argument("--quick", action="store_true", help="a part that takes minutes")
    parser.add_argument("--list", action="store_true", help="every cell, or why there is none")
    parser.add_argument(
        "--only",
        action="append",
        metavar="CELL",
        help=f"these cells alone, as the table names them: {QUICK[0]!s}; may be repeated",
    )
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="KEY=VALUE[,VALUE]",
        help=f"cells whose {', '.join(DIMENSIONS)} is one of these; may be repeated",
    )
    parser.add_argument(
        "--budget-s", type=number(0), help="begin no cell after this; what is skipped has failed"
    )
    parser.add_argument("--json", type=file_to_write, help="all results; written after every run")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the file of --json: only what it lacks"
    )
    parser.add_argument(
        "--logs", type=folder_to_write, help="keep the services' output in this folder"
    )
    add_setting_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the cells; 0 when every stream of every cell survived."""
    cells = choose(args.only, args.filter, is_quick=args.quick)
    console = wide_console(WIDTH)
    began_s = time.monotonic()
    results = [CellResult(cell) for cell in cells if cell.why_not is None]
    if args.list:
        for result in results:
            console.print(f"{result.cell} ({result.cell.stage})")
        console.print(not_run(cells))
        return 0
    if args.quick:
        results = _possible_here(results, console)
        if not results:
            print("chaos: no chosen cell can be run here, so nothing was tested; choose others")
            return 1
    check_service(args.model, args.set)
    args.runs = args.runs or (1 if args.quick else 3)
    results_file = _results_file(args, cells)
    if results_file is not None and args.resume:
        results_file.resume(results)

    def keep() -> None:
        if results_file is not None:
            results_file.write(results, seconds=time.monotonic() - began_s)

    keep()
    with tempfile.TemporaryDirectory(prefix="quadriga-chaos-") as scratch:
        folder = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        until_s = None if args.budget_s is None else began_s + args.budget_s
        asyncio.run(Campaign(args, folder, console, until_s, keep).run(results))
    keep()
    console.print(table(results))
    if any(cell.why_not is not None for cell in cells):
        console.print(not_run(cells))
    for line in faults(results):
        print(line)
    seconds = time.monotonic() - began_s
    print(summary(results, seconds=seconds))
    return 0 if all(r.is_ok for r in results) else 1


def _results_file(args: argparse.Namespace, cells: Sequence[Cell]) -> ResultsFile | None:
    """Raises: ConfigError."""
    if args.json is None:
        if args.resume:
            raise ConfigError("--resume: needs the file of --json", param="resume")
        return None
    alike = ("model", "streams", "max_tokens", "seed", "set")
    return ResultsFile(args.json, {name: getattr(args, name) for name in alike}, cells)


def choose(
    names: Sequence[str] | None = None, filters: Sequence[str] = (), *, is_quick: bool = False
) -> list[Cell]:
    """The cells that are asked for; without a word all of the product, run or not.

    Raises:
        ConfigError: There is none of a name, or it cannot be run; or a filter is none.
    """
    by_name = {str(cell): cell for cell in MATRIX}
    for name in names or ():
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.3)
            hint = f", but {' and '.join(map(repr, near))}" if near else ""
            raise ConfigError(
                f"--only: there is no cell {name!r}{hint}; --list shows all of them", param="only"
            )
        if (reason := by_name[name].why_not) is not None:
            raise ConfigError(f"--only: {name!r} is not run: {reason}", param="only")
    if names:
        cells = [by_name[name] for name in names]
    else:
        cells = [*QUICK, *QUICK_NEW] if is_quick else list(MATRIX)
    for text in filters:
        key, values = _filter(text)
        cells = [c for c in cells if getattr(c, key).value in values]
    if not any(c.why_not is None for c in cells):
        raise ConfigError("--filter: no cell that can be run is left", param="filter")
    return cells


def _filter(text: str) -> tuple[str, set[str]]:
    key, _, given = text.partition("=")
    values = {value.strip() for value in given.split(",")}
    known = {str(value) for value in DIMENSIONS[key]} if key in DIMENSIONS else set()
    if not known:
        raise ConfigError(
            f"--filter: {key!r} must be one of {', '.join(DIMENSIONS)}", param="filter"
        )
    if unknown := values - known:
        raise ConfigError(
            f"--filter: {min(unknown)!r} is no {key}; there are: {', '.join(sorted(known))}",
            param="filter",
        )
    return key, values


def _possible_here(results: list[CellResult], console: Console) -> list[CellResult]:
    """Of the quick part, the cells that this machine allows: it is a choice of cells anyway."""
    from deploy.multinode import why_not_here

    on_nodes = [r for r in results if r.cell.stage in ON_NODES]
    reason = why_not_here() if on_nodes else None
    if reason is None:
        return results
    for result in on_nodes:
        console.print(f"{result.cell}: not in the quick part here: {reason}")
    return [r for r in results if r not in on_nodes]


class Campaign:
    """All cells, one service after the other.

    Args:
        until_s: Begin no run after this, `time.monotonic`.
        keep: Called after each run.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        folder: Path,
        console: Console,
        until_s: float | None,
        keep: Callable[[], None],
    ) -> None:
        self._args = args
        self._folder = folder
        self._console = console
        self._until_s = until_s
        self._keep = keep
        self._rng = random.Random(args.seed)
        self._references: dict[int | None, list[list[int]]] = {}

    async def run(self, results: Sequence[CellResult]) -> None:
        """Run every cell so often; what cannot be run has failed, and says why."""
        order = list(Stage)
        lacking = [r for r in results if r.done < self._args.runs]
        if num_done := sum(r.done for r in results):  # other choices than those made before
            self._rng.seed(f"{self._args.seed} after {num_done}")
        by_stage = sorted(lacking, key=lambda r: order.index(r.cell.stage))
        for stage, group in groupby(by_stage, key=lambda r: r.cell.stage):
            mine = list(group)
            if self._is_late():
                continue
            try:
                async with started_stage(
                    stage, self._args.model, self._args.set, self._folder
                ) as under_test:
                    await self._run_on(under_test, mine)
            except ConfigError as exc:
                self._console.print(f"{stage}: {exc.message}")
                for result in mine:
                    if not result.runs:
                        result.not_struck.append(exc.message)
        for result in lacking:
            if result.done < self._args.runs and not result.troubles:
                result.not_struck.append(f"no time was left after {result.done} runs")

    async def _run_on(self, under_test: ServiceUnderTest, results: Sequence[CellResult]) -> None:
        depth = LIMITED_DEPTH if under_test.is_choosing else None
        specs = make_streams(
            self._args.streams,
            max_tokens=self._args.max_tokens,
            seed=self._args.seed,
            max_depth=depth,
        )
        async with clients_of(under_test.service, self._args.model) as clients:
            if depth not in self._references:
                self._references[depth] = await clients.reference(specs)
            wanted = self._references[depth]
            trials = Trials(under_test, clients, specs, wanted, self._rng, under_test.census())
            for result in results:
                for _ in range(self._args.runs - result.done):
                    if self._is_late():
                        break
                    began_s = time.monotonic()
                    try:
                        await trials.run(result)
                    except Exception as exc:  # the border: the other cells are still to be run
                        logger.exception("%s was not run to its end", result.cell)
                        result.not_restored.append(f"not run to its end: {exc!r}")
                    self._keep()
                    self._console.print(_line(result, time.monotonic() - began_s), style="dim")

    def _is_late(self) -> bool:
        return self._until_s is not None and time.monotonic() > self._until_s


def _line(result: CellResult, seconds: float) -> str:
    state = "ok" if result.is_ok else "FAILED " + "; ".join(result.troubles + result.faults[:6])
    return f"{result.cell}: {result.rebuilt} rebuilt, {seconds:.0f} s, {state}"
