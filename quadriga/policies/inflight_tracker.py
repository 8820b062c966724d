"""What the replicas' last reports do not show yet: sequences sent to them, and begun by them.

So that a burst does not go to one replica, and a queue is not thought full for a report too long.
At every moment a sequence is counted once: here until its replica's report shows it, from then on
by the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quadriga.core.forecast import LoadForecast
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import PlaceRequest
from quadriga.policies.ares.forecast import Promised, with_promised

UNSEEN_MAX_S = 30.0
"""A sequence that was sent and not reported for this long never arrived. Ingresses report what they
give up; this is for ones that died before they could. A busy replica may take seconds to report."""


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A sequence sent to a replica.

    Attributes:
        promised: Its forecast, where it is sent to a decode replica with a prediction. A forecast
            may be older than the load in the same report, and shows it later.
        kv_tokens: What it brings to a decode replica.
        is_reported: The replica's load shows it; its forecast does not yet.
    """

    since_s: float
    prompt_tokens: int
    reserved_tokens: int
    promised: Promised | None = None
    kv_tokens: int = 0
    priority: int = 0
    is_reported: bool = False


@dataclass(frozen=True, slots=True)
class Begun:
    """A sequence that left a prefill queue; `at_s` is by that replica's own clock."""

    at_s: float
    prompt_tokens: int
    priority: int


class InflightTracker:
    """Sequences by replica, between the scheduler's decision and the replica's report of it."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[str, SentRequest]] = {}
        self._begun: dict[str, dict[str, Begun]] = {}
        # By replica: the last report's forecast, what was added to it, and the sum.
        self._sums: dict[str, tuple[LoadForecast, list[Promised], LoadForecast]] = {}

    def sent(self, replica: str, sequence_id: str, sent: SentRequest) -> None:
        """A sequence goes to a replica; if it was refused by another one, it is not there."""
        self._forget_sent(sequence_id)
        self._sent.setdefault(replica, {})[sequence_id] = sent

    def begun(self, request: PlaceRequest, source: ReplicaSnapshot | None) -> None:
        """A sequence looks for a decode replica: it waits in no prefill queue any more.

        Args:
            source: What its prefill replica last reported.
        """
        is_unreported = self._forget_sent(request.sequence_id)
        if is_unreported or source is None or source.loaded_s >= request.started_s:
            return
        begun = Begun(request.started_s, request.num_tokens, request.priority)
        self._begun.setdefault(request.source, {})[request.sequence_id] = begun

    def reported(self, snapshot: ReplicaSnapshot, accepted: tuple[str, ...] | list[str]) -> None:
        """A report has come in: what it shows is forgotten here."""
        name = snapshot.info.name
        sent = self._sent.get(name, {})
        for sequence_id in accepted:
            if sequence_id in sent:
                sent[sequence_id] = replace(sent[sequence_id], is_reported=True)
        forecast = snapshot.forecast
        seen = set() if forecast is None else set(forecast.sequence_ids)
        for sequence_id in [i for i, s in sent.items() if s.is_reported]:
            if forecast is None or sent[sequence_id].promised is None or sequence_id in seen:
                del sent[sequence_id]
        begun = self._begun.get(name, {})
        for sequence_id in [i for i, b in begun.items() if b.at_s <= snapshot.loaded_s]:
            del begun[sequence_id]

    def finished(self, sequence_ids: list[str] | tuple[str, ...]) -> None:
        """Sequences are over."""
        for sequence_id in sequence_ids:
            self._forget_sent(sequence_id)
            for begun in self._begun.values():
                begun.pop(sequence_id, None)

    def forget(self, replica: str) -> None:
        """A replica is gone."""
        for of_replica in (self._sent, self._begun, self._sums):
            of_replica.pop(replica, None)

    def adjust(self, snapshot: ReplicaSnapshot, *, now_s: float) -> ReplicaSnapshot:
        """The report with what it does not show yet."""
        name = snapshot.info.name
        sent, begun = self._sent.get(name, {}), self._begun.get(name, {})
        if not sent and not begun:
            return snapshot
        for sequence_id in [i for i, s in sent.items() if s.since_s < now_s - UNSEEN_MAX_S]:
            del sent[sequence_id]
        forecast = snapshot.forecast
        if forecast is not None:
            promised = [s.promised for s in sent.values() if s.promised is not None]
            forecast = self._sum(name, forecast, promised, snapshot.step_time_s)
        new = [s for s in sent.values() if not s.is_reported]
        waiting = max(0, snapshot.num_waiting - len(begun))
        left, came = _by_priority(begun.values()), _by_priority(new)
        waiting_tokens = max(0, snapshot.waiting_tokens - left.total()) + came.total()
        by_priority = Counter(dict(snapshot.waiting_by_priority)) - left + came
        kv_tokens = sum(s.kv_tokens for s in new)
        return snapshot.changed(
            forecast=forecast,
            num_waiting=waiting + len(new),
            waiting_tokens=waiting_tokens,
            waiting_by_priority=tuple(sorted(by_priority.items())),
            used_tokens=snapshot.used_tokens + kv_tokens,
            prompt_tokens=snapshot.prompt_tokens + kv_tokens,
            reserved_tokens=snapshot.reserved_tokens + sum(s.reserved_tokens for s in new),
        )

    def _sum(
        self, name: str, forecast: LoadForecast, promised: list[Promised], step_s: float
    ) -> LoadForecast:
        """A forecast with what was promised; made again only where either has changed."""
        last = self._sums.get(name)
        if last is None or last[0] is not forecast or last[1] != promised:
            last = (forecast, promised, with_promised(forecast, promised, step_s))
            self._sums[name] = last
        return last[2]

    def _forget_sent(self, sequence_id: str) -> bool:
        """Forget where a sequence was sent. Returns whether no report has shown it."""
        found = [sent.pop(sequence_id, None) for sent in self._sent.values()]
        return any(s is not None and not s.is_reported for s in found)


def _by_priority(sequences: Iterable[SentRequest | Begun]) -> Counter[int]:
    """Their prompts' tokens by priority."""
    tokens = Counter[int]()
    for sequence in sequences:
        tokens[sequence.priority] += sequence.prompt_tokens
    return tokens
