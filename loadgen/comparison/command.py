"""`python -m loadgen compare A B`: is the second better than the first, or is it noise?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.progress import track

from loadgen.comparison.comparable import load_differences, setting_differences
from loadgen.comparison.plots import DISTRIBUTIONS, RATIOS, write_compare_plots
from loadgen.comparison.report import Sides, print_comparison
from loadgen.comparison.runs import ComparedFigure, Method, compare, num_figures, slo_of
from loadgen.options import number, number_from, whole
from loadgen.report import provenance
from loadgen.report.experiment import REPORT_WIDTH, wide_console
from loadgen.report.metrics import LoadSlo
from loadgen.report.output import folder_to_write, output_folder
from loadgen.report.results import read_results
from quadriga.errors import ConfigError

MAX_DRAWS = 100_000
MAX_RUNS = 100
COMPARE_FILE = "compare.json"
MARGIN_PERCENT = 5.0  # of one run a side; the spread of several shows itself
_VERSUS = "vs"
_EXAMPLES = """examples:
  python -m loadgen compare results/loadgen/before results/loadgen/after
  python -m loadgen compare before-1 before-2 before-3 vs after-1 after-2 after-3
  python -m loadgen compare before after --fail-if-worse --margin 10"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folders or run.jsonl files: A B, or A … vs B … with several runs a side",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="compare runs though they had different loads"
    )
    parser.add_argument(
        "--margin",
        type=number_from(0, 100),
        metavar="PERCENT",
        help="smaller differences of latencies and speeds are noise; default: "
        f"{MARGIN_PERCENT:g} with one run a side, 0 with several",
    )
    parser.add_argument(
        "--confidence",
        metavar="SHARE",
        type=number(0.5, 0.999),
        default=0.95,
        help="of the intervals",
    )
    parser.add_argument(
        "--draws", metavar="N", type=whole(100, MAX_DRAWS), default=2000, help="bootstrap samples"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of the bootstrap")
    for name in ("ttft", "tpot"):
        parser.add_argument(
            f"--slo-{name}-s",
            type=number(0, 86_400),
            metavar="SECONDS",
            help="default: the runs' own",
        )
    parser.add_argument(
        "--fail-if-worse",
        action="store_true",
        help="exit with 1 when any figure of B is worse beyond noise",
    )
    parser.add_argument(
        "--output",
        type=folder_to_write,
        metavar="FOLDER",
        help="default: results/loadgen/compare-TIME",
    )
    parser.add_argument("--no-plots", action="store_true", help="write figures only")


def run(args: argparse.Namespace) -> int:
    """Compare; 1 only with `--fail-if-worse`.

    Raises:
        ConfigError: A file is no results file, or the loads differ.
    """
    paths = split_sides(args.runs)
    a, b = ([read_results(path) for path in side] for side in paths)
    reasons = load_differences([*a, *b])
    is_mixed = len({results.header.kind for results in (*a, *b)}) > 1
    if reasons and (is_mixed or not args.anyway):
        advice = "" if is_mixed else "; --anyway compares them all the same"
        raise ConfigError(f"not comparable: {'; '.join(reasons)}{advice}", param="runs")
    slo = slo_of([*a, *b], args.slo_ttft_s, args.slo_tpot_s)
    default = MARGIN_PERCENT if len(a) == 1 else 0.0
    margin = default if args.margin is None else args.margin
    method = Method(margin / 100, args.confidence, args.draws, args.seed)
    console = wide_console(REPORT_WIDTH)
    with output_folder(args.output, "compare-") as folder:
        compared = track(
            compare(a, b, slo, method, same_load=not reasons),
            "figures",
            total=num_figures(a, b, slo),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        rows = [row for row in compared if row is not None]
        if not rows:
            raise ConfigError("not comparable: no figure that all runs have", param="runs")
        _write(folder, (a, b), rows, reasons, slo, method)
        if not args.no_plots:
            write_compare_plots(folder, (a, b), rows)
        print_comparison(console, (a, b), rows, reasons, args.confidence)
        console.print(f"results: {folder}")
    return int(args.fail_if_worse and any(row.verdict == "worse" for row in rows))


def split_sides(words: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the paths of both sides.

    Raises:
        ConfigError: They are no two sides of one run each, or of two or more each.
    """
    where = words.index(_VERSUS) if _VERSUS in words else 1
    rest = words[where + 1 :] if _VERSUS in words else words[where:]
    a, b = [Path(word) for word in words[:where]], [Path(word) for word in rest]
    if _VERSUS in rest or not a or not b:
        raise ConfigError("give two runs, A B, or several a side: A … vs B …", param="runs")
    if _VERSUS not in words and len(b) > 1:
        raise ConfigError(
            f"{len(words)} runs: write `vs` between the sides, A … vs B …", param="runs"
        )
    if (len(a) == 1) != (len(b) == 1) or max(len(a), len(b)) > MAX_RUNS:
        raise ConfigError(
            f"{len(a)} and {len(b)} runs: one each, or 2..{MAX_RUNS} each", param="runs"
        )
    return a, b


def _write(
    folder: Path,
    sides: Sides,
    rows: Sequence[ComparedFigure],
    reasons: Sequence[str],
    slo: LoadSlo,
    method: Method,
) -> None:
    a, b = (
        [{"file": str(results.path), **results.header.model_dump()} for results in side]
        for side in sides
    )
    document = {
        "kind": "comparison",
        "a": a,
        "b": b,
        "different_load": list(reasons),
        "different_settings": setting_differences(sides[0][0], sides[1][0]),
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "intervals": {
            "method": "welch" if len(a) > 1 else "block bootstrap",
            "margin_share": method.margin_share,
            "confidence": method.confidence,
            "draws": method.num_draws,
            "seed": method.seed,
        },
        "rows": [row.as_dict() for row in rows],
        "commit": provenance.commit(),
    }
    for earlier in (DISTRIBUTIONS, RATIOS):
        (folder / earlier).unlink(missing_ok=True)
    text = json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)
    (folder / COMPARE_FILE).write_text(text + "\n", encoding="utf-8")
