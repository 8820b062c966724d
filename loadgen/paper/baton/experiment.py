"""`python -m loadgen paper baton`: the relay batch against other ways to batch.

The paper's two query sets (see `baton.queries`) through contestants (see `baton.contestants`),
on an unmodified `transformers` model. As in the paper, whose methods all "apply asynchronous P&D
decoupling" on one GPU, every contestant has the same single core for everything: one that splits
prefill off computes it on that core too, in the same thread, and its time counts. Time is
processor time of that thread, which on a quiet machine is the time by the wall; wall time stands
beside it.

Every round draws the sets anew, the contestants run one after the other in each, and ratios are
taken inside a round; printed are medians. All contestants must give the same tokens.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from loadgen.bench.engines.agreement import compare
from loadgen.model_costs.engine import engine_spec
from loadgen.options import number, whole
from loadgen.paper.baton.contestants import CONTESTANTS, rows_needed
from loadgen.paper.baton.queries import (
    BRIEF_WORDS,
    Query,
    brief_queries,
    mixed_queries,
    step_ceiling,
)
from loadgen.paper.baton.record import BatonRow, BatonSetting, QueryRecord
from loadgen.paper.baton.report import as_row, headline, print_table, write_plots
from loadgen.report.experiment import keep_rows, publish, say
from loadgen.report.output import add_out_argument
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.engine.baton.runner import BatonRunner
from quadriga.errors import ConfigError, InvariantViolation

BRIEF_CONTESTANTS = ("run_to_completion", "baton")
"""In the second set only these are compared, as in the paper."""
QUICK_CONTESTANTS = ("run_to_completion", "orca", "baton")
"""Those of the headline."""
TIE_LOGITS = 1e-3
"""Batches of another shape round otherwise, over the whole model by up to so much."""
_SEED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model", default="quadriga-s", metavar="ID", help="bundled id or checkpoint folder"
    )
    parser.add_argument(
        "--queries",
        nargs=2,
        type=whole(1),
        default=[120, 30],
        metavar="N",
        help="in the first set, a multiple of 4, and in the second",
    )
    parser.add_argument(
        "--batch-mixed",
        nargs="*",
        type=whole(1),
        default=[4, 8],
        metavar="B",
        help="batch sizes of the first set",
    )
    parser.add_argument(
        "--batch-brief",
        nargs="*",
        type=whole(1),
        default=[2, 4, 6, 8, 10],
        metavar="B",
        help="batch sizes of the second set",
    )
    parser.add_argument(
        "--scale", type=number(0), default=0.05, help="tokens per word of the paper's first set"
    )
    parser.add_argument(
        "--brief-words",
        nargs=2,
        type=whole(1),
        default=list(BRIEF_WORDS),
        metavar="N",
        help="shortest and longest of the second set",
    )
    parser.add_argument(
        "--spread",
        choices=("pareto", "uniform"),
        default="pareto",
        help="of the short lengths between their limits",
    )
    parser.add_argument(
        "--contestant",
        nargs="+",
        choices=tuple(CONTESTANTS),
        help="to compare; default: all, with --quick the headline's",
    )
    parser.add_argument("--rounds", type=whole(1), help="default: 3, with --quick 1")
    parser.add_argument("--seed", type=whole(0), default=_SEED, help="of everything random")
    parser.add_argument(
        "--quick", action="store_true", help="one round, headline only, within 5 minutes"
    )
    add_out_argument(parser, "results/paper")


def run(args: argparse.Namespace) -> int:
    """Measure all settings; returns 0."""
    args.contestant = args.contestant or list(QUICK_CONTESTANTS if args.quick else CONTESTANTS)
    args.rounds = args.rounds or (1 if args.quick else 3)
    settings = [BatonSetting("mixed", args.queries[0], b) for b in args.batch_mixed]
    settings += [BatonSetting("brief", args.queries[1], b) for b in args.batch_brief]
    if not settings:
        raise ConfigError("--batch-mixed, --batch-brief: give one of them a size")
    loaded = _load(args, settings)
    rows: dict[tuple[BatonSetting, str], BatonRow] = {}
    for round_ in range(args.rounds):
        for setting in settings:
            for measured in _compare(loaded, setting, args, round_):
                row = rows.setdefault((setting, measured.contestant), measured)
                if row is not measured:
                    _add(row, measured)
                say(
                    f"round {round_ + 1}, {setting.name} set, batch {setting.batch}: "
                    f"{measured.contestant} {measured.seconds:.1f} s"
                )
                keep_rows("baton", [as_row(r) for r in rows.values()], args.out)
    print_table(list(rows.values()))
    for path in write_plots(list(rows.values()), args.out):
        say(f"plot: {path}")
    publish("baton", headline(list(rows.values())), [as_row(r) for r in rows.values()], args.out)
    return 0


def _compare(
    loaded: BatonRunner, setting: BatonSetting, args: argparse.Namespace, round_: int
) -> Iterator[BatonRow]:
    """One round of every contestant; the one that goes first changes from round to round."""
    queries = draw(setting, args, round_, loaded.geometry.vocab_size)
    names = [c for c in args.contestant if setting.name == "mixed" or c in BRIEF_CONTESTANTS]
    shift = round_ % max(1, len(names))
    wanted: dict[int, list[int]] | None = None
    for name in names[shift:] + names[:shift]:
        started_s = time.monotonic()
        record = run_one(loaded, name, queries, setting.batch)
        measured = BatonRow(setting, name, [record], [time.monotonic() - started_s])
        measured.ceilings.append(step_ceiling(queries, setting.batch))
        if wanted is None:
            wanted = record.outputs
        measured.ties = count_ties(loaded, queries, wanted, record.outputs)
        yield measured


def count_ties(
    loaded: BatonRunner,
    queries: Sequence[Query],
    wanted: Mapping[int, Sequence[int]],
    got: Mapping[int, Sequence[int]],
) -> int:
    """Queries whose tokens part where the two best logits are equal up to rounding.

    Raises:
        InvariantViolation: Tokens part anywhere else, or some are missing.
    """
    ours, theirs = ([tokens.get(q.index, ()) for q in queries] for tokens in (got, wanted))
    prompts = [q.prompt_ids for q in queries]
    found = compare(loaded.model.unwrapped, prompts, ours, theirs, tie_logits=TIE_LOGITS)
    if found.different:
        raise InvariantViolation(found.describe())
    return found.ties


def run_one(
    loaded: BatonRunner, contestant: str, queries: Sequence[Query], batch: int
) -> QueryRecord:
    """Run one contestant over the queries, with rows and memory of its own."""
    capacity = row_capacity(queries)
    spec = replace(loaded.spec, num_rows=rows_needed(batch), row_capacity_tokens=capacity)
    runner = BatonRunner(spec, loaded.model, loaded.geometry)
    record = QueryRecord(time.thread_time)
    gc.collect()
    record.begin()
    CONTESTANTS[contestant](runner, record, queries, batch)
    record.end()
    return record


def row_capacity(queries: Sequence[Query]) -> int:
    """The longest row of any contestant: rows that idle go on until the longest answer is done."""
    return max(len(q.prompt_ids) for q in queries) + max(q.num_output for q in queries)


def draw(
    setting: BatonSetting, args: argparse.Namespace, round_: int, vocab_size: int
) -> list[Query]:
    """The round's queries."""
    seed = args.seed + 1000 * round_
    if setting.name == "brief":
        return brief_queries(
            count=setting.num_queries,
            spread=args.spread,
            seed=seed,
            vocab_size=vocab_size,
            words=tuple(args.brief_words),
        )
    return mixed_queries(
        count=setting.num_queries,
        batch=setting.batch,
        scale=args.scale,
        spread=args.spread,
        seed=seed,
        vocab_size=vocab_size,
    )


def _load(args: argparse.Namespace, settings: Sequence[BatonSetting]) -> BatonRunner:
    """Read the model, try it at the longest row there will be, and warm it up."""
    checkpoint = read_checkpoint(args.model)
    capacity = max(
        row_capacity(draw(setting, args, round_, checkpoint.vocab_size))
        for setting in settings
        for round_ in range(args.rounds)
    )
    runner = BatonRunner.load(
        engine_spec(
            checkpoint, num_rows=1, row_capacity_tokens=capacity, compile="off", runner="baton"
        )
    )
    warm = brief_queries(
        count=8, spread="uniform", seed=0, vocab_size=runner.geometry.vocab_size, words=(4, 24)
    )
    for name in args.contestant:
        run_one(runner, name, warm, 4)
    return runner


def _add(row: BatonRow, more: BatonRow) -> None:
    """Add a round. Only the first keeps what the plots need."""
    for record in more.records:
        record.outputs = {}
    row.records += more.records
    row.wall_s += more.wall_s
    row.ceilings += more.ceilings
    row.ties += more.ties
