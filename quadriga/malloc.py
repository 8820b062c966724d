"""What glibc's malloc keeps of freed memory, for processes that live long and allocate in turns.

Each thread allocates in an arena of its own, which stays as large as it ever was. A process whose
threads take turns at large passing values, such as all metrics of a cluster, grows for as long as
another thread comes to its turn.
"""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8
"""Of mallopt(3)."""


def share_arenas() -> None:
    """Have threads that begin from now on share the arenas there are; elsewhere does nothing."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_ARENA_MAX, 1)


def trim() -> None:
    """Give freed pages of all arenas back to the system; takes well below a millisecond."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)
