"""Open files that may be gzip, whatever their name says."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def open_packed(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, unpacked if its first bytes are those of gzip.

    Raises:
        OSError, EOFError, zlib.error: While it is read: it is not there, damaged, or cut off.
    """
    with path.open("rb") as stream:
        if stream.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
            with gzip.GzipFile(fileobj=stream) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield stream
