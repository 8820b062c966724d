"""Keeps Python's cyclic garbage collector out of the way of a process that serves."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000


def collect_rarely() -> None:
    """Call before anything is loaded: nearly all that loading makes stays, and is not looked at."""
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def settle() -> None:
    """Call once everything is loaded; blocks for a moment.

    What is loaded by now (torch alone brings hundreds of thousands of objects) stays for good, so
    no collection looks at it again; and young objects, nearly all of which die by reference
    counting, are looked at in larger lots.
    """
    gc.collect()
    gc.freeze()
    collect_rarely()
