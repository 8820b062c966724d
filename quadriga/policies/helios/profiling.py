"""What the live requests show: the profile of a candidate, and the confidence breach counter.

A profile is a few live requests for every candidate at full depth, one candidate after the other.
The breach counter says how many of the last tokens were below their threshold.

Source: HELIOS §3.3.2, §3.3.4, §3.3.3 (window 100, at most 50); differs: profiles run on scouts
beside the replicas that serve; with B sequences in a batch the window is max(100, 4·B) tokens and
the limit its half, so that a large batch's one bad step does not trip it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from quadriga.core.replica import DepthClass
from quadriga.policies.helios.history import HistoryRow
from quadriga.policies.helios.messages import RequestFinished

MAX_SKIPS = 3
"""Assessments in a row that a model may be left out of: what is known of it grows old."""
PLACE_S = 120.0
"""A request that was sent to a candidate and not heard of for so long is waited for no more, and
another one gets its place: news of it is lost with the ingress that had it."""


@dataclass(slots=True)
class _ProfileSeen:
    """A candidate under the eyes: its fresh row, and its requests."""

    row: HistoryRow
    started_s: deque[float] = field(default_factory=deque)
    finished: int = 0


class Profiling:
    """The candidates still to be seen, and the one that is.

    Args:
        num_requests: Live requests each one gets.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._to_come: deque[DepthClass] = deque()
        self._seen: _ProfileSeen | None = None
        self._skips: dict[str, int] = {}

    @property
    def now(self) -> DepthClass | None:
        """The candidate that is profiled, at full depth; None between two."""
        return DepthClass(self._seen.row.model, self._seen.row.depth) if self._seen else None

    @property
    def places(self) -> int:
        """Requests that the present candidate still wants."""
        if self._seen is None:
            return 0
        return max(0, self._num_requests - self._seen.finished - len(self._seen.started_s))

    def queue(self, candidates: Iterable[DepthClass]) -> None:
        """Profile these, in this order."""
        self._to_come.extend(candidates)

    def queue_again(
        self, candidates: Iterable[DepthClass], hopeless: Collection[str]
    ) -> list[DepthClass]:
        """Profile these anew, but for models that could not be chosen; returns those left out."""
        left_out = []
        for candidate in candidates:
            skips = self._skips.get(candidate.model, 0)
            if candidate.model in hopeless and skips < MAX_SKIPS:
                self._skips[candidate.model] = skips + 1
                left_out.append(candidate)
            else:
                self._skips.pop(candidate.model, None)
                self._to_come.append(candidate)
        return left_out

    def next(self) -> DepthClass | None:
        """Go to the next candidate; None where all have been seen."""
        if not self._to_come:
            return None
        now = self._to_come.popleft()
        self._seen = _ProfileSeen(HistoryRow(now.model, now.depth))
        return now

    def give_up(self) -> None:
        """The present candidate cannot be loaded."""
        self._seen = None

    def finish(self) -> HistoryRow | None:
        """The present candidate's row once it has had its requests, which ends its turn."""
        if self._seen is None or self._seen.finished < self._num_requests:
            return None
        row, self._seen = self._seen.row, None
        return row

    def started(self, now_s: float) -> None:
        """A request is on its way to the present candidate."""
        if self._seen is not None:
            self._seen.started_s.append(now_s)

    def expire(self, now_s: float) -> None:
        """Wait no more for requests of which nothing was heard."""
        while self._seen and self._seen.started_s and self._seen.started_s[0] < now_s - PLACE_S:
            self._seen.started_s.popleft()

    def lost(self) -> None:
        """One of them will not finish, or did elsewhere; its place is free."""
        if self._seen is not None and self._seen.started_s:
            self._seen.started_s.popleft()

    def finished(self, request: RequestFinished) -> None:
        """The present candidate served one."""
        if self._seen is not None:
            self._seen.row.add(request)
            self._seen.finished += 1
            self.lost()


class BreachWindow:
    """Counts breaches among the last tokens.

    Reports of several tokens say how many were breaches, not which: as they leave the window they
    are taken to be spread evenly.

    Args:
        min_tokens: Size of the window for small batches.
        tokens_per_sequence: The window holds at least this many tokens a running sequence.
        share: More breaches than this share of the window trip it.

    Attributes:
        size: Tokens that the window holds, for the batch last seen.
        breaches: Among them.
    """

    def __init__(self, min_tokens: int, tokens_per_sequence: int, share: float) -> None:
        self._min_tokens, self._per_sequence, self._share = min_tokens, tokens_per_sequence, share
        self.size = min_tokens
        self._reports: deque[tuple[float, float]] = deque()
        self._tokens = 0.0
        self.breaches = 0.0

    @property
    def is_tripped(self) -> bool:
        """Whether there are more breaches than allowed; the window need not be full for that."""
        return self.breaches > self._share * self.size + 1e-9

    def add(self, tokens: int, breaches: int, batch: int) -> None:
        """Note served tokens and how many of them were breaches."""
        self.size = max(self._min_tokens, self._per_sequence * batch)
        if tokens:
            self._reports.append((float(tokens), float(breaches)))
            self._tokens += tokens
            self.breaches += breaches
        while self._tokens > self.size:
            first_tokens, first_breaches = self._reports.popleft()
            excess = self._tokens - self.size
            gone = min(excess, first_tokens)
            gone_breaches = first_breaches * gone / first_tokens
            if gone < first_tokens:
                self._reports.appendleft((first_tokens - gone, first_breaches - gone_breaches))
            self._tokens -= gone
            self.breaches -= gone_breaches

    def clear(self) -> None:
        """Start anew, after a change."""
        self._reports.clear()
        self._tokens = self.breaches = 0.0
