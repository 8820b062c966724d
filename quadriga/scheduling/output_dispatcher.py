"""What a replica sends to each ingress, and when it last heard from it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quadriga.clock import Clock
from quadriga.core.output import POLL_SLACK_S, EngineOutput, PollReply

MAX_POLL_S = 30.0
ABSENCE_MARGIN_S = 1.0
"""After a poll of an ingress that has lost a reply must have come again."""
MAX_SPACING_S = 0.032
"""Between two replies to one ingress; steps that take longer are never held back."""


@dataclass(slots=True)
class _OutputLog:
    """Outputs of one ingress, numbered without gaps, and its polls.

    Attributes:
        heard_s: When its last sign of life came, or one was first expected; None: never.
        fetched_s: When outputs were last collected, or the first was put; None: neither.
        entries: Outputs that were in a reply and are not acknowledged; the last has number
            `last_seq`. They are never changed.
        unsent: By sequence, its outputs that were in no reply yet.
        news: Set when a waiting poll is to look.
        opens_s: Until then tokens that merely continue a sequence are gathered.
        urgent: Sequences whose outputs are sent at once.
        timer: Sets `news` at `opens_s`.
    """

    heard_s: float | None = None
    fetched_s: float | None = None
    entries: deque[EngineOutput] = field(default_factory=deque)
    last_seq: int = 0
    unsent: dict[str, list[EngineOutput]] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    opens_s: float = 0.0
    urgent: set[str] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


class OutputDispatcher:
    """Keeps one acknowledged log of outputs per ingress, and answers the polls of the ingresses.

    Delivery is at least once and in order: a lost reply loses nothing, as the ingress polls again
    with its old acknowledgement. Tokens that were not yet sent are merged, so that a slow ingress
    gets few large outputs.

    A reply costs both sides a fixed price, and the ingress a write for every sequence in it. So a
    reply with n sequences is followed by a pause of n times `spacing_s`, in which tokens that
    merely continue are gathered; first tokens, ends and errors go out at once, without those of
    other sequences. One sequence alone is never held back by more than `spacing_s`.

    Not thread-safe: the replica's event loop calls everything.

    Args:
        incarnation: Of the replica's process.
        poll_timeout_s: How long an ingress's polls usually wait.
        spacing_s: Pause per sequence in a reply; 0 answers every poll as soon as there is news.

    Attributes:
        is_closed: Nothing will be put any more.
    """

    def __init__(
        self, incarnation: str, clock: Clock, poll_timeout_s: float, *, spacing_s: float = 0.0
    ) -> None:
        self._incarnation = incarnation
        self._clock = clock
        self._absent_s = poll_timeout_s + POLL_SLACK_S + ABSENCE_MARGIN_S
        self._spacing_s = spacing_s
        self._logs: dict[str, _OutputLog] = {}
        self._any_heard_s = clock.now_s()
        self.is_closed = False

    async def poll(self, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        """Everything pending for an ingress; waits up to `timeout_s` for something.

        Args:
            ack: `last_seq` of the last reply the ingress got from this incarnation; 0 at first.
        """
        self.hear(ingress_id)
        log = self._log_of(ingress_id)
        give_up_s = self._clock.now_s() + min(timeout_s, MAX_POLL_S)
        while True:
            log.news.clear()
            now_s = self._clock.now_s()
            is_over = now_s >= give_up_s or self.is_closed
            if is_over or not self._is_held(log, now_s):
                is_early = now_s < log.opens_s and not is_over
                # What a lost reply held is in here again: the acknowledgement did not cover it.
                reply = self.collect(ingress_id, ack, only_urgent=is_early)
                if not is_early:
                    pause_s = len(reply.emissions) * self._spacing_s
                    log.opens_s = now_s + min(pause_s, MAX_SPACING_S)
                if reply.emissions or is_over:
                    return reply
            try:
                async with asyncio.timeout(give_up_s - now_s):
                    await log.news.wait()
            except TimeoutError:
                continue

    def put(self, emissions: Sequence[tuple[str, EngineOutput]], *, wakes: bool = True) -> None:
        """Keep outputs until their ingresses have acknowledged them, and wake their polls.

        Args:
            emissions: (ingress id, output) pairs.
            wakes: Whether the news is worth a reply of its own; else it goes with the next.
        """
        now_s = self._clock.now_s()
        touched: dict[str, _OutputLog] = {}
        for ingress_id, emission in emissions:
            log = self._log_of(ingress_id)
            if log.fetched_s is None:
                log.fetched_s = now_s
            touched[ingress_id] = log
            if wakes and _is_urgent(emission):
                log.urgent.add(emission.sequence_id)
            unsent = log.unsent.setdefault(emission.sequence_id, [])
            if not unsent or not _extend(unsent[-1], emission):
                unsent.append(emission)
        if not wakes:
            return
        for log in touched.values():
            if not self._is_held(log, now_s):
                log.news.set()

    def collect(self, ingress_id: str, ack: int, *, only_urgent: bool = False) -> PollReply:
        """Drop what `ack` acknowledges and return all the rest, without waiting.

        Args:
            only_urgent: Of what was in no reply yet, the sequences that are sent at once.
        """
        log = self._log_of(ingress_id)
        log.fetched_s = self._clock.now_s()
        first_seq = log.last_seq - len(log.entries) + 1
        for _ in range(min(ack, log.last_seq) - first_seq + 1):
            log.entries.popleft()
        for sequence_id in [i for i in log.unsent if not only_urgent or i in log.urgent]:
            news = log.unsent.pop(sequence_id)
            log.entries += news
            log.last_seq += len(news)
        log.urgent.clear()
        return PollReply(self._incarnation, log.last_seq, list(log.entries))

    def unacknowledged(self, ingress_id: str, sequence_id: str) -> list[EngineOutput]:
        """Outputs with tokens of one sequence that its ingress may not have, oldest first."""
        log = self._logs.get(ingress_id)
        sent = [e for e in log.entries if e.sequence_id == sequence_id] if log is not None else []
        unsent = log.unsent.get(sequence_id, []) if log is not None else []
        return [e for e in [*sent, *unsent] if e.token_ids]

    def _log_of(self, ingress_id: str) -> _OutputLog:
        log = self._logs.get(ingress_id)
        if log is None:
            log = self._logs[ingress_id] = _OutputLog()
        return log

    def _is_held(self, log: _OutputLog, now_s: float) -> bool:
        """Whether what is pending waits until `opens_s`; if so, a timer is running."""
        if log.urgent or now_s >= log.opens_s or not log.unsent:
            return False
        if log.timer is None:
            loop = asyncio.get_running_loop()
            log.timer = loop.call_later(log.opens_s - now_s, _open, log)
        return True

    def hear(self, ingress_id: str) -> None:
        """Note a sign of life of an ingress."""
        self._any_heard_s = self._log_of(ingress_id).heard_s = self._clock.now_s()

    def heard_of_any(self, age_s: float) -> None:
        """Note that another process heard of some ingress `age_s` ago."""
        self._any_heard_s = max(self._any_heard_s, self._clock.now_s() - age_s)

    def stood_still(self, seconds: float) -> None:
        """Do not count a time as silence in which this process could hear no ingress."""
        now_s = self._clock.now_s()
        self._any_heard_s = min(now_s, self._any_heard_s + seconds)
        for log in self._logs.values():
            if log.heard_s is not None:
                log.heard_s = min(now_s, log.heard_s + seconds)

    def expect(self, ingress_id: str) -> None:
        """A sequence of this ingress arrives; it is an orphan unless the ingress shows up."""
        log = self._log_of(ingress_id)
        if log.heard_s is None:
            log.heard_s = self._clock.now_s()

    @property
    def silence_s(self) -> float:
        """Seconds since any ingress was heard of."""
        return self._clock.now_s() - self._any_heard_s

    def silent(self, *, longer_than_s: float) -> dict[str, float]:
        """Seconds of silence of each ingress that was not heard of for longer than this."""
        now_s = self._clock.now_s()
        return {
            ingress_id: now_s - log.heard_s
            for ingress_id, log in self._logs.items()
            if log.heard_s is not None and now_s - log.heard_s > longer_than_s
        }

    def drop(self, ingress_id: str) -> None:
        """Forget an ingress and all that is pending for it."""
        log = self._logs.pop(ingress_id, None)
        if log is not None and log.timer is not None:
            log.timer.cancel()

    @property
    def num_pending(self) -> int:
        """Unacknowledged outputs over all ingresses."""
        logs = self._logs.values()
        return sum(len(log.entries) + sum(map(len, log.unsent.values())) for log in logs)

    def drop_absent(self) -> None:
        """Drop the outputs of ingresses that fetch nothing: a drain does not wait for them.

        Such an ingress may be alive: once its last sequence here is cancelled, it does not ask for
        the last tokens of it.
        """
        now_s = self._clock.now_s()
        for ingress_id, log in list(self._logs.items()):
            if log.fetched_s is not None and now_s - log.fetched_s > self._absent_s:
                self.drop(ingress_id)

    def close(self) -> None:
        """Let every waiting poll return."""
        self.is_closed = True
        for log in self._logs.values():
            log.news.set()


def _is_urgent(emission: EngineOutput) -> bool:
    """Whether an output is sent at once: a first token, an end, a change of owner."""
    return (
        emission.first_index == 0
        or emission.finish is not None
        or emission.error is not None
        or emission.moved_to is not None
    )


def _open(log: _OutputLog) -> None:
    log.timer = None
    log.news.set()


def _extend(earlier: EngineOutput, emission: EngineOutput) -> bool:
    """Append the output's tokens to an earlier one; False where they do not simply follow."""
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
    if emission.sure_layers is not None:
        earlier.sure_layers = [*(earlier.sure_layers or ()), *emission.sure_layers]
    if earlier.logprobs is not None and emission.logprobs is not None:
        earlier.logprobs.extend(emission.logprobs)
    earlier.finish = emission.finish
    earlier.progress = emission.progress or earlier.progress
    return True
