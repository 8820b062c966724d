"""Convert each GGUF file once, and find the result again.

A converted model is the folder `gguf/CONTENT-VERSION` of the cache, named by the SHA-256 of the
file and the version of the conversion, so a file that changed is converted again and a file that
moved is not. A folder appears whole or not at all. What a file's content is, `gguf/known` remembers
by its path, size, times and inode, because a hash of gigabytes takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from quadriga.checkpoint.json_files import GARBLED, read_object
from quadriga.errors import ConfigError
from quadriga.files import LockTimeout, file_lock, only_run, write_atomically

if TYPE_CHECKING:
    from quadriga.gguf.checkpoint_folder import Conversion

VERSION = 2
"""Raise it whenever a conversion would write something else."""
PATIENCE_S = 120.0
"""Longest wait for another process that converts the same file and writes nothing."""
SETTLED_S = 2.0
"""A file that changed more recently may change again without its times telling."""
RECORD = "source.json"


def converted_folder(file: Path, cache: Path) -> Path:
    """Return the checkpoint folder of a GGUF file, converting it if need be.

    Several processes may call this at once: one converts, the others wait for it.

    Args:
        file: Absolute.
        cache: See `quadriga.files.cache_folder`.

    Raises:
        ConfigError: The file cannot be served, changes while it is read, the disk is too small, or
            the cache cannot be written.
    """
    root = cache / "gguf"
    try:
        state = _state(file)
    except OSError as exc:
        text = f"model: {file} cannot be read: {exc.strerror}; mend its path or permissions"
        raise ConfigError(text, param="model") from exc
    try:
        sha256 = _remembered(root, file, state)
        if sha256 is not None and _is_whole(folder := _folder(root, sha256)):
            return folder
        from quadriga.gguf.checkpoint_folder import Conversion  # its libraries take a second

        conversion = Conversion(file)
        sha256 = _sha256(file)
        folder = _folder(root, sha256)
        if not _is_whole(folder):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _convert(conversion, folder, sha256, state)
        _remember(root, file, state, sha256)
    except LockTimeout as exc:
        raise ConfigError(f"model: {file} waits to be converted: {exc}", param="model") from exc
    except OSError as exc:
        raise ConfigError(
            f"model: {file} cannot be converted in {root}: {exc}; engine.cache_dir names another "
            "folder",
            param="model",
        ) from exc
    return folder


def plain_folder(
    file: Path, folder: Path, *, option: str = "--plain", sha256: str | None = None
) -> Path:
    """Write a checkpoint that other programs read as well: every matrix in numbers.

    Args:
        file: Absolute.
        folder: New: then it appears whole or not at all. Or empty: then it is filled, as it may be
            a mount point, which nothing can be renamed onto.
        option: By which the user named it, or may name another.
        sha256: That the file must have.

    Raises:
        ConfigError: The file cannot be served or is another, or the folder cannot be written to.
    """
    from quadriga.gguf.checkpoint_folder import Conversion  # its libraries take a second

    conversion = Conversion(file, keeps_blocks=False)
    folder = folder.absolute()  # "." has no name
    is_there = folder.is_dir()
    partial = (folder if is_there else folder.parent) / f".{folder.name}.partial"
    try:
        own = {"lost+found", partial.name}  # the latter of a run that was killed
        if folder.exists() and any(path.name not in own for path in folder.iterdir()):
            raise ConfigError(f"{option}: {folder} is not empty; name a new folder", param=option)
        found = _sha256(file)
        if sha256 not in (None, found):
            raise ConfigError(f"model: {file} is no longer what was converted", param="model")
        with only_run(option, partial):
            made = partial / folder.name
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            try:
                with _shown_progress(conversion) as progress:
                    conversion.write(made, found, progress, option)
                if is_there:
                    for path in made.iterdir():
                        path.rename(folder / path.name)
                else:
                    made.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as exc:
        raise ConfigError(f"{option}: {folder} cannot be written: {exc}", param=option) from exc
    return folder


def plain_beside(folder: Path, cache: Path) -> Path:
    """The plain form of a converted folder, kept in `gguf-plain/` of the cache.

    Returns:
        `folder` itself where it was not converted from a GGUF file.

    Raises:
        ConfigError: As `plain_folder`.
    """
    if not (folder / RECORD).is_file():
        return folder
    plain = cache / "gguf-plain" / folder.name
    if not plain.is_dir():
        record = read_object(folder / RECORD)
        file, sha256 = Path(record["file"]), record["sha256"]
        plain_folder(file, plain, option="engine.cache_dir", sha256=sha256)
    return plain


def _convert(conversion: Conversion, folder: Path, sha256: str, state: list[int]) -> None:
    """Write `folder`, unless another process does so meanwhile."""
    partial, lock = folder.parent / f".{folder.name}.partial", _lock(folder)
    with file_lock(lock, PATIENCE_S, progress=lambda: _written_bytes(partial)):
        _remove_abandoned(folder.parent, folder)
        if _is_whole(folder):
            return
        partial.mkdir(mode=0o700)
        try:
            with _shown_progress(conversion) as progress:
                conversion.write(partial, sha256, progress)
            if _state(conversion.file) != state:
                raise ConfigError(
                    f"model: {conversion.file} changed while it was read; wait until it is whole",
                    param="model",
                )
            _write_record(partial, conversion.file, sha256)
            shutil.rmtree(folder, ignore_errors=True)  # one that lacks files by now
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        for other in folder.parent.glob(f"{_name(sha256)}-*"):  # of an older version
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)


def _remove_abandoned(root: Path, own: Path) -> None:
    """Remove what processes left that died while they converted."""
    for partial in root.glob(".*.partial"):
        folder = root / partial.name[1 : -len(".partial")]
        if folder == own:
            shutil.rmtree(partial)
            continue
        try:
            with file_lock(_lock(folder), 0.0):
                shutil.rmtree(partial, ignore_errors=True)
        except LockTimeout:
            continue  # another process is at work there


@contextmanager
def _shown_progress(conversion: Conversion) -> Iterator[Callable[[int], object]]:
    """Say on standard error what is done, with a bar where that is a terminal.

    Yields:
        What is called with the bytes that were written.
    """
    console = Console(stderr=True)
    began_s = time.monotonic()
    size = f"{conversion.num_tensors} tensors, {conversion.num_bytes / 1e6:,.0f} MB"
    console.print(f"converting {conversion.file.name} once: {size}", markup=False, highlight=False)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn("  "), *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=conversion.num_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
    console.print(f"converted in {time.monotonic() - began_s:.0f} s", highlight=False)


def _state(file: Path) -> list[int]:
    """What changes with a file's content, as far as the file system knows."""
    info = file.stat()
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_dev]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remembered(root: Path, file: Path, state: list[int]) -> str | None:
    """The hash that the file in this state has; None where none was computed yet."""
    memory = _memory(root, file)
    if not memory.is_file():
        return None
    try:
        record = read_object(memory)
        if record["path"] != str(file) or record["state"] != state:
            return None
        sha256 = str(record["sha256"])
    except (ConfigError, *GARBLED):
        return None
    return sha256 if len(sha256) == 64 and sha256.isalnum() else None


def _remember(root: Path, file: Path, state: list[int], sha256: str) -> None:
    _, modified_ns, changed_ns, *_ = state
    if time.time_ns() - max(modified_ns, changed_ns) < SETTLED_S * 1e9:
        return
    record = {"path": str(file), "state": state, "sha256": sha256}
    with suppress(OSError):  # a cache that was filled before may be there to be read only
        write_atomically(_memory(root, file), json.dumps(record).encode())


def _memory(root: Path, file: Path) -> Path:
    return root / "known" / f"{hashlib.sha256(os.fsencode(file)).hexdigest()[:32]}.json"


def _write_record(folder: Path, file: Path, sha256: str) -> None:
    """Note which files there are, of which size; the last to be written."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    record: dict[str, Any] = {"file": str(file), "sha256": sha256, "sizes": sizes}
    write_atomically(folder / RECORD, json.dumps(record, indent=2).encode())


def _is_whole(folder: Path) -> bool:
    """Whether all files are there that were written."""
    if not (folder / RECORD).is_file():
        return False
    try:
        sizes = read_object(folder / RECORD)["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (ConfigError, OSError, *GARBLED):
        return False


def _name(sha256: str) -> str:
    return sha256[:32]


def _folder(root: Path, sha256: str) -> Path:
    return root / f"{_name(sha256)}-{VERSION}"


def _lock(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def _written_bytes(partial: Path) -> int:
    try:
        return sum(path.stat().st_size for path in partial.iterdir())
    except OSError:
        return 0
