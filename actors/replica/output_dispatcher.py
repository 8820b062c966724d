"""A replica's line to the ingresses: their polls, their signs of life, and their silence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from quadriga.clock import Clock
from quadriga.core.output import EngineOutput, PollReply
from quadriga.scheduling.output_buffer import OutputBuffer

MAX_POLL_S = 30.0
MIN_ABSENCE_S = 3.0
MAX_SPACING_S = 0.016
"""Between two replies to one ingress; steps that take longer are never held back."""


@dataclass(slots=True)
class _Window:
    """Where one ingress fetches its mail.

    Attributes:
        news: Set when a waiting poll shall look.
        opens_s: Until then tokens that merely continue are gathered.
        is_urgent: Something is pending that somebody waits for.
        timer: Sets `news` when the window opens.
    """

    news: asyncio.Event = field(default_factory=asyncio.Event)
    opens_s: float = 0.0
    is_urgent: bool = False
    timer: asyncio.TimerHandle | None = None


class OutputDispatcher:
    """Hands each ingress what its polls ask for; on the event loop.

    A reply costs both sides a fixed price, and the ingress a write for every sequence in it. So a
    reply with n sequences is followed by a pause of n times `spacing_s`, in which tokens that
    merely continue are gathered; first tokens, ends and errors go out at once. One sequence alone
    is never held back by more than `spacing_s`.

    Args:
        incarnation: Of the replica's process.
        poll_timeout_s: How long an ingress's polls usually wait.
        spacing_s: Pause per sequence in a reply; 0 answers every poll as soon as there is news.
    """

    def __init__(
        self, incarnation: str, clock: Clock, poll_timeout_s: float, *, spacing_s: float = 0.0
    ) -> None:
        self._clock = clock
        self._output_buffer = OutputBuffer(incarnation)
        self._absent_s = max(MIN_ABSENCE_S, 2 * poll_timeout_s)
        self._spacing_s = spacing_s
        self._windows: dict[str, _Window] = {}
        self._heard_s: dict[str, float] = {}
        self._any_heard_s = clock.now_s()
        self._is_closed = False

    async def poll(self, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        """Everything pending for an ingress; waits up to `timeout_s` for something."""
        self.hear(ingress_id)
        window = self._windows.setdefault(ingress_id, _Window())
        give_up_s = self._clock.now_s() + min(timeout_s, MAX_POLL_S)
        while True:
            window.news.clear()
            now_s = self._clock.now_s()
            is_over = now_s >= give_up_s or self._is_closed
            if is_over or not self._is_held(ingress_id, window, now_s):
                # What a lost reply held is in here again: the acknowledgement did not cover it.
                reply = self._output_buffer.collect(ingress_id, ack, now_s=now_s)
                if reply.emissions or is_over:
                    window.is_urgent = False
                    pause_s = len(reply.emissions) * self._spacing_s
                    window.opens_s = now_s + min(pause_s, MAX_SPACING_S)
                    return reply
            try:
                async with asyncio.timeout(give_up_s - now_s):
                    await window.news.wait()
            except TimeoutError:
                continue

    def put(self, emissions: Sequence[tuple[str, EngineOutput]], *, wakes: bool = True) -> None:
        """Keep emissions until their ingresses have acknowledged them, and wake their polls.

        Args:
            emissions: (ingress id, emission) pairs.
            wakes: Whether the news is worth a reply of its own; else it goes with the next.
        """
        now_s = self._clock.now_s()
        touched: dict[str, bool] = {}
        for ingress_id, emission in emissions:
            self._output_buffer.put(ingress_id, emission, now_s=now_s)
            touched[ingress_id] = touched.get(ingress_id, False) or _is_urgent(emission)
        for ingress_id, is_urgent in touched.items():
            window = self._windows.get(ingress_id)
            if window is not None and wakes:
                window.is_urgent = window.is_urgent or is_urgent
                if not self._is_held(ingress_id, window, now_s):
                    window.news.set()

    def unacknowledged(self, ingress_id: str, sequence_id: str) -> list[EngineOutput]:
        """What an ingress may not know yet of a sequence's tokens."""
        return self._output_buffer.unacknowledged(ingress_id, sequence_id)

    def _is_held(self, ingress_id: str, window: _Window, now_s: float) -> bool:
        """Whether what is pending waits for the window to open; if so, a timer is running."""
        if (
            window.is_urgent
            or now_s >= window.opens_s
            or not self._output_buffer.has_news(ingress_id)
        ):
            return False
        if window.timer is None:
            loop = asyncio.get_running_loop()
            window.timer = loop.call_later(window.opens_s - now_s, _open, window)
        return True

    def hear(self, ingress_id: str) -> None:
        """Note a sign of life of an ingress."""
        now_s = self._clock.now_s()
        self._heard_s[ingress_id] = now_s
        self._any_heard_s = now_s

    def heard_of_any(self, age_s: float) -> None:
        """Note that somebody else heard of some ingress so long ago."""
        self._any_heard_s = max(self._any_heard_s, self._clock.now_s() - age_s)

    def stood_still(self, seconds: float) -> None:
        """Count a time no silence in which this process could hear nobody."""
        now_s = self._clock.now_s()
        self._any_heard_s = min(now_s, self._any_heard_s + seconds)
        self._heard_s = {i: min(now_s, t + seconds) for i, t in self._heard_s.items()}

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
        self._output_buffer.drop(ingress_id)
        window = self._windows.pop(ingress_id, None)
        if window is not None and window.timer is not None:
            window.timer.cancel()

    @property
    def has_pending(self) -> bool:
        """Whether some ingress has not acknowledged everything."""
        return self._output_buffer.num_pending > 0

    def drop_absent(self) -> None:
        """Drop the mail of ingresses that fetch nothing: who drains does not wait for them.

        They may live: whose last sequence here was cancelled does not ask for its last tokens.
        """
        for ingress_id in self._output_buffer.silent(
            now_s=self._clock.now_s(), longer_than_s=self._absent_s
        ):
            self.drop(ingress_id)

    @property
    def is_closed(self) -> bool:
        """Whether nothing will be said any more."""
        return self._is_closed

    def close(self) -> None:
        """Let every waiting poll return."""
        self._is_closed = True
        for window in self._windows.values():
            window.news.set()


def _is_urgent(emission: EngineOutput) -> bool:
    """Whether somebody waits for this: a first token, an end, a change of owner."""
    return (
        emission.first_index == 0
        or emission.finish is not None
        or emission.error is not None
        or emission.moved_to is not None
    )


def _open(window: _Window) -> None:
    window.timer = None
    window.news.set()
