"""Pure decisions: who is let in, and where a sequence decodes."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from quadriga.config.engine import PrefillConfig
from quadriga.config.scheduling import SchedulerConfig
from quadriga.core.forecast import LengthPrediction
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import AdmitRequest, PlaceRequest
from quadriga.errors import ContextTooLong, Overloaded, Unavailable
from quadriga.policies.admission import admit
from quadriga.policies.ares.placement import AresPlacement
from quadriga.policies.ares.settings import AresSettings
from quadriga.policies.baselines.placement import CurrentLoad, LeastRequests, RoundRobin
from quadriga.policies.least_work import LeastWork, LeastWorkWithoutReports
from quadriga.policies.load import candidates, taking_work
from quadriga.policies.placements import find_placement

CLASS = DepthClass("m", 8)
SCHEDULER = SchedulerConfig()
PREFILL = PrefillConfig(max_queued_sequences=4, max_queued_tokens=100)


def snapshot(name: str, role: Role = Role.DECODE, **load: object) -> ReplicaSnapshot:
    info = ReplicaInfo(name, role, CLASS, "node", name, num_slots=4, kv_capacity_tokens=1000)
    out = ReplicaSnapshot(info, taken_unix_s=100.0)
    for key, value in load.items():
        setattr(out, key, value)
    return out


def test_a_mixed_replica_is_chosen_by_all_that_it_has_to_do() -> None:
    """Prompts that wait, and those that run with their answers, as placement reckons."""
    request = AdmitRequest("s", "m", 10, 10, 0, 1e9)

    def chosen(**cached: int) -> str:
        return admit(
            request,
            [idle, busy, reading],
            now_unix_s=100.0,
            scheduler=SCHEDULER,
            prefill=PrefillConfig(),
            cached_tokens=cached,
        ).prefill_replica

    idle = snapshot("c", Role.MIXED)
    busy = snapshot("a", Role.MIXED, num_running=2, prompt_tokens=50, used_tokens=80)
    reading = snapshot("b", Role.MIXED, waiting_tokens=20)
    assert chosen() == "c"
    idle.draining = True
    assert chosen() == "b", "nobody's answer is to be written there"
    assert chosen(a=10_000) == "a", "the prompt is at hand there"
    reading.draining = True
    assert chosen() == "a"
    with pytest.raises(Unavailable):
        admit(
            request, [idle, reading], now_unix_s=100.0, scheduler=SCHEDULER, prefill=PrefillConfig()
        )


def place(tokens: int = 10) -> PlaceRequest:
    return PlaceRequest("s", CLASS, num_tokens=tokens, max_total_tokens=tokens)


def used(name: str, **load: object) -> ReplicaSnapshot:
    """A replica that promises memory by what is used: newcomers are let in up to 900 tokens."""
    out = snapshot(name, **load)
    out.info = replace(out.info, reservation="used")
    return out


def test_memory_promised_by_what_is_used() -> None:
    """The same request fits where its length counts, not where its longest does."""
    short_now = PlaceRequest("s", CLASS, num_tokens=20, max_total_tokens=900)
    choose = CurrentLoad().choose
    assert choose(short_now, [snapshot("a", num_running=1, reserved_tokens=200)]) is None
    assert choose(short_now, [used("a", num_running=1, reserved_tokens=200)]) == "a"
    assert choose(short_now, [used("a", num_running=1, reserved_tokens=890)]) is None
    usual = {"num_running": 1, "upper_tokens": 64}
    ahead = 27  # of 64: what the second of two adds
    assert choose(short_now, [used("a", **usual, reserved_tokens=880 - ahead)]) == "a"
    assert choose(short_now, [used("a", **usual, reserved_tokens=881 - ahead)]) is None
    known = replace(short_now, prediction=LengthPrediction(5.0, 2.0, 9.5))
    assert choose(known, [used("a", **usual, reserved_tokens=876)]) == "a"
    assert choose(known, [used("a", **usual, reserved_tokens=877)]) is None
    assert choose(short_now, [used("a", num_running=1, num_paused=1)]) is None


@pytest.mark.parametrize(("priority", "is_taken"), [(2, True), (3, False), (4, False)])
def test_the_important_may_go_where_somebody_less_important_runs(
    priority: int, is_taken: bool
) -> None:
    replica = used("a", num_running=4, num_paused=1, reserved_tokens=900, least_priority=3)
    wanted = replace(place(), priority=priority)
    assert (CurrentLoad().choose(wanted, [replica]) == "a") is is_taken


def request(tokens: int = 10, max_tokens: int = 10, model: str = "m") -> AdmitRequest:
    return AdmitRequest("s", model, tokens, max_tokens, 0, 1e9)


def decide(req: AdmitRequest, *snapshots: ReplicaSnapshot, now: float = 100.0) -> str:
    admission = admit(req, snapshots, now_unix_s=now, scheduler=SCHEDULER, prefill=PREFILL)
    assert admission.depth_class == CLASS
    return admission.prefill_replica


def test_round_robin_takes_turns_and_passes_over_the_full() -> None:
    policy = RoundRobin()
    replicas = [snapshot("a"), snapshot("b", num_running=4), snapshot("c")]
    assert [policy.choose(place(), replicas) for _ in range(3)] == ["a", "c", "a"]


def test_current_load_takes_the_fewest_tokens_in_use() -> None:
    replicas = [snapshot("a", used_tokens=50), snapshot("b", used_tokens=20), snapshot("c")]
    assert CurrentLoad().choose(place(), replicas) == "c"
    assert CurrentLoad().choose(place(), replicas[:2]) == "b"


def test_nobody_has_room() -> None:
    replicas = [snapshot("a", reserved_tokens=995), snapshot("b", num_waiting=4)]
    assert CurrentLoad().choose(place(), replicas) is None
    assert RoundRobin().choose(place(), replicas) is None
    assert LeastRequests().choose(place(), replicas) is None
    assert LeastWork().choose(place(), replicas) is None
    assert LeastWorkWithoutReports().choose(place(), replicas, num_placing=1) is None


def test_every_configured_name_is_a_policy() -> None:
    kinds = get_args(SchedulerConfig.model_fields["placement"].annotation)
    made = [find_placement(kind, AresSettings()) for kind in kinds]
    assert len({type(policy) for policy in made}) == len(kinds) == 5
    assert isinstance(find_placement(SCHEDULER.placement, AresSettings()), AresPlacement)
    with pytest.raises(KeyError):
        find_placement("best", AresSettings())


def test_least_requests_counts_sequences_wherever_they_are() -> None:
    a, b = snapshot("a", num_running=2, used_tokens=10), snapshot("b", num_waiting=1, used_tokens=9)
    c = snapshot("c", num_running=1, used_tokens=8)
    assert LeastRequests().choose(place(), [a, b]) == "b"
    assert LeastRequests().choose(place(), [a, b, c]) == "c"


def test_a_fast_replica_is_not_taken_for_a_full_one() -> None:
    """Its sequences are further along: it holds more tokens, and has fewer to do."""
    fast = snapshot("fast", num_running=2, prompt_tokens=40, generated_tokens=860, used_tokens=900)
    slow = snapshot("slow", num_running=3, prompt_tokens=60, generated_tokens=240, used_tokens=300)
    assert CurrentLoad().choose(place(), [fast, slow]) == "slow"
    assert LeastWork().choose(place(), [fast, slow]) == "fast"


def test_long_prompts_weigh_what_they_are_against_answers_of_the_usual_length() -> None:
    long = snapshot("long", num_running=1, prompt_tokens=700, generated_tokens=10)
    many = snapshot("many", num_running=3, prompt_tokens=30, generated_tokens=60)
    assert LeastWork().choose(place(), [long, many]) == "many", "answers are short here"
    long.generated_tokens, many.generated_tokens = 300, 1_770
    assert LeastWork().choose(place(), [long, many]) == "long", "they have become long"


def test_without_reports_what_was_placed_since_counts() -> None:
    """First the difference that the last view shows, then in turn."""
    policy = LeastWorkWithoutReports()
    view = [snapshot("a", num_running=3, prompt_tokens=30), snapshot("b")]
    chosen = [policy.choose(place(), view, num_placing=1) for _ in range(7)]
    assert chosen == ["b", "b", "b", "a", "b", "a", "b"]
    policy.renewed()
    assert policy.choose(place(), view, num_placing=1) == "b"


def test_without_reports_several_share_the_difference() -> None:
    """Three prefill replicas with the same view: together they do not overshoot."""
    view = [snapshot("a", num_running=3, prompt_tokens=30), snapshot("b")]
    policies = [LeastWorkWithoutReports() for _ in range(3)]
    chosen = [policy.choose(place(), view, num_placing=3) for policy in policies]
    assert chosen == ["b", "b", "b"]
    assert [p.choose(place(), view, num_placing=3) for p in policies] == ["a", "a", "a"]


def test_without_reports_room_is_looked_at_as_it_was() -> None:
    """What ended meanwhile is not known: a full replica refuses by itself."""
    policy, view = LeastWorkWithoutReports(), [snapshot("a")]
    assert [policy.choose(place(), view, num_placing=2) for _ in range(9)] == ["a"] * 9


def test_candidates_leave_out_the_stale_the_draining_and_the_excluded() -> None:
    fresh, stale = snapshot("fresh"), snapshot("stale", taken_unix_s=1.0)
    draining, tried = snapshot("draining", draining=True), snapshot("tried")
    alive = taking_work([fresh, stale, draining, tried], now_unix_s=100.0, max_age_s=5.0)
    assert alive == [fresh, tried]
    found = candidates(alive, role=Role.DECODE, depth_class=CLASS, exclude=("tried",))
    assert found == [fresh]


def computing(
    name: str, numerics: str, role: Role = Role.DECODE, **load: object
) -> ReplicaSnapshot:
    """A replica of a deterministic deployment."""
    out = snapshot(name, role, **load)
    out.info = replace(out.info, numerics=numerics)
    return out


def test_kv_goes_only_to_replicas_that_compute_alike() -> None:
    replicas = [computing("a", "int8 x"), computing("b", "int8 y"), snapshot("c")]

    def found(numerics: str) -> list[str]:
        alike = candidates(replicas, role=Role.DECODE, numerics=numerics)
        return [s.info.name for s in alike]

    assert (found("int8 x"), found("int8 z"), found("")) == (["a"], [], ["a", "b", "c"])


@pytest.mark.parametrize("any_depth", [False, True])
def test_admission_wants_a_prefill_and_a_decode_replica_that_compute_alike(any_depth: bool) -> None:
    idle, busy = computing("p0", "y", Role.PREFILL), computing("p1", "x", Role.PREFILL)
    busy.waiting_tokens = 50
    decode = computing("d0", "x")

    def choose(*snapshots: ReplicaSnapshot) -> str:
        return admit(
            request(),
            snapshots,
            now_unix_s=100.0,
            scheduler=SCHEDULER,
            prefill=PREFILL,
            any_depth=any_depth,
        ).prefill_replica

    assert choose(idle, busy, decode) == "p1", "the longer queue, but of a replica like the decode"
    with pytest.raises(Unavailable, match=r"does not mix \(x, y\): give them the same CPUs"):
        choose(idle, decode)
    with pytest.raises(Unavailable, match="is ready; retry shortly"):
        choose(idle)


def test_admission_goes_to_the_shortest_queue() -> None:
    busy = snapshot("p1", Role.PREFILL, waiting_tokens=50, num_waiting=1)
    idle = snapshot("p2", Role.PREFILL)
    assert decide(request(), busy, idle, snapshot("d")) == "p2"


@pytest.mark.parametrize("has_others", [False, True])
def test_a_model_whose_replicas_have_not_reported_is_asked_for_again(has_others: bool) -> None:
    """Right after the scheduler's restart, say: that nobody serves it would be no answer."""
    others = (snapshot("p", Role.PREFILL), snapshot("d")) if has_others else ()
    with pytest.raises(Unavailable, match="'x' is ready; retry shortly"):
        decide(request(model="x"), *others)


def test_stale_replicas_serve_nobody() -> None:
    with pytest.raises(Unavailable):
        decide(request(), snapshot("p", Role.PREFILL), snapshot("d"), now=200.0)


def test_prefill_without_decode_serves_nobody() -> None:
    with pytest.raises(Unavailable):
        decide(request(), snapshot("p", Role.PREFILL))


def test_more_than_any_replica_holds() -> None:
    with pytest.raises(ContextTooLong, match="1001 tokens; the largest replica holds 1000"):
        decide(request(1, 1000), snapshot("p", Role.PREFILL), snapshot("d"))


def with_rows(length: int, one: ReplicaSnapshot) -> ReplicaSnapshot:
    """A replica whose sequences may be so long."""
    one.info = replace(one.info, max_model_len=length)
    return one


@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED])
def test_a_sequence_goes_where_rows_are_long_enough(role: Role) -> None:
    """Rows follow the memory of a node: on a new one they may be shorter."""
    short = with_rows(64, snapshot("p", role))
    busy = with_rows(512, snapshot("q", role, waiting_tokens=20, num_waiting=1))
    decodes = [with_rows(n, snapshot(f"d{n}")) for n in (64, 512)]
    assert decide(request(40, 20), short, busy, *decodes) == "p"
    assert decide(request(80, 20), short, busy, *decodes) == "q"
    for num_answer in (30, 400):
        found = decide(request(40, num_answer), short, busy, *decodes)
        assert found == ("p" if role is Role.PREFILL else "q"), "who decodes it needs the room"
    with pytest.raises(ContextTooLong, match="the largest replica holds 512"):
        decide(request(100, 413), short, busy, *decodes)


def test_a_full_queue_says_when_it_will_have_room() -> None:
    full = snapshot("p", Role.PREFILL, waiting_tokens=100, num_waiting=3, tokens_per_s=5.0)
    with pytest.raises(Overloaded) as caught:
        decide(request(tokens=10), full, snapshot("d"))
    assert caught.value.retry_after_s == pytest.approx(10 / 5.0)


def test_a_stalled_queue_is_bounded_in_what_it_predicts() -> None:
    full = snapshot("p", Role.PREFILL, waiting_tokens=80, num_waiting=4, tokens_per_s=0.0)
    with pytest.raises(Overloaded) as caught:
        decide(request(), full, snapshot("d"))
    assert caught.value.retry_after_s == SCHEDULER.max_retry_after_s
