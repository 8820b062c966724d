"""What the last reports do not show: sequences sent, and sequences begun."""

from __future__ import annotations

from dataclasses import replace

from quadriga.policies.ares.amend import Promised
from quadriga.policies.baselines.placement import CurrentLoad
from quadriga.policies.ledger import UNSEEN_MAX_S, Ledger, Sent
from quadriga.types import (
    DepthClass,
    LengthPrediction,
    PlaceRequest,
    ReplicaInfo,
    ReplicaSnapshot,
    Role,
)
from tests.unit.policies.ares_twin import snapshot

CLASS = DepthClass("m", 8)


def queue(waiting: int, *, loaded_s: float) -> ReplicaSnapshot:
    info = ReplicaInfo("p", Role.PREFILL, CLASS, "n", "i", 4, 1000)
    return ReplicaSnapshot(
        info, loaded_s, num_waiting=waiting, waiting_tokens=10 * waiting, loaded_s=loaded_s
    )


def place(sequence_id: str, started_s: float) -> PlaceRequest:
    return PlaceRequest(sequence_id, CLASS, 10, 20, source="p", started_s=started_s)


def test_who_has_begun_waits_no_longer() -> None:
    ledger, last = Ledger(), queue(3, loaded_s=5.0)
    ledger.begun(place("a", 6.0), last)
    ledger.begun(place("a", 6.0), last)  # asked again: it is one sequence
    seen = ledger.adjust(last, now_s=0.0)
    assert (seen.num_waiting, seen.waiting_tokens) == (2, 20)
    ledger.begun(place("b", 4.0), last)  # it had begun when the report was made
    assert ledger.adjust(last, now_s=0.0).num_waiting == 2
    news = queue(2, loaded_s=7.0)
    ledger.reported(news, [])
    assert ledger.adjust(news, now_s=0.0).num_waiting == 2


def test_a_report_from_before_does_not_count_it_again() -> None:
    """Sent later, but the engine's figures are still those from before the sequence began."""
    ledger, last = Ledger(), queue(3, loaded_s=5.0)
    ledger.begun(place("a", 6.0), last)
    late = queue(3, loaded_s=5.5)
    ledger.reported(late, [])
    assert ledger.adjust(late, now_s=0.0).num_waiting == 2


def test_one_that_was_never_reported_leaves_no_trace() -> None:
    ledger, last = Ledger(), queue(1, loaded_s=5.0)
    ledger.sent("p", "a", Sent(0.0, 10, 10))
    assert ledger.adjust(last, now_s=0.0).num_waiting == 2
    ledger.begun(place("a", 6.0), last)
    assert ledger.adjust(last, now_s=0.0) is last


def test_sent_sequences_count_until_they_are_reported_over_or_lost() -> None:
    ledger, last = Ledger(), queue(0, loaded_s=5.0)
    for name in ("a", "b", "c"):
        ledger.sent("p", name, Sent(0.0, 10, 12))
    assert ledger.adjust(last, now_s=1.0).reserved_tokens == 36
    ledger.reported(last, ["a"])
    ledger.finished(["b"])
    assert ledger.num_sent() == {"p": 1}
    assert ledger.adjust(last, now_s=UNSEEN_MAX_S + 1.0).num_waiting == 0
    ledger.sent("p", "d", Sent(0.0, 10, 12))
    ledger.forget("p")
    assert ledger.adjust(last, now_s=0.0) is last


def test_a_burst_between_two_reports_is_shared_out() -> None:
    """The one with the least tokens gets no more of it than brings it level."""
    ledger, snapshots = Ledger(), [snapshot(name, []) for name in "abc"]
    for held, made in zip((900, 300, 600), snapshots, strict=True):
        made.used_tokens = made.reserved_tokens = held
    placed = []
    for i in range(6):
        request = PlaceRequest(str(i), CLASS, num_tokens=100, max_total_tokens=150)
        seen = [ledger.adjust(s, now_s=0.0) for s in snapshots]
        name = CurrentLoad().choose(request, seen)
        assert name is not None
        ledger.sent(name, request.sequence_id, Sent(0.0, 0, 150, None, 100))
        placed.append(name)
    assert placed == ["b", "b", "b", "c", "b", "c"]


def test_a_forecast_counts_who_is_on_the_way() -> None:
    made = snapshot("d", [])
    assert made.forecast is not None
    made = replace(made, forecast=replace(made.forecast, per_token_s=1e-6))
    ledger = Ledger()
    promised = Promised("a", 50, LengthPrediction(10, 5, 20))
    ledger.sent("d", "a", Sent(0.0, 0, 60, promised))
    forecast = ledger.adjust(made, now_s=0.0).forecast
    assert forecast is not None
    assert forecast.sequence_ids == ("a",)
