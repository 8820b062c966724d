"""What the last reports do not show: sequences sent, and sequences begun."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quadriga.core.forecast import LengthPrediction
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import PlaceRequest
from quadriga.policies.ares.forecast import Promised
from quadriga.policies.baselines.placement import CurrentLoad
from quadriga.policies.inflight_tracker import UNSEEN_MAX_S, InflightTracker, SentRequest
from quadriga.policies.least_work import LeastWork
from tests.unit.policies.ares_twin import Held, snapshot

CLASS = DepthClass("m", 8)


def queue(waiting: int, *, loaded_s: float) -> ReplicaSnapshot:
    info = ReplicaInfo("p", Role.PREFILL, CLASS, "n", "i", 4, 1000)
    return ReplicaSnapshot(
        info, loaded_s, num_waiting=waiting, waiting_tokens=10 * waiting, loaded_s=loaded_s
    )


def place(sequence_id: str, started_s: float) -> PlaceRequest:
    return PlaceRequest(sequence_id, CLASS, 10, 20, source="p", started_s=started_s)


def test_who_has_begun_waits_no_longer() -> None:
    ledger, last = InflightTracker(), queue(3, loaded_s=5.0)
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
    ledger, last = InflightTracker(), queue(3, loaded_s=5.0)
    ledger.begun(place("a", 6.0), last)
    late = queue(3, loaded_s=5.5)
    ledger.reported(late, [])
    assert ledger.adjust(late, now_s=0.0).num_waiting == 2


def test_one_that_was_never_reported_leaves_no_trace() -> None:
    ledger, last = InflightTracker(), queue(1, loaded_s=5.0)
    ledger.sent("p", "a", SentRequest(0.0, 10, 10))
    assert ledger.adjust(last, now_s=0.0).num_waiting == 2
    ledger.begun(place("a", 6.0), last)
    assert ledger.adjust(last, now_s=0.0) is last


def test_sent_sequences_count_until_they_are_reported_over_or_lost() -> None:
    ledger, last = InflightTracker(), queue(0, loaded_s=5.0)
    for name in ("a", "b", "c"):
        ledger.sent("p", name, SentRequest(0.0, 10, 12))
    assert ledger.adjust(last, now_s=1.0).reserved_tokens == 36
    ledger.reported(last, ["a"])
    ledger.finished(["b"])
    assert ledger.adjust(last, now_s=1.0).num_waiting == 1
    assert ledger.adjust(last, now_s=UNSEEN_MAX_S + 1.0).num_waiting == 0
    ledger.sent("p", "d", SentRequest(0.0, 10, 12))
    ledger.forget("p")
    assert ledger.adjust(last, now_s=0.0) is last


def test_what_no_report_shows_yet_counts_with_its_priority() -> None:
    """Less important prompts that were just sent wait behind a more important one as well."""
    ledger, last = InflightTracker(), queue(3, loaded_s=5.0)
    last.waiting_by_priority = ((0, 10), (5, 20))
    for name, priority in (("a", 5), ("b", 7)):
        ledger.sent("p", name, SentRequest(0.0, 40, 40, priority=priority))
    ledger.begun(place("c", 6.0), last)
    seen = ledger.adjust(last, now_s=1.0)
    assert (seen.waiting_tokens, seen.waiting_by_priority) == (100, ((5, 60), (7, 40)))


def test_a_burst_between_two_reports_is_shared_out() -> None:
    """The one with the least tokens gets no more of it than brings it level."""
    ledger, snapshots = InflightTracker(), [snapshot(name, []) for name in "abc"]
    for held, made in zip((900, 300, 600), snapshots, strict=True):
        made.used_tokens = made.reserved_tokens = held
    placed = []
    for i in range(6):
        request = PlaceRequest(str(i), CLASS, num_tokens=100, max_total_tokens=150)
        seen = [ledger.adjust(s, now_s=0.0) for s in snapshots]
        name = CurrentLoad().choose(request, seen)
        assert name is not None
        ledger.sent(name, request.sequence_id, SentRequest(0.0, 0, 150, None, 100))
        placed.append(name)
    assert placed == ["b", "b", "b", "c", "b", "c"]


def test_who_was_refused_by_one_replica_counts_at_the_next_one_only() -> None:
    ledger, snapshots = InflightTracker(), [snapshot(name, []) for name in "ab"]
    for name in "ab":
        ledger.sent(name, "s", SentRequest(0.0, 0, 12, None, 10))
    seen = [ledger.adjust(s, now_s=0.0) for s in snapshots]
    assert [(s.num_waiting, s.prompt_tokens) for s in seen] == [(0, 0), (1, 10)]


def test_of_two_idle_replicas_neither_gets_two_more_than_the_other() -> None:
    """Whenever their reports come, and however far the sequences there are."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        ledger, policy = InflightTracker(), LeastWork()
        held: dict[str, list[str]] = {"a": [], "b": []}
        reported = {name: snapshot(name, [], slots=64) for name in held}
        unreported: dict[str, list[str]] = {"a": [], "b": []}
        speed = {"a": 1.0, "b": float(rng.uniform(1.0, 20.0))}
        for i in range(48):
            for name in held:
                if rng.random() < 0.3:
                    generated = int(speed[name] * sum(i - int(s) for s in held[name]))
                    made = snapshot(name, [], slots=64)
                    made.num_running = len(held[name])
                    made.prompt_tokens = 20 * len(held[name])
                    made.generated_tokens = generated
                    reported[name] = made
                    ledger.reported(made, unreported[name])
                    unreported[name] = []
            request = PlaceRequest(str(i), CLASS, 20, 1520)
            seen = [ledger.adjust(s, now_s=0.0) for s in reported.values()]
            name = policy.choose(request, seen)
            assert name is not None
            ledger.sent(name, request.sequence_id, SentRequest(0.0, 0, 20, None, 20))
            held[name].append(request.sequence_id)
            unreported[name].append(request.sequence_id)
            assert abs(len(held["a"]) - len(held["b"])) <= 1


def test_a_forecast_shows_a_sequence_later_than_the_load() -> None:
    """It is counted in the forecast until then, and once."""
    ledger, before = InflightTracker(), snapshot("d", [])
    promised = Promised("a", 50, LengthPrediction(10, 5, 20))
    ledger.sent("d", "a", SentRequest(0.0, 0, 60, promised, 50))
    ledger.reported(before, ["a"])
    seen = ledger.adjust(before, now_s=0.0)
    assert (seen.num_waiting, seen.used_tokens) == (0, 0), "the load showed it"
    assert seen.forecast is not None and seen.forecast.sequence_ids == ("a",)
    after = snapshot("d", [Held("a", 50.0, 10.0, 5.0, 20.0)])
    ledger.reported(after, [])
    assert ledger.adjust(after, now_s=0.0) is after


def test_a_forecast_counts_who_is_on_the_way() -> None:
    made = snapshot("d", [])
    assert made.forecast is not None
    made = replace(made, forecast=replace(made.forecast, per_token_s=1e-6))
    ledger = InflightTracker()
    promised = Promised("a", 50, LengthPrediction(10, 5, 20))
    ledger.sent("d", "a", SentRequest(0.0, 0, 60, promised))
    forecast = ledger.adjust(made, now_s=0.0).forecast
    assert forecast is not None
    assert forecast.sequence_ids == ("a",)


def test_a_sum_is_made_again_where_the_report_or_those_on_the_way_have_changed() -> None:
    made, ledger = snapshot("d", []), InflightTracker()
    promised = Promised("a", 50, LengthPrediction(10, 5, 20))
    ledger.sent("d", "a", SentRequest(0.0, 0, 60, promised))
    first = ledger.adjust(made, now_s=0.0).forecast
    assert ledger.adjust(made, now_s=0.0).forecast is first
    ledger.sent("d", "b", SentRequest(0.0, 0, 60, replace(promised, sequence_id="b")))
    both = ledger.adjust(made, now_s=0.0).forecast
    assert both is not None and both.sequence_ids == ("a", "b")
    newer = snapshot("d", [Held("c", 50.0, 10.0, 5.0, 20.0)])
    later = ledger.adjust(newer, now_s=0.0).forecast
    assert later is not None and later.sequence_ids == ("c", "a", "b")
    ledger.finished(["a", "b"])
    assert ledger.adjust(newer, now_s=0.0) is newer
