"""Where the service is and how to reach it, and the types of command-line options."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from loadgen.load.sessions import WholeRange
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.config.loader import load_config
from quadriga.errors import ConfigError

N = TypeVar("N", int, float)
API_KEY_VARIABLE = "QUADRIGA_API_KEY"
MAX_USERS = 10_000_000
MAX_TIMEOUT_S = 86_400.0
UNLIMITED = 2**53


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the service is and how to reach it."""
    service = parser.add_argument_group("service")
    service.add_argument("--url", default="http://127.0.0.1:8000", help="HTTP base URL")
    service.add_argument(
        "--grpc", default="127.0.0.1:9000", metavar="ADDRESS", help="gRPC host:port"
    )
    service.add_argument("--model", help="default: the first that the service lists")
    service.add_argument("--api-key", metavar="KEY", help=f"default: ${API_KEY_VARIABLE}")
    service.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the key, instead"
    )
    service.add_argument(
        "--ca-file", metavar="FILE", help="certificates to trust for https and TLS gRPC"
    )
    service.add_argument("--grpc-tls", action="store_true", help="TLS on the gRPC channel")
    service.add_argument(
        "--timeout-s",
        type=number(0, MAX_TIMEOUT_S),
        default=600.0,
        metavar="SECONDS",
        help="limit of one request",
    )


def api_key(args: argparse.Namespace) -> str | None:
    """Return the key to send, from the file where one is given.

    Raises:
        ConfigError: The file cannot be read, or what is given is no key.
    """
    source, key = "--api-key", args.api_key or os.environ.get(API_KEY_VARIABLE, "")
    if args.api_key_file is not None:
        source = f"--api-key-file: {args.api_key_file}"
        try:
            key = args.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"--api-key-file: {exc}", param="api-key-file") from exc
    is_key = key.isascii() and key.isprintable() and (key != "" or args.api_key_file is None)
    if not is_key:
        raise ConfigError(f"{source} holds no key", param="api-key")
    return key or None


def whole(minimum: int, maximum: int = UNLIMITED) -> Callable[[str], int]:
    """Return an argparse type: a whole number in range."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            limit = f"at least {minimum}" if maximum >= UNLIMITED else f"in {minimum}..{maximum}"
            raise argparse.ArgumentTypeError(f"{value} must be {limit}")
        return value

    return whole_number


def span(minimum: int, maximum: int) -> Callable[[str], WholeRange]:
    """Return an argparse type: `N` or `LOW-HIGH`, whole numbers in range."""
    bound = whole(minimum, maximum)
    return lambda text: WholeRange(*_span(text, bound))


def number_span(above: float, maximum: float) -> Callable[[str], tuple[float, float]]:
    """Return an argparse type: `N` or `LOW-HIGH`, numbers above a limit."""
    bound = number(above, maximum)
    return lambda text: _span(text, bound)


def _span(text: str, bound: Callable[[str], N]) -> tuple[N, N]:
    low, dash, high = text.partition("-")
    found = (bound(low), bound(high if dash else low))
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: {found[0]:g} is above {found[1]:g}")
    return found


def setting(text: str) -> str:
    """An argparse type: a setting of the service that a command starts, `key=value`."""
    key, equals, _ = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, as in decode.max_slots=8")
    return text


def add_setting_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, for commands that start a service of their own."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=setting,
        metavar="KEY=VALUE",
        help="a setting of the service that is started (docs/configuration.md); may be repeated",
    )


def check_service(model: str, settings: Sequence[str]) -> None:
    """Look at what a service is to be started with, before anything is.

    Raises:
        ConfigError: The model is not there, or a setting is wrong.
    """
    given = dict(text.split("=", 1) for text in settings)
    config = load_config({"model": model} | given)
    for pool in config.pools:
        read_checkpoint(pool.model, cache_dir=config.engine.cache_dir)


def count_or_path(text: str) -> int | Path:
    """An argparse type: a number of users, or a file."""
    return whole(1, MAX_USERS)(text) if text.isascii() and text.isdecimal() else Path(text)


def number_from(minimum: float, maximum: float) -> Callable[[str], float]:
    """Return an argparse type: a finite number in range, both ends included."""

    def real_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a number in {minimum:g}..{maximum:g}"
            )
        return value + 0.0  # no -0.0

    return real_number


def number(above: float, maximum: float = 1e9) -> Callable[[str], float]:
    """Return an argparse type: a finite number above a limit."""

    def real_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value <= maximum:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a number above {above:g}, at most {maximum:g}"
            )
        return value

    return real_number
