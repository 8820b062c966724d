"""Freed memory goes back to the system; in a process of its own, as it is about all of a heap."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, tempfile, threading
from quadriga import malloc

def resident_kib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) << 2

def num_arenas():
    with tempfile.TemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fdopen(file.fileno(), b"w"))
        libc.malloc_info(0, stream)
        libc.fflush(stream)
        file.seek(0)
        return file.read().count(b"<heap nr=")

def turn():
    kept.append(bytearray(600))
    passing = [b"x" * n for n in range(60_000, 60_500)]
    everyone.wait()
    kept.append(bytearray(600))

libc, kept, everyone = ctypes.CDLL(None), [], threading.Barrier(8)
libc.fdopen.restype = ctypes.c_void_p
malloc.share_arenas()
before_kib = resident_kib()
threads = [threading.Thread(target=turn) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
malloc.trim()
print(num_arenas(), resident_kib() - before_kib)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's alone")
def test_what_threads_freed_goes_back_to_the_system() -> None:
    """Each of them had 30 MB for a moment, in the arena of all."""
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120.0, check=True
    )
    num_arenas, growth_kib = map(int, said.stdout.split())
    assert num_arenas == 1 and growth_kib < 20_000
