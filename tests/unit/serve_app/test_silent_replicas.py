"""Which silent replicas are given up."""

from __future__ import annotations

from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import ClusterView
from serve_app.request.output_poller import silent_replicas

NOW = 1000.0


def view(**ages_s: float) -> ClusterView:
    """The scheduler's view with the age of each replica's last report."""
    return ClusterView(
        NOW,
        [
            ReplicaSnapshot(
                ReplicaInfo(name, Role.DECODE, DepthClass("m", 8), "n", name, 8, 4096), NOW - age_s
            )
            for name, age_s in ages_s.items()
        ],
    )


def given_up(known: ClusterView, **silences_s: float) -> list[str]:
    return silent_replicas(silences_s, known, limit_s=10.0, doubt_s=3.0, max_age_s=5.0)


def test_a_replica_that_answers_is_kept() -> None:
    assert given_up(view(a=0.5, b=0.5), a=0.1, b=2.9) == []
    assert given_up(view(a=90.0, b=0.5, c=0.5), a=0.1) == [], "an old report alone is nothing"


def test_silent_polls_alone_count_late() -> None:
    assert given_up(view(a=0.5, b=0.5), a=9.9, b=0.1) == []
    assert given_up(view(a=0.5, b=0.5), a=10.1, b=0.1) == ["a"]
    assert given_up(ClusterView(0.0, []), a=10.1) == ["a"], "also without a scheduler"


def test_silent_polls_and_an_old_report_count_soon() -> None:
    assert given_up(view(a=5.5, b=0.5, c=0.5), a=3.1, b=0.1) == ["a"]
    assert given_up(view(a=4.5, b=0.5, c=0.5), a=3.1, b=0.1) == []


def test_a_replica_without_a_report_counts_soon() -> None:
    assert given_up(view(b=0.5, c=0.5), a=3.1, b=0.1) == ["a"]
    assert given_up(ClusterView(0.0, []), a=3.1, b=0.1) == [], "nothing is known at all"


def test_a_stalled_machine_gets_time() -> None:
    assert given_up(view(a=9.0, b=9.0, c=0.5), a=9.0, b=9.0, c=9.0) == []
    assert given_up(view(a=0.5, b=0.5), a=20.0, b=20.0) == []
    assert given_up(view(a=0.5, b=0.5), a=41.0, b=41.0) == ["a", "b"]
