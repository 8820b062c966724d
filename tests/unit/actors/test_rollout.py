"""Who of a place's replicas goes, and when; and whom Ray takes the node from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from actors.controller.drain import LeavingNodes, empty, hand_over
from actors.controller.replica_manager import ReplicaManager
from quadriga.clock import ManualClock
from quadriga.control.replica_record import ReplicaLoad, ReplicaPhase, ReplicaRecord, ReplicaStatus
from quadriga.control.rollout import (
    LEAVE_S,
    SURGE_PATIENCE_S,
    Rollout,
    fewer_wanted,
    is_relieved,
    kept_places,
    turn_over,
)
from quadriga.core.migration import MigrationReport
from quadriga.core.replica import DepthClass, ReplicaInfo, Role
from quadriga.errors import ReplicaDied

KEY = (Role.DECODE, 0)
FAR_S = 100.0


def member(
    name: str,
    phase: ReplicaPhase = ReplicaPhase.READY,
    *,
    fingerprint: str = "new",
    since_s: float = 0.0,
    num_running: int = 0,
    role: Role = Role.DECODE,
) -> ReplicaRecord:
    made = ReplicaRecord((role, 0), name, since_s, fingerprint, phase)
    info = ReplicaInfo(name, role, DepthClass("m", 8), f"node-of-{name}", "i", 8, 4096)
    made.status = ReplicaStatus(
        info, True, False, None, ReplicaLoad(num_running=num_running), fingerprint
    )
    return made


def decide(
    *members: ReplicaRecord, leaving: Mapping[str, float] | None = None, **options: Any
) -> Rollout:
    left = leaving or {}
    return turn_over(
        KEY,
        [*members, *options.get("others", ())],
        {(role, ordinal): "new" for role in Role for ordinal in (0, 1)},
        options.get("failing", ()),
        left_s=lambda m: left.get(m.name),
        may_go=options.get("may_go"),
        now_s=options.get("now_s", 0.0),
    )


def gone(found: Rollout) -> list[str]:
    return [one.replica.name for one in found.going]


@pytest.mark.parametrize(
    ("phase", "since_s", "may_go"),
    [
        (None, 0.0, False),
        (ReplicaPhase.STARTING, 0.0, False),
        (ReplicaPhase.READY, 0.0, True),
        (ReplicaPhase.PENDING, FAR_S - SURGE_PATIENCE_S, False),
        (ReplicaPhase.PENDING, FAR_S - SURGE_PATIENCE_S - 1.0, True),
    ],
)
def test_replicas_of_another_role_serve_until_the_new_ones_do(
    phase: ReplicaPhase | None, since_s: float, may_go: bool
) -> None:
    mixed = [] if phase is None else [member("m", phase, since_s=since_s, role=Role.MIXED)]
    places = {(Role.MIXED, 0): mixed}
    assert is_relieved(member("d"), places, now_s=FAR_S) == may_go
    one_too_many = member("m1", role=Role.MIXED)
    assert is_relieved(one_too_many, places, now_s=FAR_S) == may_go
    one_too_many.phase = ReplicaPhase.STARTING
    assert is_relieved(one_too_many, places, now_s=FAR_S), "it serves nobody"


def elsewhere(phase: ReplicaPhase, since_s: float = 0.0) -> ReplicaRecord:
    """Another place's replica."""
    return replace(member("other", phase, since_s=since_s), key=(Role.DECODE, 1))


@pytest.mark.parametrize(
    ("other", "may_begin"),
    [
        (elsewhere(ReplicaPhase.READY), True),
        (elsewhere(ReplicaPhase.RETIRING), True),
        (elsewhere(ReplicaPhase.STARTING), False),
        (elsewhere(ReplicaPhase.PENDING, FAR_S - 1.0), False),
        (elsewhere(ReplicaPhase.PENDING), True),
    ],
)
def test_replicas_are_replaced_one_after_the_other(other: ReplicaRecord, may_begin: bool) -> None:
    old = member("a", fingerprint="old")
    assert decide(old, others=[other], now_s=FAR_S).lacks_one is may_begin
    assert decide(others=[other], now_s=FAR_S).lacks_one, "an empty place is filled at once"
    assert decide(old, others=[other], leaving={"a": 60.0}, now_s=FAR_S).lacks_one, "it goes anyway"


@pytest.mark.parametrize("first", [ReplicaPhase.RETIRING, ReplicaPhase.STARTING])
def test_only_one_goes_before_its_successor_has_room(first: ReplicaPhase) -> None:
    """The other successor may take the room that is given back, but no second one gives its own."""
    waiting = (member("a", fingerprint="old"), member("b", ReplicaPhase.PENDING))
    assert gone(decide(*waiting, now_s=FAR_S)) == ["a"]
    assert gone(decide(*waiting, others=[elsewhere(first)], now_s=FAR_S)) == []


def test_an_empty_place_is_filled_and_a_full_one_left_alone() -> None:
    assert decide().lacks_one
    found = decide(member("a"))
    assert not found.lacks_one
    assert not found.going


def test_of_two_replicas_for_one_place_the_ready_one_stays() -> None:
    assert gone(decide(member("a", ReplicaPhase.STARTING), member("b"))) == ["a"]


def test_an_outdated_replica_waits_for_its_successor_or_makes_room() -> None:
    old = member("old", fingerprint="old")
    assert decide(old).lacks_one
    assert gone(decide(old)) == []
    assert gone(decide(old, member("new", ReplicaPhase.STARTING))) == []
    assert gone(decide(old, member("new"))) == ["old"]
    waiting = member("new", ReplicaPhase.PENDING)
    assert gone(decide(old, waiting, now_s=SURGE_PATIENCE_S)) == []
    assert gone(decide(old, waiting, now_s=SURGE_PATIENCE_S + 1)) == ["old"]


@pytest.mark.parametrize("other", [{"depth_class": DepthClass("m", 6)}, {"numerics": "weights 2"}])
def test_a_replica_serves_until_its_successor_finds_partners(other: dict[str, Any]) -> None:
    """KV goes between replicas of one depth and of the same weights alone."""

    def changed(name: str, phase: ReplicaPhase, role: Role = Role.DECODE) -> ReplicaRecord:
        made = member(name, phase, role=role)
        assert made.status is not None
        made.status = replace(made.status, info=replace(made.info, **other))
        return made

    old, new = member("old", fingerprint="old"), changed("new", ReplicaPhase.READY)
    before = member("p0", fingerprint="old", role=Role.PREFILL)
    for role in (Role.PREFILL, Role.MIXED):
        starting = changed("p1", ReplicaPhase.STARTING, role)
        found = decide(old, new, others=[before, starting], now_s=FAR_S)
        assert gone(found) == [] and "old, and needs a prefill replica" in found.waits
        assert gone(decide(old, new, others=[starting])) == ["old"], "neither serves"
        soon = decide(old, new, others=[before, starting], leaving={"old": LEAVE_S - 1})
        assert (gone(soon), soon.waits) == (["old"], ""), "it does not wait any more"
        ready = changed("p1", ReplicaPhase.READY, role)
        found = decide(old, new, others=[before, ready])
        assert (gone(found), found.waits) == (["old"], "")
        waiting = changed("p1", ReplicaPhase.PENDING, role)
        for failing, going in (((), []), ((role,), ["old"])):
            found = decide(old, new, others=[before, waiting], failing=failing, now_s=FAR_S)
            assert gone(found) == going, "where successors die, nobody else makes room"


def test_none_makes_room_while_successors_die_and_the_one_that_serves_goes_last() -> None:
    serving, waiting = member("a", fingerprint="first"), member("c", ReplicaPhase.PENDING)
    for failing, going in (((), ["a"]), ((Role.DECODE,), []), ((Role.PREFILL,), [])):
        assert gone(decide(serving, waiting, failing=failing, now_s=FAR_S)) == going
    for phase in (ReplicaPhase.STARTING, ReplicaPhase.PENDING):
        between = member("b", phase, fingerprint="second")
        assert gone(decide(serving, between, waiting, now_s=FAR_S)) == ["b"]


def test_helios_is_asked_before_a_replica_goes() -> None:
    old, late = member("old", fingerprint="old"), SURGE_PATIENCE_S + 1
    assert gone(decide(old, member("new"), may_go=lambda m: False)) == []
    (one,) = decide(old, member("new"), may_go=lambda m: True).going
    assert (one.replica.name, one.moves) == ("old", True), "others may still have its model"
    waiting = member("new", ReplicaPhase.PENDING)
    assert gone(decide(old, waiting, may_go=lambda m: True, now_s=late)) == []


def test_a_replica_whose_node_goes_is_followed_and_emptied() -> None:
    leaving, left = member("a"), {"a": FAR_S}
    assert decide(leaving, leaving=left).lacks_one
    assert gone(decide(leaving, leaving=left)) == [], "it serves on until it has a successor"
    (one,) = decide(leaving, member("b"), leaving=left).going
    assert (one.replica.name, one.moves, one.within_s) == ("a", True, FAR_S)


@pytest.mark.parametrize("was_asked", [False, True])
def test_only_a_replica_that_was_asked_to_go_makes_room_for_its_successor(was_asked: bool) -> None:
    """Where its node goes, nothing new is placed in its room."""
    leaving, waiting = member("a"), member("b", ReplicaPhase.PENDING)
    assert leaving.status is not None
    leaving.status = replace(leaving.status, leave_s=FAR_S if was_asked else None)
    found = decide(leaving, waiting, leaving={"a": FAR_S}, now_s=SURGE_PATIENCE_S + 1)
    assert gone(found) == (["a"] if was_asked else [])


def test_a_replica_whose_node_goes_soon_waits_for_no_successor() -> None:
    assert gone(decide(member("a"), leaving={"a": LEAVE_S - 1})) == ["a"]
    starting = member("b", ReplicaPhase.STARTING)
    found = decide(member("a"), starting, leaving={"a": LEAVE_S - 1}, may_go=lambda m: False)
    assert gone(found) == ["a"], "it is not asked whether a node may go"


def test_a_replica_on_a_leaving_node_goes_before_an_outdated_one() -> None:
    old, leaving = member("old", fingerprint="old"), member("a")
    assert gone(decide(old, leaving, member("b"), leaving={"a": FAR_S})) == ["a"]


def test_next_owners_are_ready_replicas_of_one_kind_that_stay() -> None:
    fleet = ReplicaManager(
        "app", ManualClock(0.0), lambda: None, lambda: 0.0, lambda m: m.name == "leaving"
    )
    going = member("going", ReplicaPhase.RETIRING)
    for one in (
        going,
        member("full", num_running=5),
        member("idle", num_running=1),
        member("starting", ReplicaPhase.STARTING),
        member("leaving"),
        member("other", fingerprint="old"),
        member("prefill", role=Role.PREFILL),
    ):
        fleet.replicas[one.name] = one
    assert fleet.next_owners(going) == ["idle", "full"]


class Replicas:
    """Answers `hand_over` with what is written down for an heir, and notes who was asked."""

    def __init__(self, **outcomes: list[str]) -> None:
        self.outcomes = outcomes
        self.asked: list[str] = []

    async def call(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        assert (name, method) == ("going", "hand_over")
        assert args[1] == "it is time"
        self.asked.append(args[0])
        if self.outcomes[args[0]] in ([], ["unreachable"]):
            raise ReplicaDied("no answer", code="".join(self.outcomes[args[0]]) or None)
        return [MigrationReport("s", outcome) for outcome in self.outcomes[args[0]]]


async def test_sequences_that_do_not_fit_at_one_replica_go_to_the_next() -> None:
    replicas = Replicas(a=["moved", "refused"], b=["moved", "finished"], c=["moved"])
    await hand_over(replicas.call, "going", ["a", "b", "c"], reason="it is time", timeout_s=1.0)
    assert replicas.asked == ["a", "b"]


async def test_emptying_goes_on_until_the_replica_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.controller.drain.AGAIN_S", 0.0)
    replicas = Replicas(a=["moved"], b=["refused"], c=[], d=["unreachable"])
    turns = [["b"], ["d"], [], ["a", "b"], ["c"]]
    await empty(replicas.call, "going", lambda: turns.pop(0), reason="it is time", timeout_s=1.0)
    assert replicas.asked == ["b", "d", "a", "c"], "it may be reached again"


async def test_the_leaving_nodes_are_those_that_ray_named_last() -> None:
    said: list[Any] = [{"n": 130.0}, RaySystemError("away"), {"n": 130.0, "m": float("inf")}, {}]
    changes: list[int] = []

    def ask() -> Mapping[str, float]:
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: Mapping[str, float] = answer
        return found

    nodes = LeavingNodes(lambda: changes.append(len(said)), ManualClock(100.0), ask)
    assert nodes.left_s("n") is None
    for _ in range(2):  # the second time Ray says nothing
        await nodes.look()
        assert nodes.left_s("n") == 30.0
    await nodes.look()
    assert nodes.left_s("m") == float("inf")
    await nodes.look()
    assert nodes.left_s("n") is None
    assert changes == [3, 1, 0]


@pytest.mark.parametrize(
    ("held", "wanted", "work", "kept"),
    [
        ("a0 b1 c2", "nn", {"a": 1.0, "b": 20.0, "c": 30.0}, "a2 b1 c0"),
        ("a0 b1 c2", "nn", {"a": 30.0, "b": 20.0, "c": 1.0}, "a0 b1 c2"),
        ("a0 b1 c2", "nn", {"a": 10.0, "b": 2.0, "c": 30.0}, "a0 b2 c1"),
        ("a0 b1 c2", "nn", {}, "a0 b1 c2"),
        ("a0 b1 c2 d3", "nn", {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, "a3 b2 c1 d0"),
        ("a0 c2", "nn", {}, "a0 c1"),
        ("a0 c2 d3", "nn", {"a": 9.0, "c": 1.0, "d": 2.0}, "a0 c2 d1"),
        ("c2 d3", "nn", {"c": 1.0, "d": 2.0}, "c1 d0"),
        ("a0 b1 C2", "nn", {"C": 9.0}, "a0 b1 C2"),
        # A pool before another's grows, or comes behind it.
        ("a0 b1 C2 D3", "nnnoo", {}, "a0 b1 C4 D3"),
        ("a0 b1 C2 D3", "oonn", {}, "a2 b3 C0 D1"),
    ],
)
def test_a_replica_has_a_place_of_its_kind(
    held: str, wanted: str, work: dict[str, float], kept: str
) -> None:
    """Those in capital letters are of the other kind."""
    places = {(Role.DECODE, i): kind for i, kind in enumerate(wanted)}
    replicas = [member(name, fingerprint="n" if name > "Z" else "o") for name, _ in held.split()]
    for one, (_, ordinal) in zip(replicas, held.split(), strict=True):
        one.key = (Role.DECODE, int(ordinal))
    changed = kept_places(replicas, places, work)
    assert " ".join(f"{m.name}{changed.get(m.name, m.key)[1]}" for m in replicas) == kept


def test_a_replica_that_goes_says_with_which_of_its_kind_it_was_compared() -> None:
    replicas = [member(name, fingerprint="n" if name > "Z" else "o") for name in "abC"]
    why = fewer_wanted(replicas[0], replicas, {"a": 2.4, "b": 1.0, "C": 0.0})
    assert why == "fewer are wanted; the work left: a 2, b 1"
    alike = [member(name, fingerprint="o") for name in "abcdef"]
    work = {name: float(left) for left, name in enumerate("abcdef")}
    assert fewer_wanted(alike[5], alike, work).endswith(": f 5, a 0, b 1, c 2"), "the one that goes"
    assert fewer_wanted(alike[5], alike, {"a": 3.0}).endswith(": f 0, a 3")
    assert fewer_wanted(replicas[0], replicas, {}) == "fewer are wanted"
