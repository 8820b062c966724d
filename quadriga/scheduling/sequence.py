"""One sequence on one replica: where it is in its life there, what it holds, when it is over."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from quadriga.core.request import FinishReason, SampledToken, SequenceState
from quadriga.scheduling.transfer.kv_feed import KVFeed

NO_ROW = -1


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


SHOWN = {
    SequenceStatus.QUEUED: "waiting",
    SequenceStatus.WAITING_FOR_PLACEMENT: "waiting",
    SequenceStatus.TRANSFERRING: "moving",
    SequenceStatus.AT_EXIT: "running",
}
"""What operators see of these; of all others their own name."""


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sequence that a replica holds; each replica has one table of them by sequence id.

    Attributes:
        state: What travels with the sequence; an empty one while a decode replica receives it.
        status: Where it is in its life here.
        row: KV row that it occupies; `NO_ROW` while it has none.
        since_s: When it came to its status, to the exit where its token waits, or to those
            that wait for a place.
        end_tokens: Tokens that end it, from `min_tokens` output tokens on. That which did stays in
            `output_ids`: it was generated and is counted; the ingress does not render it.
        most_tokens: Output tokens at which it is over in any case.

    Attributes of a sequence on a prefill replica:
        order: Rank by arrival among the sequences that wait for the same thing.
        min_layers: Layers that its first token may need; 0 where any number will do.
        num_computed: Tokens of its prompt whose KV is computed, or shared.
        num_cached: Those of them that were shared.
        block_keys: Of the whole blocks that it may share: of its prompt, and at its end of its
            answer as well.
        is_placed: A decode replica has promised it a row.
        feed: Its KV, as it becomes complete; None where the prompt alone is wanted.
        handoff: The task that hands it to a decode replica: a `PrefillHandoff`.
        turn: Set when it may ask for a place at a decode replica; None while it does not wait
            for that.

    Attributes of a sequence on a decode replica:
        num_tokens: Tokens it has; while it is received, those that it comes with.
        next_segment: Segment that its token runs next: 0 for a new token, i + 1 for one that waits
            at exit i.
        is_parked: Its token may neither leave that exit nor go on: for want of deeper layers, or
            until the row's KV has the layers behind.
        threshold: What its request asks of a token that leaves early.
        min_confidence: Confidence from which its token may leave early; infinite for never.
        leaves_from: The same for the token that comes next: less, while the replica is under
            pressure and the request has some of its quality budget left.
        last_segment: The segment behind which its token leaves whatever its confidence.
        is_surveyed: Its token is tested at every exit that it reaches.
        sure_after: Layers after which its token could first have left, and did not; else 0.
        is_strict: Its token leaves at the end of its depth with a sufficient confidence only.
        drafts: No token of it may leave early, and the first exit may draft some.
        draft_marks: Of each token that is drafted and run, what the policy wants to know of it when
            it is verified; the newest may not be run yet.
        num_drafted: Drafted tokens that were run.
        survival: Probability that all it has drafted agrees; 0 where it cannot draft on.
        lacks_layers: Its KV lacks layers that were loaded later, and ends at `last_segment`.
        needs_layers: One of its tokens was not confident enough there: its KV is to be completed.
        kv_depth: Layers of the KV that is being received.
        num_full: Tokens of its prompt, where all layers that are loaded have computed them in this
            row; else 0.
        gap_s: Longest time between two tokens to plan for; 0 is the policy's default.
        deadline_s: When its next token should be out.
        room_tokens: Tokens it may become before it must ask for more room; infinite where all it
            may become is reserved.
        num_pauses: How often it was moved to host memory here.
        told_at: Output tokens at the last prediction that its ingress knows; -1 before the first.
        told_lowered: `SequenceState.num_lowered` that its ingress knows.
        stays_until: Tokens that it may become before a more important newcomer may displace it, and
            before it is paused while another one can be.
        suspended: What the runner gave when it was moved to host memory: a `Suspended`.
    """

    state: SequenceState
    status: SequenceStatus = SequenceStatus.QUEUED
    row: int = NO_ROW
    since_s: float = 0.0
    end_tokens: frozenset[int] = frozenset()
    most_tokens: int = 0
    order: int = 0
    min_layers: int = 0
    num_computed: int = 0
    num_cached: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    is_placed: bool = False
    feed: KVFeed | None = None
    handoff: Any = None
    turn: asyncio.Event | None = None
    num_tokens: int = 0
    next_segment: int = 0
    is_parked: bool = False
    threshold: float = 0.0
    min_confidence: float = 0.0
    leaves_from: float = 0.0
    last_segment: int = 0
    is_surveyed: bool = False
    sure_after: int = 0
    is_strict: bool = False
    drafts: bool = False
    draft_marks: list[int] = field(default_factory=list)
    num_drafted: int = 0
    survival: float = 0.0
    lacks_layers: bool = False
    needs_layers: bool = False
    kv_depth: int = 0
    num_full: int = 0
    gap_s: float = 0.0
    deadline_s: float = math.inf
    room_tokens: float = math.inf
    num_pauses: int = 0
    told_at: int = -1
    told_lowered: int = 0
    stays_until: int = 0
    suspended: Any = None

    @property
    def shown(self) -> dict[str, str | int]:
        """What operators see of it that its ingress does not know, or hears of later."""
        return {"status": SHOWN.get(self.status, self.status.value), **self.state.counts}

    @property
    def goes_on(self) -> bool:
        """Whether it decodes once its prompt is computed; others end with their first token."""
        return self.state.sampling.max_tokens > 1

    def set_end(self, *, eos_token_ids: tuple[int, ...], row_capacity_tokens: int) -> None:
        """Work out when it is over, which is asked after every token."""
        params = self.state.sampling
        self.end_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.end_tokens |= frozenset(eos_token_ids)
        self.most_tokens = min(params.max_tokens, row_capacity_tokens - len(self.state.prompt_ids))

    def finish_reason(self) -> FinishReason | None:
        """Why it is over with its last output token, or None while it goes on; see `set_end`."""
        output_ids = self.state.output_ids
        count = len(output_ids)
        if count and output_ids[-1] in self.end_tokens:
            if count >= self.state.sampling.min_tokens:
                return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.most_tokens else None


def append_token(state: SequenceState, token: SampledToken) -> None:
    """Record a sampled token in its sequence's state."""
    state.output_ids.append(token.token_id)
    state.exit_layers.append(token.exit_layer)
