"""`python -m serve_app keys`: make an API key, or hash one there is, for a key file.

    python -m serve_app keys --name alice --requests-per-s 5 >> keys

The line for the file goes to standard output, the key itself, shown once, to standard error.
"""

from __future__ import annotations

import argparse
import sys

from quadriga.errors import ConfigError
from serve_app.auth.keys import ApiKey, KeyLimits, digest, make_key, parse_lines
from serve_app.cli.arguments import ServeParser

MIN_OWN_KEY_CHARS = 32
_EXAMPLES = """examples:
  python -m serve_app keys --name alice --requests-per-s 5 >> keys
  python -m serve_app keys --name operator --admin >> keys"""


def key_command(argv: list[str]) -> int:
    """Parse, make, print. Returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        key = sys.stdin.readline().strip() if options.stdin else make_key()
        if len(key) < MIN_OWN_KEY_CHARS or not key.isascii() or len(key.split()) != 1:
            raise ConfigError(
                f"--stdin: a key has at least {MIN_OWN_KEY_CHARS} ASCII characters and no spaces; "
                "leave --stdin out to have one made"
            )
        if len(options.name.split()) != 1 or options.name.startswith("#"):
            raise ConfigError(f"--name: {options.name!r} must be one word; # begins a comment")
        limits = KeyLimits(options.requests_per_s, options.tokens_per_min, options.concurrency)
        made = ApiKey(options.name, digest(key), limits, options.admin, options.cache_salt)
        line = made.line()
        parse_lines([line], "this command")  # the same checks as when it is read
    except ConfigError as exc:
        print(f"quadriga: {exc.message}", file=sys.stderr)
        return 2
    if not options.stdin:
        print(f"key: {key}", file=sys.stderr)
    print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ServeParser(
        prog="python -m serve_app keys",
        description=(
            "Make an API key, or hash one there is. Its line for a key file goes to standard\n"
            "output; the key itself, shown once, to standard error. Without a limit there is none."
        ),
        epilog=_EXAMPLES,
    )
    parser.add_argument("--name", required=True, help="who has it, without spaces; appears in logs")
    parser.add_argument(
        "--requests-per-s", type=float, metavar="X", help="calls a second, on average"
    )
    parser.add_argument(
        "--tokens-per-min", type=float, metavar="X", help="of prompts and output, on average"
    )
    parser.add_argument("--concurrency", type=int, metavar="N", help="generations at once")
    parser.add_argument(
        "--cache-salt", default="", metavar="NAME", help="shares computed prompts with keys of NAME"
    )
    parser.add_argument(
        "--admin", action="store_true", help="may also see metrics and the admin port"
    )
    parser.add_argument(
        "--stdin", action="store_true", help="hash the key on standard input; 32 characters or more"
    )
    return parser
