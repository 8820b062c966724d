"""Files that several processes share: where they are kept, whole replacement, and locks."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from quadriga.errors import ConfigError

LOCK_INTERVAL_S = 0.02
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What an `OSError` says where there is no more room."""


class LockTimeout(TimeoutError):
    """Another process holds a lock and makes no progress. The message names the lock file."""


def cache_folder(configured: str | Path | None = None) -> Path:
    """Return the folder for what can be made again: compiled kernels, converted models.

    Args:
        configured: `engine.cache_dir`; None is `$XDG_CACHE_HOME/quadriga`, which without that
            variable is `~/.cache/quadriga`.
    """
    if configured:
        return Path(configured).expanduser()
    # The specification of XDG has relative paths ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "quadriga"


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by a complete one: a reader sees the old one or the new one, never half."""
    with replaced(path) as stream:
        stream.write(content)


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """As `write_atomically`, of what is written to the stream.

    Raises:
        OSError: With the file's name; also where `torch.save` hides it behind an error of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException as exc:
        Path(name).unlink(missing_ok=True)
        cause = exc.__context__ if isinstance(exc, RuntimeError) else exc
        if not isinstance(cause, OSError):
            raise
        if cause.errno is not None:
            cause.filename = cause.filename or str(path)
        raise cause from None


def cut_half_line(file: Path) -> None:
    """Take back half a last line, as a killed process or a full disk leaves it."""
    if file.is_file() and not (content := file.read_bytes()).endswith(b"\n"):
        os.truncate(file, content.rfind(b"\n") + 1)


@contextmanager
def file_lock(
    path: Path, patience_s: float, *, progress: Callable[[], object] = lambda: None
) -> Iterator[int]:
    """Hold an advisory lock on a file, which is made if need be and keeps its content.

    The system drops the lock when the process that holds it dies.

    Args:
        patience_s: Longest wait while `progress` stays the same; 0 does not wait.
        progress: Something that changes while the holder works, such as a file's size.

    Yields:
        The file's descriptor, open for reading and writing.

    Raises:
        LockTimeout: Another process kept the lock for that long.
        OSError: The file cannot be opened.
    """
    seen, deadline_s = progress(), time.monotonic() + patience_s
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if (now := progress()) != seen:
                    seen, deadline_s = now, time.monotonic() + patience_s
                elif time.monotonic() >= deadline_s:
                    raise LockTimeout(f"another process holds {path}") from None
                time.sleep(LOCK_INTERVAL_S)
        yield handle
    finally:
        os.close(handle)  # which releases the lock


@contextmanager
def only_run(option: str, folder: Path) -> Iterator[None]:
    """Hold a folder that two runs must not write to.

    Raises:
        ConfigError: Another run holds it, or it cannot be written to.
    """
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(file_lock(folder / ".lock", 0.0))
        except LockTimeout as exc:
            raise ConfigError(
                f"{option}: another run is at work in {folder}; wait for its end, or name another"
            ) from exc
        except OSError as exc:
            raise ConfigError(f"{option}: {folder} cannot be written to: {exc}") from exc
        yield
