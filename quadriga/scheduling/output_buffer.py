"""What a replica has to tell each ingress, kept until the ingress says it has it.

Not thread-safe: one thread (the actor's event loop) owns an Outbox.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from quadriga.core.output import EngineOutput, PollReply


@dataclass(slots=True)
class _Mailbox:
    """Emissions of one ingress, numbered without gaps.

    Attributes:
        fetched_s: When it was last collected, or begun.
        entries: Unacknowledged emissions; the last has number `last_seq`.
        sent_seq: Highest number that ever left in a reply; such an emission is never changed.
    """

    fetched_s: float
    entries: deque[EngineOutput] = field(default_factory=deque)
    last_seq: int = 0
    sent_seq: int = 0
    unsent: dict[str, EngineOutput] = field(default_factory=dict)


class OutputBuffer:
    """One acknowledged log of emissions per ingress: delivery at least once, in order.

    A reply that is lost on the way loses nothing: the ingress polls again with its old
    acknowledgement and gets the same emissions once more. Tokens that were not yet sent are put
    together, so that a slow ingress gets few large emissions instead of many small ones.
    """

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._mailboxes: dict[str, _Mailbox] = {}

    def put(self, ingress_id: str, emission: EngineOutput, *, now_s: float) -> None:
        """Append an emission for an ingress, or extend the sequence's unsent one."""
        box = self._mailboxes.get(ingress_id)
        if box is None:
            box = self._mailboxes[ingress_id] = _Mailbox(fetched_s=now_s)
        earlier = box.unsent.get(emission.sequence_id)
        if earlier is not None and _extend(earlier, emission):
            return
        box.entries.append(emission)
        box.last_seq += 1
        box.unsent[emission.sequence_id] = emission

    def has_news(self, ingress_id: str) -> bool:
        """Whether something is pending that was never sent."""
        box = self._mailboxes.get(ingress_id)
        return box is not None and bool(box.unsent)

    def collect(self, ingress_id: str, ack: int, *, now_s: float) -> PollReply:
        """Drop what `ack` acknowledges and return all the rest.

        Args:
            ack: `last_seq` of the last reply the ingress got from this incarnation; 0 at first.
        """
        box = self._mailboxes.get(ingress_id)
        if box is None:
            box = self._mailboxes[ingress_id] = _Mailbox(fetched_s=now_s)
        box.fetched_s = now_s
        first_seq = box.last_seq - len(box.entries) + 1
        for _ in range(min(ack, box.sent_seq) - first_seq + 1):
            box.entries.popleft()
        box.sent_seq = box.last_seq
        box.unsent.clear()
        return PollReply(self._incarnation, box.last_seq, list(box.entries))

    def unacknowledged(self, ingress_id: str, sequence_id: str) -> list[EngineOutput]:
        """Emissions with tokens of one sequence that its ingress may not have, oldest first."""
        box = self._mailboxes.get(ingress_id)
        entries = box.entries if box is not None else ()
        return [e for e in entries if e.sequence_id == sequence_id and e.token_ids]

    def silent(self, *, now_s: float, longer_than_s: float) -> list[str]:
        """Ingresses that fetched nothing for `longer_than_s`: gone, or they want no more."""
        return [i for i, box in self._mailboxes.items() if now_s - box.fetched_s > longer_than_s]

    def drop(self, ingress_id: str) -> None:
        """Forget an ingress and all that is pending for it."""
        self._mailboxes.pop(ingress_id, None)

    @property
    def num_pending(self) -> int:
        """Unacknowledged emissions over all ingresses."""
        return sum(len(box.entries) for box in self._mailboxes.values())


def _extend(earlier: EngineOutput, emission: EngineOutput) -> bool:
    """Append the emission's tokens to an earlier one; False where they do not simply follow."""
    mergeable = (
        earlier.epoch == emission.epoch
        and earlier.finish is None
        and earlier.error is None
        and earlier.moved_to is None
        and emission.moved_to is None
        and emission.error is None
        and emission.prompt_logprobs is None
        and (earlier.logprobs is None) == (emission.logprobs is None)
        and bool(earlier.token_ids)
        and (earlier.depth == emission.depth or not emission.token_ids)
        and emission.first_index == earlier.first_index + len(earlier.token_ids)
    )
    if not mergeable:
        return False
    earlier.token_ids.extend(emission.token_ids)
    earlier.exit_layers.extend(emission.exit_layers)
    if earlier.logprobs is not None and emission.logprobs is not None:
        earlier.logprobs.extend(emission.logprobs)
    earlier.finish = emission.finish
    return True
