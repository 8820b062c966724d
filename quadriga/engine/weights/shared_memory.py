"""Weights that the processes of one machine read from a single copy in memory.

A part of a model (a layer, the embedding, an exit's head) lies in an anonymous memory file of the
kernel (`memfd`). The process that loads a part first makes the file, fills it, seals it and
notes in a small registry file which process holds it under which descriptor. Whoever loads the same
part later opens that descriptor through `/proc`, maps it read-only and notes itself as well. The
kernel frees the memory when the last process that holds it is gone, however it ended, so nothing
can be left behind. Where any step is not possible (no `/proc`, another operating system, a holder
that just died), the part is read into private memory, as it would be without sharing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import logging
import math
import mmap
import os
import secrets
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quadriga.engine.memory import ALIGNMENT, HUGE_PAGE_BYTES, Arena
from quadriga.files import file_lock

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 3
"""Raise it when the order or the form of the tensors inside a part changes."""
LOCK_TIMEOUT_S = 120.0
"""Longest wait for another process that is filling the part that is wanted here."""
FORGET_AFTER_S = 86_400.0
"""Registry files that were not used for so long, and whose holders are gone, are deleted."""
_SLACK_BYTES = 1 << 20
_MADV_COLLAPSE = 25
_F_SEAL_FUTURE_WRITE = 0x10
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

Layout = list[tuple[int, tuple[int, ...]]]
"""Offset and shape of every tensor of a part, in the order in which they are taken."""


def is_supported() -> bool:
    """Whether this system has anonymous memory files and shows descriptors under `/proc`."""
    return (
        sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _unmap(address: int, num_bytes: int, descriptor: int) -> None:
    _libc().munmap(address, num_bytes)
    os.close(descriptor)


class _Mapping:
    """A shared mapping that begins on a huge page; it owns the descriptor that others may open.

    Both go when the last tensor over `bytes` goes.

    Attributes:
        bytes: All of it, uint8 [num_bytes].

    Raises:
        OSError: The kernel refuses the mapping; the descriptor is closed.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, is_writable: bool) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        room = num_bytes + HUGE_PAGE_BYTES
        try:
            reserved = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        except OSError:
            os.close(descriptor)
            raise
        self.address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        try:
            _map(self.address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        except OSError:
            _unmap(reserved, room, descriptor)
            raise
        buffer = (ctypes.c_ubyte * num_bytes).from_address(self.address)
        # Not at exit: threads that end later may still read the weights.
        weakref.finalize(buffer, _unmap, reserved, room, descriptor).atexit = False
        self.bytes = torch.frombuffer(buffer, dtype=torch.uint8)

    def finish(self, used_bytes: int) -> None:
        """Seal what was written: read-only for everybody, in huge pages where the kernel can.

        Raises:
            OSError: The kernel does not seal it.
        """
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        whole = used_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if whole:  # kernels before 6.1 refuse: the weights are slower to read then, nothing else
            _libc().madvise(self.address, whole, _MADV_COLLAPSE)
        _libc().mprotect(self.address, self.num_bytes, mmap.PROT_READ)


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    """`mmap(2)`. Raises: OSError."""
    mapped: int = _libc().mmap(address, num_bytes, protection, flags, descriptor, 0)
    if mapped == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {num_bytes} bytes: {os.strerror(error)}")
    return mapped


class SharedArena:
    """Hands out the tensors of one shared part, in an order that is always the same; see `Arena`.

    Args:
        mapping: The part's memory.
        layout: Of a part that another process has filled; None for one that is filled here.

    Attributes:
        layout: Of what was taken so far.
    """

    def __init__(self, mapping: _Mapping, layout: Layout | None) -> None:
        self.mapping = mapping
        self.layout: Layout = []
        self.used_bytes = 0
        self._known = layout
        self._private: Arena | None = None

    @property
    def is_new(self) -> bool:
        """Whether this process fills the part."""
        return self._known is None

    @property
    def is_filled(self) -> bool:
        """Whether the tensor that was taken last holds its values already."""
        return self._known is not None and self._private is None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor of the part; of zeros where it is not filled yet."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start, stop = self.used_bytes, self.used_bytes + num_bytes
        entry = (start, tuple(shape))
        if self._private is None and not self._fits(entry, stop):
            # Another layout than the other process had, or more than was announced: from here on
            # the part's tensors are in private memory.
            self._private = Arena(num_bytes)
        if self._private is not None:
            return self._private.take(shape, dtype)
        self.layout.append(entry)
        self.used_bytes = -(-stop // ALIGNMENT) * ALIGNMENT
        return self.mapping.bytes[start:stop].view(dtype).view(shape)

    def _fits(self, entry: tuple[int, tuple[int, ...]], stop: int) -> bool:
        if stop > self.mapping.num_bytes:
            return False
        index = len(self.layout)
        return self._known is None or (index < len(self._known) and self._known[index] == entry)


@dataclass(slots=True)
class _Record:
    """Content of the registry file of a part.

    Attributes:
        label: The memory file's name; random, so that it cannot be taken for another one.
        holders: (process id, descriptor) of everybody who has it mapped.
    """

    label: str = ""
    num_bytes: int = 0
    layout: Layout = field(default_factory=list)
    holders: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def read(cls, descriptor: int) -> _Record:
        """Read the file; an empty record where it is new or not readable."""
        try:
            content: dict[str, Any] = json.loads(os.pread(descriptor, 1 << 20, 0) or b"{}")
            layout = [(int(start), tuple(map(int, shape))) for start, shape in content["layout"]]
            holders = [(int(pid), int(held)) for pid, held in content["holders"]]
            return cls(str(content["label"]), int(content["num_bytes"]), layout, holders)
        except (KeyError, TypeError, ValueError):
            return cls()

    def write(self, descriptor: int) -> None:
        content = {
            "label": self.label,
            "num_bytes": self.num_bytes,
            "layout": self.layout,
            "holders": self.holders,
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)

    def open(self) -> int | None:
        """Open the memory file through one of its holders; forget those that are gone."""
        found: int | None = None
        for pid, held in list(self.holders):
            path = f"/proc/{pid}/fd/{held}"
            try:
                if not os.readlink(path).startswith(f"/memfd:{self.label}"):
                    raise OSError("the process has something else under this descriptor")
                if found is None:
                    found = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self.holders.remove((pid, held))
        return found


class SharedParts:
    """The shared parts of one checkpoint's files on this machine.

    Args:
        folder: Where the registry is; private to the user.
        files: The checkpoint's files; a part is shared only between processes that read the very
            same files, unchanged.
        form: Of the tensors in memory, in words.
    """

    def __init__(self, folder: Path, files: list[Path], form: str) -> None:
        self._folder = folder
        identity = [f"{LAYOUT_VERSION}", form, sys.byteorder]
        for file in sorted(files):
            status = file.resolve().stat()
            identity.append(
                f"{file.resolve()}:{status.st_dev}:{status.st_ino}:{status.st_size}:"
                f"{status.st_mtime_ns}"
            )
        self._identity = "\n".join(identity)
        with contextlib.suppress(OSError):
            _forget_old(folder)

    @contextlib.contextmanager
    def part(self, name: str, num_bytes: int) -> Iterator[Arena | SharedArena]:
        """Give the arena of a part; what is taken inside is shared once the context ends well.

        Args:
            name: Of the part, unique within the files.
            num_bytes: About what it takes; more goes into private memory.
        """
        with contextlib.ExitStack() as stack:
            try:
                registry = stack.enter_context(self._locked(name))
                record = _Record.read(registry)
                arena = self._join(record) or self._create(record, num_bytes)
            except OSError as exc:
                logger.info("weights of %s are not shared: %s", name, exc)
                yield Arena(num_bytes)
                return
            yield arena
            with contextlib.suppress(OSError):  # unshared then, and of use here all the same
                self._publish(arena, record, registry)

    def _join(self, record: _Record) -> SharedArena | None:
        """The part as another process holds it; None where none does. Raises: OSError."""
        descriptor = record.open()
        if descriptor is None:
            return None
        mapping = _Mapping(descriptor, record.num_bytes, is_writable=False)
        record.holders.append((os.getpid(), descriptor))
        return SharedArena(mapping, record.layout)

    def _create(self, record: _Record, num_bytes: int) -> SharedArena:
        """Memory for a part that no process holds. Raises: OSError."""
        size = -(-(num_bytes + num_bytes // 16 + _SLACK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        label = f"quadriga-{secrets.token_hex(12)}"
        descriptor = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)  # sparse: pages are taken when they are written
        mapping = _Mapping(descriptor, size, is_writable=True)
        record.label, record.num_bytes = label, size
        record.holders = [(os.getpid(), descriptor)]
        return SharedArena(mapping, None)

    def _publish(self, arena: SharedArena, record: _Record, registry: int) -> None:
        """Let others open what is here now. Raises: OSError."""
        if arena.is_new:
            arena.mapping.finish(arena.used_bytes)
            record.layout = arena.layout
        record.write(registry)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """The registry file of a part, locked for this process. Raises: OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        digest = hashlib.sha256(f"{self._identity}\n{name}".encode()).hexdigest()[:32]
        with file_lock(self._folder / f"{digest}.json", LOCK_TIMEOUT_S) as registry:
            yield registry


def _forget_old(folder: Path) -> None:
    """Delete registry files of parts that no process holds any more. Raises: OSError."""
    oldest_s = time.time() - FORGET_AFTER_S
    for path in folder.glob("*.json"):
        if path.stat().st_mtime > oldest_s:
            continue
        with file_lock(path, 0.0) as registry:
            held = _Record.read(registry).open()
            if held is None:
                path.unlink()
            else:
                os.close(held)
