"""How long a new request would wait for a place.

Every running sequence ends; how soon is learned as a hazard: endings per second of running,
both forgotten alike. Times the sequences that run now it is the rate at which room comes free, also
right after a change of load, where a rate over a window would still show the load before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from quadriga.config.engine import PrefillConfig
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.core.routing import AdmitRequest, PlaceRequest
from quadriga.policies.load import num_held, room, tokens_wanted
from quadriga.policies.retry_reservations import RetryReservations
from quadriga.policies.slot_reservation import ASSUMED_ANSWERS

MEMORY_S = 20.0
"""Endings and running time are forgotten with this time constant, while sequences run."""
MIN_RATE, MAX_RATE = 1e-3, 1e6
LATE_S = 60.0
"""A sequence without an end so long after its deadline will have none reported any more."""


@dataclass(slots=True)
class _QueueLine:
    """What is known of the sequences of one line; see `line_of`.

    Attributes:
        pending: Let in, and without room at a decode replica so far: priorities and deadlines.
        running: With room there.
        ended: Endings, decayed.
        ran_s: Seconds of running, of all sequences together, decayed alike.
        reported: Sequences in the replicas' last reports. The end of those whose ingress died is
            not reported; they count no longer than replicas hold them.
        reservations: Of callers that were refused.
    """

    pending: dict[str, tuple[int, float]] = field(default_factory=dict)
    running: dict[str, tuple[int, float]] = field(default_factory=dict)
    reported: float = math.inf
    ended: float = 0.0
    ran_s: float = 0.0
    seen_s: float = 0.0
    reservations: RetryReservations = field(default_factory=RetryReservations)

    def pass_time(self, now_s: float) -> None:
        num_running = min(len(self.running), self.reported)
        if num_running > 0:
            kept = math.exp(-(now_s - self.seen_s) / MEMORY_S)
            self.ended *= kept
            self.ran_s = self.ran_s * kept + num_running * MEMORY_S * (1.0 - kept)
        self.seen_s = now_s


@dataclass(slots=True)
class WaitEstimator:
    """Sequences from their admission to their end, as one scheduler sees them.

    What a predecessor of the scheduler admitted is not in it and does not count.
    """

    _lines: dict[str, _QueueLine] = field(default_factory=dict)

    def admitted(self, request: AdmitRequest, line: str, *, now_s: float) -> None:
        """A sequence was let in."""
        self.lost([request.sequence_id], now_s=now_s)
        noted = request.priority, request.deadline_unix_s
        self._at(line, now_s).pending[request.sequence_id] = noted

    def placed(self, sequence_id: str, *, now_s: float) -> None:
        """It has room at a decode replica; harmless twice."""
        for line in self._lines.values():
            if sequence_id in line.pending:
                line.pass_time(now_s)
                line.running[sequence_id] = line.pending.pop(sequence_id)

    def ended(self, sequence_ids: Sequence[str], *, now_s: float) -> None:
        """They are over, however they ended; unknown ones are no error."""
        self._remove(sequence_ids, now_s, num_endings=1.0)

    def lost(self, sequence_ids: Sequence[str], *, now_s: float) -> None:
        """They run no more, and it says nothing of how soon others end: a replica died, say."""
        self._remove(sequence_ids, now_s, num_endings=0.0)

    def _remove(self, sequence_ids: Sequence[str], now_s: float, num_endings: float) -> None:
        for sequence_id in sequence_ids:
            for line in self._lines.values():
                line.pending.pop(sequence_id, None)
                if sequence_id in line.running:
                    line.pass_time(now_s)
                    del line.running[sequence_id]
                    line.ended += num_endings

    def forget_late(self, *, now_s: float, now_unix_s: float) -> None:
        """Drop those whose end was not reported, because their ingress died."""
        late = [
            sequence_id
            for line in self._lines.values()
            for sequence_id, (_, deadline_unix_s) in (line.pending | line.running).items()
            if deadline_unix_s + LATE_S < now_unix_s
        ]
        self.lost(late, now_s=now_s)

    def num_pending(self, line: str, priority: float = math.inf) -> int:
        """Let in, without room at a decode replica so far, and not less important than that."""
        pending = self._lines[line].pending.values() if line in self._lines else ()
        return sum(of <= priority for of, _ in pending)

    def ends_per_s(
        self,
        line: str,
        num_running: int,
        *,
        now_s: float,
        num_more: int = 0,
        expected_s: float = 0.0,
    ) -> float:
        """Predicted rate at which sequences end.

        Until `ASSUMED_ANSWERS` endings were seen lately, those that lack are assumed, each after
        `expected_s`: a first burst of long answers has all of them before it, and would else look
        as if none ever ended. One more than was seen is always assumed; the answer falls the longer
        none ends.

        Args:
            num_running: As the replicas report.
            num_more: That will run as soon as they may.
            expected_s: How long one usually runs; 0 where nothing is known of it.
        """
        at = self._at(line, now_s)
        at.reported = num_running
        assumed = max(1.0, ASSUMED_ANSWERS - at.ended) if expected_s else 1.0
        hazard = (at.ended + assumed) / max(at.ran_s + assumed * expected_s, 1e-3)
        return (num_running + num_more) * hazard

    def reservations(self, line: str) -> RetryReservations:
        """The reservations of refused callers."""
        return self._lines.setdefault(line, _QueueLine()).reservations

    def _at(self, line: str, now_s: float) -> _QueueLine:
        at = self._lines.setdefault(line, _QueueLine(seen_s=now_s))
        at.pass_time(now_s)
        return at


@dataclass(frozen=True, slots=True)
class Supply:
    """Of one thing that sequences must wait for.

    Attributes:
        free: How many more sequences could have it now; negative where some wait already.
        per_s: For how many it comes free in a second; above 0.
        is_queue: It is room in a prefill queue, which must be there now.
        most: How many could have it where nobody else had any.
    """

    free: float
    per_s: float
    is_queue: bool = False
    most: float = math.inf

    @property
    def wait_s(self) -> float:
        """Until one more sequence would have it."""
        return max(0.0, (1.0 - self.free) / self.per_s)


def queue_supply(
    request: AdmitRequest, prefills: Sequence[ReplicaSnapshot], config: PrefillConfig
) -> Supply:
    """Places in prefill queues for sequences like the request.

    The rate is measured over idle time too, so a queue held up by full decode replicas counts at
    the pace it really moves.
    """
    per_s = sum(s.prefill_tokens_per_s for s in prefills) / max(1, request.num_prompt_tokens)
    free = sum(_queue_room(snapshot, request, config) for snapshot in prefills)
    num_tokens = max(1, request.num_prompt_tokens)
    most = max(1, min(config.max_queued_sequences, config.max_queued_tokens // num_tokens))
    return Supply(free, max(per_s, MIN_RATE), is_queue=True, most=most * len(prefills))


def _queue_room(snapshot: ReplicaSnapshot, request: AdmitRequest, config: PrefillConfig) -> int:
    """How many sequences like the request one queue could take; one of any length when empty."""
    tokens = max(0, config.max_queued_tokens - snapshot.waiting_tokens)
    sequences = max(0, config.max_queued_sequences - snapshot.num_waiting)
    least = 1 if snapshot.num_waiting == 0 else 0
    return max(least, min(sequences, tokens // max(1, request.num_prompt_tokens)))


def decode_supply(
    request: AdmitRequest,
    decodes: Sequence[ReplicaSnapshot],
    estimator: WaitEstimator,
    *,
    num_pending: int,
    line: str,
    now_s: float,
) -> Supply:
    """Places at decode replicas for sequences like the request.

    The rate is that of all places in use: one that is free while others are refused is kept for
    a caller that comes soon. With the rate of those in use, a few kept places would mean a longer
    wait for all refused callers, and so more places that are kept.

    Args:
        decodes: Those that may take it, with what is on its way to them.
        num_pending: Sequences before it that have no room yet.
    """
    num_tokens = request.num_prompt_tokens
    asked = PlaceRequest(
        request.sequence_id,
        DepthClass(line, 0),
        num_tokens,
        num_tokens + request.max_tokens,
        priority=request.priority,
    )
    rooms = [room(snapshot, asked) for snapshot in decodes]
    num_free = sum(n for n in rooms if n > 0)
    usual_tokens = max((s.upper_tokens for s in decodes), default=0) or request.max_tokens
    step_s = max((s.step_time_s for s in decodes), default=0.0)
    per_s = estimator.ends_per_s(
        line,
        sum(num_held(s) for s in decodes),
        now_s=now_s,
        num_more=num_free,
        expected_s=min(usual_tokens, request.max_tokens) * step_s,
    )
    most = 0
    for s in decodes:
        in_memory = s.info.kv_capacity_tokens // max(1, tokens_wanted(s, asked))
        most += max(1, min(s.info.num_slots, in_memory))
    return Supply((num_free or sum(rooms)) - num_pending, max(per_s, MIN_RATE), most=most)


def prefill_supply(request: AdmitRequest, first: ReplicaSnapshot, *, num_replicas: int) -> Supply:
    """Turns at prefill replicas for prompts like the request's: less important ones come behind.

    Args:
        first: The replica with the least work ahead.
    """
    behind = sum(n for priority, n in first.waiting_by_priority if priority > request.priority)
    ahead_s = _prefill_s(first, max(0, first.waiting_tokens - behind))
    prompt_s = _prefill_s(first, request.num_prompt_tokens)
    per_s = num_replicas / max(prompt_s, 1.0 / MAX_RATE)
    return Supply(1.0 - ahead_s * per_s, per_s)


def _prefill_s(snapshot: ReplicaSnapshot, tokens: int) -> float:
    """Seconds in which a replica computes so many prompt tokens, by its time per chunk."""
    return tokens / max(1, snapshot.info.chunk_tokens) * snapshot.prefill_chunk_s
