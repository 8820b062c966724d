"""`python -m loadgen profile`: fill a catalogue with what models do on this machine.

Each model is loaded at each of its exits and whole, every time in a fresh process: what it takes in
memory, how long loading takes, a decode step at several batches, a prefill, answers to the bundled
tasks (accuracy, perplexity, share unchanged at full depth), and energy by the best counter there
is. Whole, it also serves the tasks with every exit tested: where tokens leave, and what one takes
that leaves there. Times are processor time of the engine's thread, so that a busy machine disturbs
them little.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

from rich.console import Console

from loadgen.model_costs.depth import DepthJob
from loadgen.model_costs.exits import ExitRecord
from loadgen.model_costs.subprocesses import END_TIMEOUT_S, python_process, read_line
from loadgen.options import number, whole
from loadgen.report import provenance
from loadgen.report.experiment import say, show
from loadgen.report.figures import shown
from loadgen.report.output import file_to_write
from loadgen.report.progress import Steps
from quadriga.catalogue.energy import DEFAULT_WATTS
from quadriga.catalogue.files import read_catalogue, require_one_tokenizer, write_catalogue
from quadriga.catalogue.inspection import inspect
from quadriga.catalogue.records import CatalogueModel, DepthRecord, Measurement, depth_records
from quadriga.errors import ConfigError

LINE_TIMEOUT_S = 600.0
TABLE_WIDTH = 130
BATCHES, QUICK_BATCHES = (1, 4, 8, 32), (1, 8)
EXAMPLES, QUICK_EXAMPLES = 128, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="bundled id, folder, GGUF file or hub id; default: all of --catalogue",
    )
    parser.add_argument("--catalogue", help="YAML or folder; default: the bundled family")
    parser.add_argument(
        "--output", type=file_to_write, default="catalogue.yaml", help="catalogue to write"
    )
    parser.add_argument(
        "--batches", nargs="+", type=whole(1, 1024), help="of the timed steps; default: 1 4 8 32"
    )
    parser.add_argument(
        "--examples",
        type=whole(0),
        help=f"task prompts a depth; default: {EXAMPLES}; 0 for other models",
    )
    parser.add_argument("--depth", nargs="+", type=whole(1), help="only these depths")
    parser.add_argument("--repeats", type=whole(1), help="of each timing; default: 9")
    parser.add_argument("--threads", type=whole(1), default=1, help="CPU threads of the engine")
    parser.add_argument(
        "--watts",
        type=number(0),
        default=DEFAULT_WATTS,
        help="of a busy thread, where no counter can be read",
    )
    parser.add_argument("--seed", type=whole(0), default=1, help="of the task prompts")
    parser.add_argument("--quick", action="store_true", help="fewer batches, examples and repeats")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")


def run(args: argparse.Namespace) -> int:
    """Measure, write the catalogue, print a table and one JSON line.

    Raises:
        ConfigError: A model or an option cannot be used, or torch is not installed.
    """
    if not has_torch():
        raise ConfigError("profile loads models: in a checkout, pip install '.[loadgen,engine]'")
    models = _models(args)
    console = Console(stderr=True)
    profiled: list[tuple[str, CatalogueModel]] = []
    jobs = [(name, model, _depths(model, args.depth)) for name, model in models]
    batches = tuple(sorted(set(args.batches or (QUICK_BATCHES if args.quick else BATCHES))))
    examples = args.examples
    if examples is None:
        examples = QUICK_EXAMPLES if args.quick else EXAMPLES
    total = sum(len(depths) for *_, depths in jobs) * (1 + len(batches) + examples)
    total += examples * sum(bool(m.exits.layers) and m.num_layers in d for _, m, d in jobs)
    measured = Measurement(
        datetime.now(UTC).isoformat(timespec="seconds"), _machine(), provenance.commit()
    )
    partial = args.output.with_suffix(".partial.yaml")
    say(f"until all is measured, what is stands in {partial}")
    with Steps(console, "profile", total, is_shown=not args.no_progress) as steps:
        for name, model, depths in jobs:
            with tempfile.TemporaryDirectory(prefix="quadriga-profile-") as folder:
                base = DepthJob(
                    model=model.source,
                    depth=0,
                    batches=batches,
                    examples=examples,
                    repeats=args.repeats or (3 if args.quick else 9),
                    threads=args.threads,
                    watts=args.watts,
                    seed=args.seed,
                    answers=folder,
                )
                records = []
                for depth in depths:
                    steps.describe(f"{model.id}@{depth}")
                    records.append(_measure(replace(base, depth=depth), steps))
                    found = name, replace(model, depths=_joined(records))
                    write_catalogue(partial, [*profiled, found], measured)
            profiled.append(found)
    partial.replace(args.output)
    read_catalogue(str(args.output))  # what is written can be read
    _print(profiled)
    line = {
        "profile": str(args.output),
        "models": {m.id: [asdict(r) for r in m.depths] for _, m in profiled},
        **asdict(measured),
    }
    print(json.dumps(line))
    return 0


def has_torch() -> bool:
    """Whether this installation can load models."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:
        return False


Result = tuple[DepthRecord, dict[int, ExitRecord]]


def _models(args: argparse.Namespace) -> list[tuple[str, CatalogueModel]]:
    """(name as the catalogue shall say it, model). Raises: ConfigError."""
    if args.models and args.catalogue is not None:
        raise ConfigError("--catalogue: says which models, and so does MODEL; leave one out")
    if not args.models:
        catalogue = read_catalogue(args.catalogue)
        found = [(m.id if args.catalogue is None else m.source, m) for m in catalogue.models]
    else:
        found = [(model.source, model) for model in map(inspect, args.models)]
        require_one_tokenizer([m for _, m in found], named_in="MODEL")
        ids = [m.id for _, m in found]
        if twice := [one for one in ids if ids.count(one) > 1]:
            raise ConfigError(f"MODEL: two models are called {twice[0]!r}; rename one folder")
    return found


def _depths(model: CatalogueModel, only: Sequence[int] | None) -> list[int]:
    """Depths to measure, the full one last: it reads the others' answers.

    Raises: ConfigError where a depth is no exit.
    """
    for depth in only or ():
        if depth not in model.exit_depths:
            shown = ", ".join(str(d) for d in model.exit_depths)
            raise ConfigError(f"--depth: {depth} is none of {model.id}'s exits ({shown})")
    return sorted(set(only)) if only else list(model.exit_depths)


def _measure(job: DepthJob, steps: Steps) -> Result:
    """Run one job in a fresh process. Raises: ConfigError when it ends or falls silent."""
    with python_process(["-m", "loadgen.model_costs.depth", json.dumps(asdict(job))]) as process:
        while True:
            line = json.loads(read_line(process, LINE_TIMEOUT_S))
            if "record" in line:
                break
            steps.advance(line["done"])
        process.wait(END_TIMEOUT_S)
    record = line["record"] | {"step_s": tuple((b, s) for b, s in line["record"]["step_s"])}
    return DepthRecord(**record), {int(k): ExitRecord(**seen) for k, seen in line["exits"].items()}


def _joined(results: Sequence[Result]) -> tuple[DepthRecord, ...]:
    """Records with what the full depth said of the others."""
    exits: dict[int, ExitRecord] = {}
    for _, said in results:
        exits |= said
    return depth_records(
        replace(record, **asdict(exits.get(record.depth, ExitRecord()))) for record, _ in results
    )


def _machine() -> str:
    facts = provenance.machine()
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB"


def _print(profiled: Sequence[tuple[str, CatalogueModel]]) -> None:
    columns: dict[str, Callable[[tuple[CatalogueModel, DepthRecord]], object]] = {
        "model": lambda row: row[0].id,
        "layers": lambda row: f"{row[1].depth}/{row[0].num_layers}",
        "step ms": lambda row: " ".join(f"{1e3 * s:.2f}" for _, s in row[1].step_s),
        "tokens/s": lambda row: f"{row[1].best_tokens_per_s:,.0f}",
        "TTFT ms": lambda row: f"{1e3 * (row[1].ttft_s or 0):.1f}",
        "right": lambda row: shown(row[1].accuracy, ".1%"),
        "perplexity": lambda row: shown(row[1].perplexity, ".3f"),
        "unchanged": lambda row: shown(row[1].unchanged, ".1%"),
        "left": lambda row: shown(row[1].coverage, ".1%"),
        "memory MB": lambda row: f"{(row[1].memory_bytes or 0) / 1e6:.1f}",
        "load s": lambda row: f"{row[1].load_s or 0:.2f}",
        "mJ/token": lambda row: _energy(row[1]),
    }
    rows = [(model, record) for _, model in profiled for record in model.depths]
    show(rows, columns, title="on this machine", width=TABLE_WIDTH)


def _energy(record: DepthRecord) -> str:
    mark = "~" if record.energy_source == "estimate" else ""
    joules = record.joules_per_token
    return shown(joules) if joules is None else f"{mark}{1e3 * joules:.2f}"
