"""The history table on disk: written whole or not at all, read with distrust."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from quadriga.policies.helios.history import HistoryTable

MAX_BYTES = 16 << 20
_log = logging.getLogger(__name__)


def pack(table: HistoryTable) -> bytes:
    """The table as JSON text, for a file or a key-value store."""
    return json.dumps(table.to_dict(), allow_nan=False).encode()


def unpack(raw: bytes) -> HistoryTable:
    """What `pack` gave. Raises: ConfigError when it is anything else."""
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"history: {len(raw)} bytes, at most {MAX_BYTES} are read")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"history: no JSON: {exc}") from exc
    return HistoryTable.from_dict(data)


def save(path: Path, table: HistoryTable) -> None:
    """Replace the file. Raises: OSError."""
    write_atomically(path, pack(table))


def load(path: Path) -> HistoryTable:
    """Read the file; an empty table where there is none.

    A file that cannot be used is set aside as `<name>.corrupt` and warned of: the table starts
    anew and fills within one profile.
    """
    try:
        return unpack(path.read_bytes())
    except FileNotFoundError:
        return HistoryTable()
    except (ConfigError, OSError) as exc:
        aside = path.with_name(f"{path.name}.corrupt")
        _log.warning(
            "%s is not usable (%s); it is now %s, and profiles start anew", path, exc, aside
        )
        try:
            path.replace(aside)
        except OSError as problem:
            _log.warning("%s could not be set aside: %s", path, problem)
        return HistoryTable()
