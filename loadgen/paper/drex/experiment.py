"""`python -m loadgen paper drex`: rebatching against grouped exits and against no exits at all.

Every policy decodes the same task prompts on the real engine, one decode loop, one thread, with the
same slots; prompts are computed outside the clock. Rounds are interleaved and medians reported. No
exits is the engine's fastest full pass; where DREX should hold more bytes than it (KV, kept hidden
states and staging are counted), it gets more slots for them.

Printed beside the throughput: the ceiling t_f / (t_s + (1 − p) t_d) from this machine's own pass
times with the heads in them, and the same comparison in the modelled time of a weight-bound device.
`--quality` measures answers instead: every fill mode and threshold against full depth.
"""

from __future__ import annotations

import argparse
from typing import get_args

from loadgen.options import number_from, whole
from loadgen.paper.clocks import ProcessorClock
from loadgen.paper.drex.bench import DrexBench, DrexRow
from loadgen.paper.drex.closed_loop import check_prompts
from loadgen.paper.drex.quality import run_quality
from loadgen.paper.drex.report import headline, plain, print_table, read_rows, write_plot
from loadgen.report.experiment import keep_rows, publish, say
from loadgen.report.output import add_out_argument
from quadriga.checkpoint.exits import SkippedKV
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import SystemClock
from quadriga.errors import ConfigError
from quadriga.policies.rebatchers import POLICIES

_LESS_SURE = 0.9  # beside the model's own threshold
_QUICK = ("drex", "lazy", "off")  # the policies that keep the answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model",
        nargs="+",
        default=["quadriga-s", "quadriga-l"],
        metavar="ID",
        help="bundled ids or checkpoint folders",
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        type=whole(1),
        default=[],
        help="slots; default: 4 8 16 32 64, with --quick 8 32",
    )
    parser.add_argument(
        "--threshold",
        nargs="+",
        type=number_from(0, 1),
        default=[],
        metavar="T",
        help=f"default: the model's own, and {_LESS_SURE}",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        choices=POLICIES,
        default=[],
        help="default: all; with --quick, those that keep the answers",
    )
    parser.add_argument(
        "--fill",
        nargs="+",
        choices=get_args(SkippedKV),
        default=[],
        help="default: the service's choice; with --quality, all",
    )
    parser.add_argument(
        "--replay-newest",
        type=whole(0),
        metavar="N",
        help="skipped positions run again; default: the model's own",
    )
    parser.add_argument(
        "--prompts",
        type=whole(1),
        default=None,
        help="task prompts in a run; default: 6 a slot, at least 128",
    )
    parser.add_argument("--rounds", type=whole(1), help="default: 3, with --quick 1")
    parser.add_argument("--threads", type=whole(1), default=1, help="CPU threads of the engine")
    parser.add_argument("--max-tokens", type=whole(2), default=400, help="of an answer")
    parser.add_argument(
        "--clock",
        choices=("processor", "wall"),
        default="processor",
        help="processor: of the one thread, which others blur less",
    )
    parser.add_argument("--quick", action="store_true", help="a few settings, within 5 minutes")
    parser.add_argument("--quality", action="store_true", help="answers by fill mode and threshold")
    parser.add_argument("--per-task", type=whole(1), default=64, help="prompts, with --quality")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep what is in DIR of models that are not measured now",
    )
    add_out_argument(parser, "results/paper")


def run(args: argparse.Namespace) -> int:
    """Measure all settings; returns 0."""
    if args.quality:
        return run_quality(args)
    if len(args.fill) > 1:
        raise ConfigError("--fill: give one, or --quality", param="fill")
    args.batch = args.batch or ([8, 32] if args.quick else [4, 8, 16, 32, 64])
    if args.prompts:
        check_prompts(args.prompts, max(args.batch))
    policies = args.policy or (_QUICK if args.quick else POLICIES)
    kept = read_rows(args.out / "drex.json") if args.keep else []
    rows: list[DrexRow] = []
    for model in args.model:
        own = read_checkpoint(model).exits.threshold
        thresholds = args.threshold or ([own] if args.quick else sorted({own, _LESS_SURE}))
        for batch in args.batch:
            bench = DrexBench.load(
                model,
                batch,
                fill=args.fill[0] if args.fill else None,
                replay_newest=args.replay_newest,
                num_prompts=args.prompts or max(128, 6 * batch),
                threads=args.threads,
                max_tokens=args.max_tokens,
                clock=SystemClock() if args.clock == "wall" else ProcessorClock(),
                say=say,
            )
            rounds = args.rounds or (1 if args.quick else 3)
            rows += bench.measure(policies, thresholds, rounds)
            if not args.quick or batch == max(args.batch):
                rows += bench.measure_modelled(policies, own)
            keep_rows("drex", [plain(row) for row in rows], args.out)
    measured = {row.setting.model for row in rows}
    rows += [row for row in kept if row.setting.model not in measured]
    print_table(rows)
    say(f"plot: {write_plot(rows, args.out / 'drex.png')}")
    publish("drex", headline(rows), [plain(row) for row in rows], args.out)
    return 0
