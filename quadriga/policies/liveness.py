"""When a replica that does not answer counts as hung."""

from __future__ import annotations

from collections.abc import Sequence

SILENCE_FACTOR = 10.0
"""Heartbeat intervals without an answer before a replica counts as hung."""
MIN_SILENCE_S = 8.0
STALL_PATIENCE = 4.0
"""Where the machine or this process is stalled, everybody gets this many times the time."""


def silence_limit_s(heartbeat_interval_s: float) -> float:
    """Return how long a replica may be silent while the others answer."""
    return max(MIN_SILENCE_S, SILENCE_FACTOR * heartbeat_interval_s)


def is_stalled(silences_s: Sequence[float], *, limit_s: float) -> bool:
    """Tell a stall of the machine (or of the observer) from a hung replica.

    Args:
        silences_s: Seconds since each replica that ever answered was last heard of.

    Returns:
        Whether half of the replicas or more, and at least two, have been silent for half of
        `limit_s`: independent hangs do not coincide, a stall hits all alike.
    """
    num_silent = sum(silence_s > limit_s / 2 for silence_s in silences_s)
    return num_silent > 1 and 2 * num_silent >= len(silences_s)


def patience_s(silences_s: Sequence[float], *, limit_s: float) -> float:
    """Return how long a silent replica is waited for; longer where it is not the only one."""
    return limit_s * STALL_PATIENCE if is_stalled(silences_s, limit_s=limit_s) else limit_s
