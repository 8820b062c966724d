"""Freed memory goes back to the system; in a process of its own, as it is about all of a heap."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

GROWTH = """
import threading
from quadriga import malloc

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) << 2

def turn():
    kept.append(bytearray(600))
    passing = [b"x" * n for n in range(60_000, 60_500)]
    kept.append(bytearray(600))

def all_turns():
    for _ in range(8):
        thread = threading.Thread(target=turn)
        thread.start()
        thread.join()

kept = []
malloc.share_arenas()
before = resident()
all_turns()
malloc.trim()
print(resident() - before)
"""


ARENAS = """
import ctypes, tempfile, threading
from quadriga import malloc

def num_arenas():
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile("w+") as file:
        stream = ctypes.c_void_p(libc.fdopen(file.fileno(), b"w"))
        libc.malloc_info(0, stream)
        libc.fflush(stream)
        file.seek(0)
        return file.read().count("<heap nr=")

def work():
    passing = b"x" * 60_000
    everyone.wait()

malloc.share_arenas()
everyone = threading.Barrier(9)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
everyone.wait()
print(num_arenas())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's alone")
def test_what_threads_freed_goes_back_to_the_system() -> None:
    """Each of them had 30 MB for a moment."""
    assert said_by(GROWTH) < 4_000  # KiB


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc's alone")
def test_threads_that_begin_later_have_no_arenas_of_their_own() -> None:
    assert said_by(ARENAS) == 1


def said_by(program: str) -> int:
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120.0, check=True
    )
    return int(said.stdout)
