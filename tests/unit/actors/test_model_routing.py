"""Where requests go whose model is chosen: profiles to scouts, strict ones where layers are."""

from __future__ import annotations

import pytest

from quadriga.control.model_routing import AutoRouter, Route
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.request import AUTO_MODEL
from quadriga.core.routing import Admission, AdmitRequest, PlaceRequest
from quadriga.errors import Unavailable

S4, S8, L12 = DepthClass("s", 4), DepthClass("s", 8), DepthClass("l", 12)


def replica(name: str, role: Role, depth_class: DepthClass) -> ReplicaSnapshot:
    info = ReplicaInfo(name, role, depth_class, "node", "one", 8, 4096)
    return ReplicaSnapshot(info, 0.0)


FLEET = [
    replica("p0", Role.PREFILL, S8),
    replica("p1", Role.PREFILL, L12),
    replica("d0", Role.DECODE, S4),
    replica("d1", Role.DECODE, S4),
    replica("d2", Role.DECODE, L12),
]
SCOUTS = frozenset({"p1", "d2"})


def request(name: str, model: str = AUTO_MODEL, needs_depth: int = 0) -> AdmitRequest:
    return AdmitRequest(name, model, 8, 32, 0, 1e9, needs_depth)


def router(**changes: object) -> AutoRouter:
    made = AutoRouter()
    fields: dict[str, object] = {"serve": (S4,), "scouts": SCOUTS, **changes}
    made.route = Route(**fields)  # type: ignore[arg-type]
    return made


def groups(of: AutoRouter, name: str, model: DepthClass) -> list[list[str]]:
    placed = PlaceRequest(name, model, 9, 40)
    alive = [s for s in FLEET if s.info.role is Role.DECODE]
    alive = [s for s in alive if s.info.depth_class.model == model.model]
    return [[s.info.name for s in group] for group in of.groups(placed, alive)]


def test_a_profile_gets_no_more_requests_than_it_wants() -> None:
    auto = router(profile=L12, profile_decode="d2", places=2)
    chosen = []
    for i in range(4):
        got, snapshots, way = auto.choose(request(f"r{i}"), FLEET, now_s=0.1 * i)
        auto.admitted(request(f"r{i}"), way, Admission("p", L12), now_s=0.1 * i)
        chosen.append((got.model, way.profile, sorted(s.info.name for s in snapshots)))
    assert chosen[:2] == [("l", "d2", ["d2", "p1"])] * 2
    assert chosen[2:] == [("s", None, ["d0", "d1", "p0"])] * 2
    # Until then the controller has heard of those: the places it says are true again.
    assert auto.choose(request("r9"), FLEET, now_s=10.0)[2].profile == "d2"


def test_the_routing_decision_decides_the_decode_replica() -> None:
    auto = router(profile=L12, profile_decode="d2", places=1)
    first, _, way = auto.choose(request("a"), FLEET, 0.0)
    admission = auto.admitted(request("a"), way, Admission("p1", L12), 0.0)
    assert first.model == "l" and admission.profile == "d2" and admission.is_scored
    assert groups(auto, "a", L12) == [["d2"]]
    both = replica("d4", Role.DECODE, L12), FLEET[4]
    others = auto.groups(PlaceRequest("b", L12, 9, 40), both)
    assert [[s.info.name for s in group] for group in others] == [["d4"]], "no scout beside others"
    refused = PlaceRequest("b", L12, 9, 40, exclude=("d4",))
    assert auto.groups(refused, both[1:]) == [], "a full replica sends nobody to a scout"


def test_a_sequence_whose_scheduler_died_goes_on_at_the_scout_that_alone_has_its_model() -> None:
    auto = router(profile=L12, profile_decode="d2", places=1)
    _, _, way = auto.choose(request("a"), FLEET, 0.0)
    auto.admitted(request("a"), way, Admission("p1", L12), 0.0)
    successor = router(profile=L12, profile_decode="d2", places=1)
    assert groups(successor, "a", L12) == [["d2"]]


def test_named_models_stay_away_from_scouts() -> None:
    auto = router(profile=L12, profile_decode="d2", places=5)
    got, snapshots, way = auto.choose(request("a", "s"), FLEET, 0.0)
    assert (got.model, way.profile) == ("s", None)
    assert {s.info.name for s in snapshots} == {"p0", "d0", "d1"}


def test_a_scout_reads_prompts_where_no_other_replica_of_the_model_can() -> None:
    fleet = [*FLEET[2:], replica("p2", Role.PREFILL, S8), FLEET[1]]  # p0 has died
    auto = router(scouts=frozenset({"p2", "d2", "p1"}))
    _, snapshots, _ = auto.choose(request("a"), fleet, 0.0)
    assert {s.info.name for s in snapshots} == {"p2", "d0", "d1"}
    _, snapshots, _ = auto.choose(request("b"), [*fleet, FLEET[0]], 0.0)
    assert {s.info.name for s in snapshots} == {"p0", "d0", "d1"}


def test_strict_requests_start_where_their_layers_are_loaded() -> None:
    fleet = [*FLEET[:4], replica("d3", Role.DECODE, S8)]
    auto = router(scouts=frozenset({"d3"}))
    _, _, way = auto.choose(request("a", needs_depth=8), fleet, 0.0)
    auto.admitted(request("a", needs_depth=8), way, Admission("p0", S8), 0.0)
    alive = [s for s in fleet if s.info.role is Role.DECODE]
    strict = auto.groups(PlaceRequest("a", S8, 9, 40), alive)
    assert [[s.info.name for s in g] for g in strict] == [["d3"], ["d0", "d1"]]
    bounded = auto.groups(PlaceRequest("b", S8, 9, 40), alive)
    assert [[s.info.name for s in g] for g in bounded] == [["d0", "d1"]]


def test_the_first_token_of_a_strict_request_runs_enough_layers() -> None:
    p2, p3 = replica("p2", Role.PREFILL, S4), replica("p3", Role.PREFILL, S8)
    serving = [p2, *FLEET[2:4]]  # prefill and decode, at four layers all of them
    auto = router(scouts=frozenset({"p3"}))

    def chosen(fleet: list[ReplicaSnapshot], model: str, needs_depth: int) -> set[str]:
        _, found, _ = auto.choose(request("a", model, needs_depth), fleet, 0.0)
        return {s.info.name for s in found if s.info.role is Role.PREFILL}

    for model in ("s", AUTO_MODEL):
        assert chosen([*serving, p3], model, 8) == {"p3"}, "the scout has more layers"
        assert chosen([*serving, p3], model, 254) == {"p3"}
        assert chosen([*serving, p3], model, 4) == {"p2"}, "four are enough"
        assert chosen([*serving, p3], model, 0) == {"p2"}
        assert chosen(serving, model, 8) == {"p2"}, "to wait there"
        p4 = replica("p4", Role.PREFILL, S8)
        assert chosen([*serving, p3, p4], model, 8) == {"p4"}, "no scout where another will do"


def test_a_class_without_prefill_is_passed_over_and_none_is_an_error() -> None:
    auto = router(serve=(L12, S4), scouts=frozenset({"p1"}))
    assert auto.choose(request("a"), FLEET, 0.0)[0].model == "s"
    with pytest.raises(Unavailable):
        router(serve=(L12,)).choose(request("a"), [*FLEET[:1], *FLEET[2:]], 0.0)


def test_who_names_a_model_has_its_deepest_replicas_first() -> None:
    """Whatever was chosen for the others: a pool of its own keeps all layers."""
    auto = router(serve=(S4,), scouts=frozenset())
    whole = [replica("p-whole", Role.PREFILL, S8), replica("d-whole", Role.DECODE, S8)]
    part = [replica("p-part", Role.PREFILL, S4), replica("d-part", Role.DECODE, S4)]
    alive = [*part, *whole]

    def admitted(name: str, model: str) -> tuple[set[str], list[str]]:
        _, snapshots, way = auto.choose(request(name, model), alive, 0.0)
        auto.admitted(request(name, model), way, Admission("p", S8), 0.0)
        prefills = {s.info.name for s in snapshots if s.info.role is Role.PREFILL}
        placed = PlaceRequest(name, S8, 9, 40)
        found = auto.groups(placed, [part[1], whole[1]])
        return prefills, [s.info.name for group in found for s in group]

    assert admitted("named", "s") == ({"p-whole"}, ["d-whole", "d-part"])
    assert admitted("any", AUTO_MODEL) == ({"p-whole", "p-part"}, ["d-part", "d-whole"])


def test_a_model_that_made_way_for_another_is_refused_with_what_to_do() -> None:
    auto = router(serve=(L12,))
    others = [s for s in FLEET if s.info.depth_class == L12]
    with pytest.raises(Unavailable, match="chose l@12 in its place; ask for 'quadriga-auto'"):
        auto.require_loaded("s", others)
    auto.require_loaded("l", others)
    auto.require_loaded("s", FLEET)
    router(serve=(S4,)).require_loaded("s", [])  # its replicas start anew
