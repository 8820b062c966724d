"""How long a newcomer would wait, and when to come back instead.

Whoever runs ends sooner or later; how soon is learned as a hazard: endings per second of running,
both forgotten alike. Times the sequences that run now it is the rate at which room comes free, also
right after a change of load, where a rate over a window would still tell of the load before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from quadriga.types import AdmitRequest, ReplicaSnapshot

MEMORY_S = 20.0
"""Endings and running time are forgotten with this time constant."""
MIN_RETRY_AFTER_S = 0.25
LATE_S = 60.0
"""A sequence that nobody ended so long after its deadline will not be heard of any more."""


@dataclass(slots=True)
class _Model:
    """What is known of the sequences of one model.

    Attributes:
        ended: Endings, decayed.
        ran_s: Seconds of running, of all sequences together, decayed alike.
        reported: Sequences that the replicas last told of. Of those whose ingress died nobody
            tells the end; they count no longer than replicas hold them.
        next_unpromised_s: Refused callers were told to come until then.
    """

    num_pending: int = 0
    num_running: int = 0
    reported: float = math.inf
    ended: float = 0.0
    ran_s: float = 0.0
    seen_s: float = 0.0
    next_unpromised_s: float = 0.0

    def pass_time(self, now_s: float) -> None:
        kept = math.exp(-(now_s - self.seen_s) / MEMORY_S)
        self.ended *= kept
        num_running = min(self.num_running, self.reported)
        self.ran_s = self.ran_s * kept + num_running * MEMORY_S * (1.0 - kept)
        self.seen_s = now_s


@dataclass(slots=True)
class _Known:
    model: str
    deadline_unix_s: float
    is_placed: bool = False


@dataclass(slots=True)
class WaitingBook:
    """Sequences from their admission to their end, as one scheduler sees them.

    What a predecessor of the scheduler admitted is not in it and does not count.
    """

    _models: dict[str, _Model] = field(default_factory=dict)
    _known: dict[str, _Known] = field(default_factory=dict)

    def admitted(self, request: AdmitRequest, model: str, *, now_s: float) -> None:
        """A sequence was let in."""
        self.ended([request.sequence_id], now_s=now_s)
        self._known[request.sequence_id] = _Known(model, request.deadline_unix_s)
        self._at(model, now_s).num_pending += 1

    def placed(self, sequence_id: str, *, now_s: float) -> None:
        """It has room at a decode replica; harmless twice."""
        known = self._known.get(sequence_id)
        if known is None or known.is_placed:
            return
        known.is_placed = True
        model = self._at(known.model, now_s)
        model.num_pending -= 1
        model.num_running += 1

    def ended(self, sequence_ids: Sequence[str], *, now_s: float) -> None:
        """They are over, however they ended; unknown ones are no error."""
        for sequence_id in sequence_ids:
            known = self._known.pop(sequence_id, None)
            if known is None:
                continue
            model = self._at(known.model, now_s)
            if known.is_placed:
                model.num_running -= 1
                model.ended += 1.0
            else:
                model.num_pending -= 1

    def forget_late(self, *, now_s: float, now_unix_s: float) -> None:
        """Drop those of whose end nobody told, because their ingress died."""
        late = [
            sequence_id
            for sequence_id, known in self._known.items()
            if known.deadline_unix_s + LATE_S < now_unix_s
        ]
        self.ended(late, now_s=now_s)

    def num_pending(self, model: str) -> int:
        """Let in, and without room at a decode replica so far."""
        return self._models[model].num_pending if model in self._models else 0

    def ends_per_s(self, model: str, num_running: int, *, now_s: float) -> float:
        """Predicted rate at which the `num_running` sequences that replicas tell of end.

        One more ending is assumed than was seen: with none seen yet the answer is high at first,
        and falls the longer nobody ends.
        """
        at = self._at(model, now_s)
        at.reported = num_running
        return num_running * (at.ended + 1.0) / max(at.ran_s, 1e-3)

    def promise(self, model: str, wait_s: float, rate_per_s: float, *, now_s: float) -> float:
        """When to come back, for one more caller who is refused.

        Everybody is told a time of their own, as far apart as room comes free: who all come back
        at once would find room for one.

        Args:
            wait_s: Until there is room, were nobody else told to come.

        Returns:
            Seconds from now.
        """
        at = self._at(model, now_s)
        told_s = max(at.next_unpromised_s, now_s + wait_s)
        at.next_unpromised_s = told_s + 1.0 / max(rate_per_s, 1e-3)
        return told_s - now_s

    def cap_promises(self, model: str, most_s: float, *, now_s: float) -> None:
        """Nobody is told to come later than that."""
        at = self._at(model, now_s)
        at.next_unpromised_s = min(at.next_unpromised_s, now_s + most_s)

    def _at(self, model: str, now_s: float) -> _Model:
        at = self._models.setdefault(model, _Model(seen_s=now_s))
        at.pass_time(now_s)
        return at


def decode_wait_s(
    request: AdmitRequest,
    decodes: Sequence[ReplicaSnapshot],
    *,
    num_pending: int,
    ends_per_s: float,
) -> float:
    """Seconds until the request would have room at a decode replica; 0 where there is room.

    Args:
        decodes: Those that may take it, with what is on its way to them.
        num_pending: Sequences before it that have no room yet.
    """
    room = sum(_room(snapshot, request) for snapshot in decodes)
    lacking = num_pending + 1 - room
    return 0.0 if lacking <= 0 else lacking / max(ends_per_s, 1e-3)


def _room(snapshot: ReplicaSnapshot, request: AdmitRequest) -> int:
    """How many sequences like the request a decode replica could take now."""
    info = snapshot.info
    slots = info.num_slots - snapshot.num_running - snapshot.num_waiting
    # Where memory is promised as it is used, a sequence begins with its prompt.
    is_used = info.reservation == "used"
    wanted = request.num_prompt_tokens + (1 if is_used else request.max_tokens)
    free = info.kv_capacity_tokens - snapshot.reserved_tokens
    return max(0, min(slots, free // max(1, wanted)))


def prefill_wait_s(snapshot: ReplicaSnapshot, *, chunk_tokens: int) -> float:
    """Seconds until a prefill replica has computed what waits there, by its time per chunk."""
    return snapshot.waiting_tokens / chunk_tokens * snapshot.step_time_s
