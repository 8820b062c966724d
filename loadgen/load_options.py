"""Command-line options of the commands that send a load: what is sent, how, and what is kept."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadgen.load.arrivals import FORMS
from loadgen.load.sessions import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_THINK_S,
    DEFAULT_TURN_TOKENS,
    DEFAULT_TURNS,
    MAX_TURNS,
)
from loadgen.load.traces import MAX_TOKENS
from loadgen.options import (
    MAX_USERS,
    add_service_arguments,
    count_or_path,
    number,
    number_from,
    span,
    whole,
)
from loadgen.report.output import folder_to_write

MAX_WARM_UP = 10_000
MAX_RETRIES = 1_000
MAX_CHOICES = 128
MAX_TEMPERATURE = 100.0
MAX_FACTOR = 1e6
MAX_THINK_S = 3600.0
_EXAMPLES = """examples:
  python -m loadgen run
  python -m loadgen run --prompts questions.txt --same-as results/loadgen/before
  python -m loadgen run --tasks 50
  python -m loadgen run --trace azure.csv.gz --limit 300 --scale-lengths auto
  python -m loadgen run --prompts prompts.jsonl --arrivals poisson:5 --transport grpc
  python -m loadgen run --sessions 20 --turns 3-8 --think-s 2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.epilog = _EXAMPLES
    add_service_arguments(parser)
    load = add_load_arguments(parser)
    load.add_argument("--arrivals", help=f"{FORMS}; default: trace for traces, else closed:8")
    add_request_arguments(parser)
    measure = add_measurement_arguments(parser)
    measure.add_argument(
        "--slo-ttft-s", type=number(0), metavar="SECONDS", help="goodput: limit of TTFT"
    )
    measure.add_argument(
        "--slo-tpot-s", type=number(0), metavar="SECONDS", help="goodput: limit of TPOT"
    )
    measure.add_argument(
        "--same-as",
        type=Path,
        metavar="RUN",
        help="folder or file of an earlier run of the same load: each answer must be the same, as "
        "greedy and seeded ones of a deterministic service are",
    )
    measure.add_argument(
        "--honour-retry-after",
        type=whole(0, MAX_RETRIES),
        default=0,
        metavar="TIMES",
        help="send a refused request again after its Retry-After, this often",
    )


def add_load_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add what is sent, the transport included, and return the group."""
    load = parser.add_argument_group(
        "load (one of --trace, --prompts, --tasks, --sessions; none: 100 English questions, or 100 "
        "tasks for a bundled model)"
    )
    source = load.add_mutually_exclusive_group()
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV(.gz) of [arrival_s,]input_tokens,output_tokens",
    )
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="text(.txt, .txt.gz): a question a line, asked as a chat; or JSON lines(.gz): "
        "prompt, answer, max_tokens",
    )
    source.add_argument(
        "--tasks", type=whole(1, MAX_USERS), metavar="N", help="N task prompts, scored"
    )
    source.add_argument(
        "--sessions",
        type=count_or_path,
        metavar="N|FILE",
        help="N made-up conversations of several turns, or JSON lines(.gz) of `messages`",
    )
    load.add_argument(
        "--transport", choices=("http", "grpc"), default="http", help="how requests travel"
    )
    load.add_argument(
        "--limit",
        type=whole(1, MAX_USERS),
        metavar="N",
        help="use the first N rows of a file, or of what is sent without one",
    )
    _add_trace(parser)
    _add_sessions(parser)
    return load


def _add_trace(parser: argparse.ArgumentParser) -> None:
    trace = parser.add_argument_group("load: fitting it to the service")
    trace.add_argument(
        "--time-scale",
        metavar="FACTOR",
        type=number(0, MAX_FACTOR),
        default=1.0,
        help="factor of a trace's arrival times; 0.5: twice as fast",
    )
    trace.add_argument(
        "--cap-input",
        type=whole(1, MAX_TOKENS),
        metavar="N",
        help="cut a trace's longer inputs to this",
    )
    trace.add_argument(
        "--cap-output",
        type=whole(1, MAX_TOKENS),
        metavar="N",
        help="cut a trace's longer outputs to this",
    )
    trace.add_argument(
        "--scale-lengths",
        metavar="FACTOR",
        help="factor for a trace's lengths, or `auto`: 99%% of the rows fit the model's context",
    )
    trace.add_argument(
        "--vocab-size", type=whole(2, MAX_TOKENS), metavar="N", help="draw prompt ids below this"
    )
    trace.add_argument(
        "--task-names", metavar="NAMES", help="comma-separated; default: all equally"
    )
    trace.add_argument(
        "--fit-prompts", action="store_true", help="cut prompts to the context; sends token ids"
    )


def _add_sessions(parser: argparse.ArgumentParser) -> None:
    sessions = parser.add_argument_group("load: conversations (ranges are drawn uniformly)")
    sessions.add_argument(
        "--turns",
        type=span(1, MAX_TURNS),
        default=DEFAULT_TURNS,
        metavar="N|LOW-HIGH",
        help="of each conversation",
    )
    sessions.add_argument(
        "--turn-tokens",
        type=span(1, MAX_TOKENS),
        default=DEFAULT_TURN_TOKENS,
        metavar="N|LOW-HIGH",
        help="said by the user each time (words, over chat)",
    )
    sessions.add_argument(
        "--answer-tokens",
        type=span(1, MAX_TOKENS),
        default=DEFAULT_ANSWER_TOKENS,
        metavar="N|LOW-HIGH",
        help="of each answer; for a FILE see --max-tokens",
    )
    sessions.add_argument(
        "--think-s",
        metavar="SECONDS",
        type=number_from(0, MAX_THINK_S),
        default=DEFAULT_THINK_S,
        help="mean time from an answer to the next turn, exponential",
    )


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how the requests are asked."""
    shape = parser.add_argument_group("requests")
    shape.add_argument(
        "--endpoint",
        choices=("completions", "chat", "both"),
        help="default: completions; chat for --sessions FILE and --prompts FILE.txt",
    )
    shape.add_argument(
        "--stream", choices=("true", "false", "both"), default="true", help="both: in turns"
    )
    shape.add_argument(
        "--max-tokens",
        type=whole(1, MAX_TOKENS),
        metavar="N",
        help="output limit; traces and made-up conversations have their own",
    )
    shape.add_argument(
        "--temperature",
        type=number_from(0, MAX_TEMPERATURE),
        default=0.0,
        metavar="T",
        help="0: greedy",
    )
    shape.add_argument(
        "--choices", type=whole(1, MAX_CHOICES), default=1, metavar="N", help="n: per request"
    )
    shape.add_argument(
        "--extra", metavar="JSON", help='further body fields: \'{"top_p": 0.9, "priority": 1}\''
    )


def add_measurement_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add what every command that measures a service has, and return the group."""
    measure = parser.add_argument_group("measurement")
    measure.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="of prompts, times and sampling"
    )
    measure.add_argument(
        "--warmup",
        metavar="N",
        type=whole(0, MAX_WARM_UP),
        default=2,
        help="requests sent one by one before the clock",
    )
    measure.add_argument(
        "--verify-text",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="afterwards, compare each text with /detokenize of its token ids",
    )
    measure.add_argument(
        "--output", type=folder_to_write, metavar="FOLDER", help="default: results/loadgen/TIME"
    )
    measure.add_argument("--no-plots", action="store_true", help="write figures only")
    measure.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return measure
