"""Read files of one JSON object or one text a line, plain or gzip, with bounds on everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadgen.load.packed import read_lines
from quadriga.errors import ConfigError

MAX_ROWS = 1_000_000
MAX_LINE_BYTES = 16 << 20


def read_objects(
    path: Path,
    *,
    param: str,
    limit: int | None = None,
    max_rows: int = MAX_ROWS,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where it stands, object); blank lines are skipped.

    Args:
        param: The option that names the file, for errors.
        limit: Stop after this many; what follows is not looked at.

    Raises:
        ConfigError: The file cannot be read, is empty, or a line is too long or no object in UTF-8.
    """
    for where, line in _lines(path, param, limit, max_rows, max_line_bytes):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{where}: not JSON: {exc}", param=param) from exc
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: must be a JSON object", param=param)
        yield where, row


def read_texts(path: Path, *, param: str, limit: int | None = None) -> Iterator[str]:
    """Yield each line that is not blank, without space around it.

    Args:
        param, limit: See `read_objects`.

    Raises:
        ConfigError: The file cannot be read, is empty, or a line is too long or not UTF-8.
    """
    for _, line in _lines(path, param, limit, MAX_ROWS, MAX_LINE_BYTES):
        yield line.strip()


def _lines(
    path: Path, param: str, limit: int | None, max_rows: int, max_line_bytes: int
) -> Iterator[tuple[str, str]]:
    count = 0
    for number, line in read_lines(path, param=param, max_bytes=max_line_bytes):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        if count == max_rows:
            raise ConfigError(f"{where}: more than {max_rows} rows", param=param)
        count += 1
        yield where, line
        if count == limit:
            break
    if not count:
        raise ConfigError(f"{path}: no rows in it", param=param)
