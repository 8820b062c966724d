"""Read files that may be gzip, whatever their name says, with a bound on their lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from quadriga.errors import ConfigError

GZIP_MAGIC = b"\x1f\x8b"


def read_lines(path: Path, *, param: str, max_bytes: int) -> Iterator[tuple[int, str]]:
    """Yield (line number, text without its end); a byte-order mark is no part of the first.

    Args:
        param: The option that names the file, for errors.

    Raises:
        ConfigError: The file cannot be read, or a line is too long or not UTF-8.
    """
    number = 0
    try:
        with path.open("rb") as file:
            is_packed = file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
            stream = gzip.GzipFile(fileobj=file) if is_packed else file
            while raw := stream.readline(max_bytes + 1):
                number += 1
                if len(raw) > max_bytes:
                    raise ConfigError(f"{path}, line {number}: over {max_bytes} bytes", param=param)
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}, line {number}: not UTF-8: {exc}", param=param) from exc
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}", param=param) from exc
