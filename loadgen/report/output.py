"""Where results go: tried before anything is measured, not when the results are there."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quadriga.errors import ConfigError

RESULTS_FOLDER = Path("results/loadgen")


def folder_to_write(text: str) -> Path:
    """An argparse type: a folder that can be written to, or made. Give defaults as text."""
    folder = Path(text)
    try:
        _try_folder(folder)
    except OSError as exc:
        raise argparse.ArgumentTypeError(
            f"nothing can be written to {text}: {exc.strerror or exc}; choose another folder"
        ) from None
    return folder


def file_to_write(text: str) -> Path:
    """An argparse type: a file that can be written. Nothing is made, and nothing changed in it."""
    path = Path(text)
    try:
        if path.exists():
            with path.open("ab"):
                pass
        else:
            _try_folder(path.parent)
    except OSError as exc:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: {exc.strerror or exc}; choose another file"
        ) from None
    return path


def add_out_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--out`, the folder of an experiment's files, as `args.out`."""
    parser.add_argument(
        "--out", type=folder_to_write, default=default, metavar="DIR", help="folder for figures"
    )


@contextmanager
def output_folder(wanted: Path | None, name: str = "") -> Iterator[Path]:
    """Yield the folder for the results of a command, made before anything is measured.

    One that was not there before is removed again where nothing came into it.

    Args:
        wanted: `--output`; None makes a new folder named by the time.

    Raises:
        ConfigError: It cannot be made, or nothing can be written there.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = wanted or RESULTS_FOLDER / f"{name}{stamp}-{os.getpid()}"
    was_there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _try_folder(folder)
    except OSError as exc:
        raise ConfigError(
            f"--output: nothing can be written to {folder}: {exc.strerror or exc}", param="output"
        ) from exc
    try:
        yield folder
    finally:
        if not was_there:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


def _try_folder(folder: Path) -> None:
    """Write something into a folder, or into the one it would be made in. Raises: OSError."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass
