"""Command-line options of `run`, and of the other commands that talk to a service."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

from loadgen.arrivals import FORMS
from quadriga.errors import ConfigError

API_KEY_VARIABLE = "QUADRIGA_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add_service_arguments(parser)
    parser.add_argument("--transport", choices=("http", "grpc"), default="http")
    _add_load(parser)
    _add_shape(parser)
    measure = parser.add_argument_group("measurement")
    measure.add_argument("--seed", type=whole(0), default=0)
    measure.add_argument(
        "--warmup", type=whole(0), default=2, help="requests sent one by one before the clock"
    )
    measure.add_argument("--slo-ttft-s", type=number(0), help="goodput: limit of TTFT, seconds")
    measure.add_argument("--slo-tpot-s", type=number(0), help="goodput: limit of TPOT, seconds")
    measure.add_argument(
        "--honour-retry-after",
        type=whole(0),
        default=0,
        metavar="TIMES",
        help="send a refused request again after its Retry-After, this often",
    )
    measure.add_argument(
        "--verify-text",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="afterwards, compare each text with /detokenize of its token ids",
    )
    measure.add_argument("--output", help="folder (default: results/loadgen/TIME)")
    measure.add_argument("--no-plots", action="store_true")
    measure.add_argument("--no-progress", action="store_true")


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the service is and how to reach it."""
    service = parser.add_argument_group("service")
    service.add_argument("--url", default="http://127.0.0.1:8000", help="HTTP base URL")
    service.add_argument("--grpc", default="127.0.0.1:9000", help="gRPC host:port")
    service.add_argument("--model", help="default: the first that the service lists")
    service.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE),
        help=f"default: ${API_KEY_VARIABLE}",
    )
    service.add_argument("--api-key-file", type=Path, help="file with the key, instead")
    service.add_argument("--ca-file", help="certificates to trust for https and TLS gRPC")
    service.add_argument("--grpc-tls", action="store_true", help="TLS on the gRPC channel")
    service.add_argument(
        "--timeout-s", type=number(0), default=600.0, help="limit of one request, seconds"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load (one of the three)")
    source = load.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, help="CSV(.gz) of [arrival_s,]input_tokens,output_tokens"
    )
    source.add_argument("--prompts", type=Path, help="JSON lines(.gz): prompt, answer, max_tokens")
    source.add_argument("--tasks", type=whole(1), metavar="N", help="N task prompts, scored")
    load.add_argument("--arrivals", help=f"{FORMS}; default: trace for traces, else closed:8")
    load.add_argument("--limit", type=whole(1), help="use the first N rows")
    load.add_argument(
        "--time-scale",
        type=number(0),
        default=1.0,
        help="factor of arrival times; 0.5: twice as fast",
    )
    load.add_argument("--cap-input", type=whole(1), help="cut longer inputs to this many tokens")
    load.add_argument("--cap-output", type=whole(1), help="cut longer outputs to this many tokens")
    load.add_argument(
        "--scale-lengths",
        help="factor for both lengths, or `auto`: 99%% of the rows fit the model's context",
    )
    load.add_argument("--vocab-size", type=whole(2), help="draw prompt ids below this")
    load.add_argument("--task-names", help="comma-separated; default: all equally")
    load.add_argument(
        "--fit-prompts", action="store_true", help="cut prompts to the context; sends token ids"
    )


def _add_shape(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("requests")
    shape.add_argument("--endpoint", choices=("completions", "chat", "both"), default="completions")
    shape.add_argument("--stream", choices=("true", "false", "both"), default="true")
    shape.add_argument("--max-tokens", type=whole(1), help="output limit; not for traces")
    shape.add_argument("--temperature", type=number(-1e-9), default=0.0)
    shape.add_argument("--choices", type=whole(1), default=1, help="n: choices per request")
    shape.add_argument(
        "--extra", help='further body fields, e.g. \'{"top_p": 0.9, "priority": 1}\''
    )


def api_key(args: argparse.Namespace) -> str | None:
    """Return the key to send, from the file where one is given.

    Raises:
        ConfigError: The file cannot be read or holds no key.
    """
    if args.api_key_file is None:
        return args.api_key or None
    try:
        key: str = args.api_key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--api-key-file: {exc}", param="api-key-file") from exc
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"--api-key-file: {args.api_key_file} holds no key", param="api-key-file")
    return key


def whole(minimum: int, maximum: int = 2**53) -> Callable[[str], int]:
    """Return an argparse type: a whole number in range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} must be in {minimum}..{maximum}")
        return value

    return parse


def number(above: float, maximum: float = 1e9) -> Callable[[str], float]:
    """Return an argparse type: a finite number above a limit."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value <= maximum:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a number above {above:g}, at most {maximum:g}"
            )
        return value

    return parse
