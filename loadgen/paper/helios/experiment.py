"""`python -m loadgen paper helios`: model and depth chosen while serving, against one model whole.

A stream of task prompts whose mix drifts is served by one replica on one processor: the service's
own engine, decode loop, exits and state machine, in one process. Contestants: the small model and
the large one, each whole with all its exits (every exit tested for every token, and `-adaptive`:
only those that pay; `-lossless`: they draft, and all layers verify), and HELIOS with each objective
(`-lossless`: so do the exits of a model that it holds whole). What is served is measured, not
modelled: tokens, exits, breaches, perplexity, right answers, memory, and the processor time of
everything, loading and profiling included.

Within a part all contestants take turns of a quarter of a second, so that what else the machine
does hits them alike. Every round draws the stream anew; medians are reported. Energy is the best
counter there is, or an estimate that is proportional to the time and marked `~`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.options import number, number_from, whole
from loadgen.paper.helios.bench import HeliosBench, HeliosPlan
from loadgen.paper.helios.report import (
    ALONE,
    BATCHED,
    FIXED,
    INTERVALS,
    LIMITS,
    THRESHOLDS,
    headline,
    plain,
    print_tables,
    write_plots,
)
from loadgen.report.experiment import keep_rows, publish
from loadgen.report.output import add_out_argument
from quadriga.catalogue.files import require_one_tokenizer, write_catalogue
from quadriga.catalogue.inspection import inspect
from quadriga.catalogue.records import Measurement
from quadriga.errors import ConfigError
from quadriga.policies.helios.messages import Objective

PARTS = (ALONE, BATCHED, FIXED, THRESHOLDS, INTERVALS, LIMITS)
QUICK_PARTS = (ALONE, FIXED)
BUNDLED = ("quadriga-s", "quadriga-l")
REQUESTS, QUICK_REQUESTS = 600, 96
ROUNDS, QUICK_ROUNDS = 3, 1
INTERVAL, QUICK_INTERVAL = 150, 36
TAUS, QUICK_TAUS = (0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999), (0.9,)
RIS, QUICK_RIS = (50, 100, 150, 200, 250), (24,)
SHARES, QUICK_SHARES = (1.0, 0.05, 0.02, 0.01, 0.005, 0.002, 0.0), (1.0, 0.01)
OF_ONE_PART = {
    "threshold": THRESHOLDS,
    "intervals": INTERVALS,
    "changed": LIMITS,
    "memory_mib": FIXED,
}
"""Options that one part alone looks at."""
_SEED = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--pair",
        nargs="+",
        default=list(BUNDLED),
        metavar="MODEL",
        help="small and large, or one model, whose depths are the choice: bundled "
        "ids or checkpoint folders",
    )
    parser.add_argument(
        "--catalogue",
        metavar="FILE",
        help="of that pair, as `profile` wrote it; default: the bundled one's, "
        "for other pairs nothing on record",
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=PARTS,
        help="default: all; with --quick one request at a time, and the fixed memory",
    )
    objectives = list(get_args(Objective))
    parser.add_argument(
        "--slo",
        nargs="+",
        choices=objectives,
        default=objectives,
        help="the first one is the headline's",
    )
    parser.add_argument("--requests", type=whole(16), help=f"in the stream; default: {REQUESTS}")
    parser.add_argument("--rounds", type=whole(1), help=f"of each setting; default: {ROUNDS}")
    parser.add_argument(
        "--interval", type=whole(1), help=f"requests between two assessments; default: {INTERVAL}"
    )
    parser.add_argument(
        "--profile-requests",
        type=whole(1),
        default=5,
        help="that each candidate gets in an assessment",
    )
    parser.add_argument(
        "--threshold", nargs="+", type=number(0, 1), metavar="T", help="of the sweep over τ"
    )
    parser.add_argument("--intervals", nargs="+", type=whole(1), metavar="N", help="of the sweep")
    parser.add_argument(
        "--changed",
        nargs="+",
        type=number_from(0, 1),
        metavar="SHARE",
        help="helios.max_changed_share of its sweep",
    )
    parser.add_argument("--batch", type=whole(1), default=8, help="clients of the batched part")
    parser.add_argument(
        "--rows", type=whole(1), default=64, help="clients, and most sequences, in the fixed memory"
    )
    parser.add_argument(
        "--memory-mib",
        type=number(0),
        help="the fixed memory; default: a fifth more than the larger model's weights",
    )
    parser.add_argument(
        "--shadows", type=whole(1), default=64, help="answers of a run that full depth reads again"
    )
    parser.add_argument("--threads", type=whole(1), default=1, help="CPU threads of the engine")
    parser.add_argument("--seed", type=whole(0), default=_SEED, help="of everything random")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="shorter stream, one round, few points: within 5 minutes",
    )
    add_out_argument(parser, "results/paper")


def run(args: argparse.Namespace) -> int:
    """Measure everything; returns 0."""
    with tempfile.TemporaryDirectory(prefix="quadriga-helios-") as folder:
        plan = _plan(args, _catalogue(args.pair, args.catalogue, Path(folder)))
        return _measure(plan, args.out)


def _measure(plan: HeliosPlan, out: Path) -> int:
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        auto_refresh=False,
    )
    with progress:
        bar = progress.add_task("requests", total=None)

        def on_done(count: int) -> None:
            progress.update(bar, completed=count)
            progress.refresh()

        bench = HeliosBench(plan, lambda line: console.print(line, highlight=False), on_done)
        each = [plan.num_requests(setting) for setting in bench.settings]
        progress.update(bar, total=plan.rounds * sum(each))
        rows = bench.measure(lambda yet: keep_rows("helios", [plain(row) for row in yet], out))
    print_tables(rows)
    for path in write_plots(rows, out):
        console.print(f"plot: {path}")
    publish("helios", headline(rows, plan.slos[0]), [plain(row) for row in rows], out)
    return 0


def _plan(args: argparse.Namespace, catalogue: str | None) -> HeliosPlan:
    quick = args.quick
    parts = args.part or (QUICK_PARTS if quick else PARTS)
    for name, part in OF_ONE_PART.items():
        if getattr(args, name) is not None and part not in parts:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: goes with --part {part}; leave it out", param=option)
    memory = None if args.memory_mib is None else int(args.memory_mib * 2**20)
    return HeliosPlan(
        pair=tuple(args.pair),
        catalogue=catalogue,
        parts=[part for part in PARTS if part in parts],
        slos=args.slo,
        requests=args.requests or (QUICK_REQUESTS if quick else REQUESTS),
        rounds=args.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        interval=args.interval or (QUICK_INTERVAL if quick else INTERVAL),
        profile_requests=args.profile_requests,
        thresholds=args.threshold or (QUICK_TAUS if quick else TAUS),
        intervals=args.intervals or (QUICK_RIS if quick else RIS),
        batch=args.batch,
        rows=args.rows,
        memory_bytes=memory,
        shadows=args.shadows,
        threads=args.threads,
        seed=args.seed,
        limits=args.changed or (QUICK_SHARES if quick else SHARES),
    )


def _catalogue(pair: Sequence[str], given: str | None, folder: Path) -> str | None:
    """The pair's catalogue; for a pair without one, the models with nothing on record.

    Raises:
        ConfigError: The models have different tokenizers, or cannot be served.
    """
    if given is not None or tuple(pair) == BUNDLED:
        return given
    models = [inspect(name) for name in pair]
    require_one_tokenizer(models, named_in="--pair")
    file = folder / "catalogue.yaml"
    write_catalogue(file, [(m.source, m) for m in models], Measurement())
    return str(file)
