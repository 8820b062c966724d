"""Where the service is and how to reach it, and the types of command-line options."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

from loadgen.load.sessions import Span
from quadriga.errors import ConfigError

API_KEY_VARIABLE = "QUADRIGA_API_KEY"
MAX_USERS = 10_000_000
MAX_TIMEOUT_S = 86_400.0


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


def span(minimum: int, maximum: int) -> Callable[[str], Span]:
    """Return an argparse type: `N` or `LOW-HIGH`, whole numbers in range."""
    bound = whole(minimum, maximum)

    def parse(text: str) -> Span:
        low, dash, high = text.partition("-")
        found = Span(bound(low), bound(high if dash else low))
        if found.low > found.high:
            raise argparse.ArgumentTypeError(f"{text!r}: {found.low} is above {found.high}")
        return found

    return parse


def number_span(above: float, maximum: float) -> Callable[[str], tuple[float, float]]:
    """Return an argparse type: `N` or `LOW-HIGH`, numbers above a limit."""
    bound = number(above, maximum)

    def parse(text: str) -> tuple[float, float]:
        low, dash, high = text.partition("-")
        found = (bound(low), bound(high if dash else low))
        if found[0] > found[1]:
            raise argparse.ArgumentTypeError(f"{text!r}: {found[0]:g} is above {found[1]:g}")
        return found

    return parse


def count_or_path(text: str) -> int | Path:
    """An argparse type: a number of users, or a file."""
    return whole(1, MAX_USERS)(text) if text.isascii() and text.isdecimal() else Path(text)


def number_from(minimum: float, maximum: float) -> Callable[[str], float]:
    """Return an argparse type: a finite number in range, both ends included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a number in {minimum:g}..{maximum:g}"
            )
        return value + 0.0  # no -0.0

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
