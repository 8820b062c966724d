"""When a process that does not answer counts as hung, and when the observer is stalled itself."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

SILENCE_FACTOR = 10.0
"""Heartbeat intervals without an answer before a replica counts as hung."""
MIN_SILENCE_S = 8.0
STALL_PATIENCE = 4.0
"""Where the machine or this process is stalled, every process gets this many times the time."""
CONTROLLER_SILENCE_S = 20.0
"""The controller is restarted when it has answered nothing for this long, though others have."""
SCHEDULER_SILENCE_S = 20.0
"""The scheduler is restarted by the controller when it has answered nothing for this long."""
DEAF_S = 15.0
"""An ingress without any answer for this long ends: its clients go on at another one."""


def event_loop_stall_s(began_s: float, now_s: float, allowed_s: float) -> float:
    """Return by how much longer than allowed something took that ends in time by itself.

    This process stood still for so long: messages that came meanwhile may lie unread, so it is no
    silence of their senders.
    """
    return max(0.0, now_s - began_s - allowed_s)


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


class Liveness(Enum):
    """What an ingress does about silence."""

    NONE = auto()
    RESTART_CONTROLLER = auto()
    END_ITSELF = auto()


class HeartbeatMonitor:
    """Decides whether an ingress takes the controller for hung, or itself.

    Only the ingresses watch the controller. An ingress that gets no answers is sick itself, or
    cut off (without memory, say, it sends, but takes no answer): it blames no one.
    """

    def __init__(self, now_s: float) -> None:
        self._controller_s = self._anybody_s = now_s

    def judge(
        self,
        controller_answered: bool,
        anybody_answered: bool,
        *,
        now_s: float,
        stood_still_s: float,
    ) -> Liveness:
        """Take the outcome of a round of heartbeats, and say what is to be done.

        Args:
            stood_still_s: Seconds in which this process may have left answers unread.
        """
        self._controller_s = now_s if controller_answered else self._controller_s + stood_still_s
        self._anybody_s = now_s if anybody_answered else self._anybody_s + stood_still_s
        if not anybody_answered:
            is_deaf = now_s - self._anybody_s > DEAF_S
            return Liveness.END_ITSELF if is_deaf else Liveness.NONE
        if now_s - self._controller_s > CONTROLLER_SILENCE_S:
            self._controller_s = now_s  # it has so long to come back
            return Liveness.RESTART_CONTROLLER
        return Liveness.NONE
