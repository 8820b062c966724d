"""`python -m quadriga.gguf FILE`: convert a GGUF file ahead of time, and print the folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quadriga.errors import ConfigError
from quadriga.files import cache_folder
from quadriga.gguf.cache import converted_folder


def main(arguments: list[str] | None = None) -> int:
    """Convert. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quadriga.gguf", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="GGUF file")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="the service's engine.cache_dir, where that is set"
    )
    options = parser.parse_args(arguments)
    try:
        print(converted_folder(options.file.resolve(), cache_folder(options.cache_dir)))
    except ConfigError as exc:
        print(f"quadriga: {exc.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
