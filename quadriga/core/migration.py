"""Orders to move a running sequence, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from quadriga.core.relative_time import CompactPickleMixin
from quadriga.core.replica import DepthClass


class MigrationCause(StrEnum):
    """Why the scheduler moves a running sequence."""

    BALANCE = "balance"
    MEMORY = "memory"
    DEPTH = "depth"  # it belongs to the replicas for shallow sequences, or to those for deep ones
    DRAIN = "drain"
    ESCALATE = "escalate"  # a strict sequence needs layers that its replica has not loaded


@dataclass(frozen=True, slots=True)
class MigrationOrder(CompactPickleMixin):
    """The scheduler asks a source replica to hand a running sequence over, live.

    Attributes:
        gain: Share of the class's weighted variance that the move removes.
        num_tokens: KV tokens to move, as last reported.
        remaining_tokens: Predicted tokens still to come; 0 where nothing was predicted.
        reason: Of the controller's orders: why the replica is emptied.
    """

    sequence_id: str
    depth_class: DepthClass
    source: str
    destination: str
    cause: MigrationCause
    gain: float
    num_tokens: int
    remaining_tokens: float
    reason: str = ""


MigrationOutcome = Literal["moved", "finished", "refused", "failed", "unknown"]


@dataclass(frozen=True, slots=True)
class MigrationReport(CompactPickleMixin):
    """How a live migration ended.

    Attributes:
        outcome: "moved": the destination owns the sequence. "finished": it ended, or was
            cancelled, before it could move. "refused": nothing was begun. "failed": it was begun,
            and the sequence goes on at the source. "unknown": the destination fell silent in the
            middle of the commit, and nobody can say whether it owns the sequence.
        reason: A word for machines and a sentence for people: "no_room: …"; empty for "moved".
        rounds: Rounds of copying, the last one, in the cutover, included.
        bytes_sent: KV and what goes with it.
        stall_s: How long the sequence stood still at the source: its cutover.
        took_s: From the order to the end; for `sending_s` of it KV was on the link.
        at_fault: Replica that shall take part in no move for a while; empty: neither.
    """

    sequence_id: str
    outcome: MigrationOutcome
    reason: str = ""
    rounds: int = 0
    bytes_sent: int = 0
    stall_s: float = 0.0
    took_s: float = 0.0
    sending_s: float = 0.0
    at_fault: str = ""
