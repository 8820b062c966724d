"""A replica's line to the ingresses: their polls, their signs of life, and their silence."""

from __future__ import annotations

import asyncio

from quadriga.batching.outbox import Outbox
from quadriga.clock import Clock
from quadriga.types import Emission, PollReply

MAX_POLL_S = 30.0
MIN_ABSENCE_S = 3.0


class Mailroom:
    """Hands each ingress what its polls ask for; on the event loop.

    Args:
        incarnation: Of the replica's process.
        poll_timeout_s: How long an ingress's polls usually wait.
    """

    def __init__(self, incarnation: str, clock: Clock, poll_timeout_s: float) -> None:
        self._clock = clock
        self._outbox = Outbox(incarnation)
        self._absent_s = max(MIN_ABSENCE_S, 2 * poll_timeout_s)
        self._news: dict[str, asyncio.Event] = {}
        self._heard_s: dict[str, float] = {}
        self._any_heard_s = clock.now_s()
        self._is_closed = False

    async def poll(self, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        """Everything pending for an ingress; waits up to `timeout_s` for something."""
        self.hear(ingress_id)
        event = self._news.setdefault(ingress_id, asyncio.Event())
        give_up_s = self._clock.now_s() + min(timeout_s, MAX_POLL_S)
        while True:
            event.clear()
            # What a lost reply held is in here again: the acknowledgement did not cover it.
            reply = self._outbox.collect(ingress_id, ack, now_s=self._clock.now_s())
            left_s = give_up_s - self._clock.now_s()
            if reply.emissions or left_s <= 0 or self._is_closed:
                return reply
            try:
                async with asyncio.timeout(left_s):
                    await event.wait()
            except TimeoutError:
                continue

    def put(self, ingress_id: str, emission: Emission) -> None:
        """Keep an emission until the ingress has acknowledged it, and wake its poll."""
        self._outbox.put(ingress_id, emission, now_s=self._clock.now_s())
        event = self._news.get(ingress_id)
        if event is not None:
            event.set()

    def hear(self, ingress_id: str) -> None:
        """Note a sign of life of an ingress."""
        now_s = self._clock.now_s()
        self._heard_s[ingress_id] = now_s
        self._any_heard_s = now_s
        self._outbox.heard(ingress_id, now_s=now_s)

    def heard_of_any(self, age_s: float) -> None:
        """Note that somebody else heard of some ingress so long ago."""
        self._any_heard_s = max(self._any_heard_s, self._clock.now_s() - age_s)

    def expect(self, ingress_id: str) -> None:
        """A sequence of this ingress arrives: unless the ingress speaks up, it is an orphan."""
        self._heard_s.setdefault(ingress_id, self._clock.now_s())

    @property
    def silence_s(self) -> float:
        """Seconds since any ingress was heard of."""
        return self._clock.now_s() - self._any_heard_s

    def silent(self, *, longer_than_s: float) -> dict[str, float]:
        """Seconds of silence of each ingress that was not heard of for longer than this."""
        now_s = self._clock.now_s()
        ages = {i: now_s - heard_s for i, heard_s in self._heard_s.items()}
        return {i: age_s for i, age_s in ages.items() if age_s > longer_than_s}

    def drop(self, ingress_id: str) -> None:
        """Forget an ingress and all that is pending for it."""
        self._heard_s.pop(ingress_id, None)
        self._news.pop(ingress_id, None)
        self._outbox.drop(ingress_id)

    @property
    def has_pending(self) -> bool:
        """Whether some ingress has not acknowledged everything."""
        return self._outbox.num_pending > 0

    def drop_absent(self) -> None:
        """Forget ingresses that fetch nothing: who drains does not wait for them."""
        for ingress_id in self._outbox.silent(
            now_s=self._clock.now_s(), longer_than_s=self._absent_s
        ):
            self.drop(ingress_id)

    def close(self) -> None:
        """Let every waiting poll return."""
        self._is_closed = True
        for event in self._news.values():
            event.set()
