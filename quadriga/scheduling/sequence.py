"""One sequence on one replica: where it is in its life there, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quadriga.core.request import SequenceState


class SequenceStatus(StrEnum):
    """Where a sequence is in its life on one replica; it has exactly one status at a time."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    WAITING_FOR_PLACEMENT = "waiting for placement"
    TRANSFERRING = "transferring"
    RUNNING = "running"
    AT_EXIT = "at an exit"
    PAUSED = "paused"
    MOVING = "moving"
    FINISHED = "finished"


@dataclass(slots=True)
class RunningSequence:
    """A sequence that a replica holds; each replica has one table of them by sequence id.

    Attributes:
        state: What travels with the sequence.
        status: Where it is in its life here.
        row: KV row that it occupies; None while it has none.
    """

    state: SequenceState
    status: SequenceStatus = SequenceStatus.QUEUED
    row: int | None = None
