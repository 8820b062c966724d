"""`python -m quadriga.gguf FILE`: convert a GGUF file ahead of time, and print the folder.

With `--plain FOLDER` it writes a checkpoint there that other programs read as well.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quadriga.errors import ConfigError
from quadriga.files import cache_folder
from quadriga.gguf.cache import converted_folder, plain_folder


def main(arguments: list[str] | None = None) -> int:
    """Convert. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quadriga.gguf", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="GGUF file")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="the service's engine.cache_dir, where that is set"
    )
    parser.add_argument(
        "--plain",
        type=Path,
        metavar="FOLDER",
        help="write an ordinary Hugging Face checkpoint into this new or empty folder, quantised "
        "matrices as float32, instead of what the service keeps in its cache",
    )
    options = parser.parse_args(arguments)
    try:
        if options.plain is not None:
            print(plain_folder(options.file.resolve(), options.plain.resolve()))
        else:
            print(converted_folder(options.file.resolve(), cache_folder(options.cache_dir)))
    except ConfigError as exc:
        print(f"quadriga: {exc.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
