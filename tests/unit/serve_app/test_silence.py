"""Which silent replicas are given up."""

from __future__ import annotations

from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import ClusterView
from serve_app.request.output_poller import silent_replicas

NOW = 1000.0


def view(**ages_s: float) -> ClusterView:
    """What the scheduler told: how old each replica's last report was."""
    return ClusterView(
        NOW,
        [
            ReplicaSnapshot(
                ReplicaInfo(name, Role.DECODE, DepthClass("m", 8), "n", name, 8, 4096), NOW - age_s
            )
            for name, age_s in ages_s.items()
        ],
    )


def given_up(told: ClusterView, **silences_s: float) -> list[str]:
    return silent_replicas(silences_s, told, limit_s=10.0, doubt_s=3.0, max_age_s=5.0)


def test_who_answers_stays() -> None:
    assert given_up(view(a=0.5, b=0.5), a=0.1, b=2.9) == []
    assert given_up(view(a=90.0, b=0.5, c=0.5), a=0.1) == [], "an old report alone is nothing"


def test_one_witness_is_believed_late() -> None:
    assert given_up(view(a=0.5, b=0.5), a=9.9, b=0.1) == []
    assert given_up(view(a=0.5, b=0.5), a=10.1, b=0.1) == ["a"]
    assert given_up(ClusterView(0.0, []), a=10.1) == ["a"], "also without a scheduler"


def test_two_witnesses_are_believed_soon() -> None:
    assert given_up(view(a=5.5, b=0.5, c=0.5), a=3.1, b=0.1) == ["a"]
    assert given_up(view(a=4.5, b=0.5, c=0.5), a=3.1, b=0.1) == []


def test_whom_the_controller_dropped_is_not_waited_for() -> None:
    assert given_up(view(b=0.5, c=0.5), a=3.1, b=0.1) == ["a"]
    assert given_up(ClusterView(0.0, []), a=3.1, b=0.1) == [], "nothing is known at all"


def test_a_stalled_machine_gets_time() -> None:
    assert given_up(view(a=9.0, b=9.0, c=0.5), a=9.0, b=9.0, c=9.0) == []
    assert given_up(view(a=0.5, b=0.5), a=20.0, b=20.0) == []
    assert given_up(view(a=0.5, b=0.5), a=41.0, b=41.0) == ["a", "b"]
