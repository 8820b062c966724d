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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's alone")
def test_what_threads_freed_goes_back_to_the_system() -> None:
    """Each of them had 30 MB for a moment."""
    said = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=120.0, check=True
    )
    assert int(said.stdout) < 4_000  # KiB
