"""The state machine against traces of decisions written out by hand."""

from __future__ import annotations

import pytest

from quadriga.core.replica import DepthClass, Role
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import (
    ChosenDevice,
    HeliosPhase,
    Keep,
    OrderDone,
    OrderFailed,
    ReplicaReport,
    RequestLost,
    RequestStarted,
    Resize,
    Switch,
    TokensServed,
    UnchangedSampled,
)
from quadriga.policies.helios.profiling import PLACE_S, BreachWindow
from tests.unit.policies.helios_harness import (
    L9,
    L32,
    LARGE,
    S6,
    S24,
    SMALL,
    Cluster,
    alone,
    chosen,
    decode,
    finished,
    paper_config,
    serve,
    with_scout,
)


def test_a_whole_life_on_one_replica() -> None:
    """Profile both, serve six layers, confidence breaks: load all; reassess: six layers again."""
    cluster = alone(reassess_requests=20)
    cluster.tick()
    assert cluster.trace == [], "it holds the first candidate already"
    assert cluster.machine.routing.profile == S24
    cluster.profile()
    cluster.done()
    cluster.profile()
    cluster.done()
    cluster.tick(100)
    cluster.breach(100, 50)
    assert cluster.order is None, "50 of 100 are tolerated"
    cluster.breach(1, 1)
    cluster.done(load_s=2.0)
    cluster.tick(100)
    serve(cluster, 20, S24)
    cluster.profile()
    cluster.done()
    cluster.profile()
    cluster.done()
    assert cluster.trace == [
        "switch decode-0 opt-6.7b@32",  # the second candidate's turn
        "choose opt-1.3b@6",
        "switch decode-0 opt-1.3b@6",
        "choose opt-1.3b@24",  # 51 of 100
        "resize decode-0 opt-1.3b@24",
        "switch decode-0 opt-6.7b@32",  # reassessed; the one that serves came first
        "choose opt-1.3b@6",
        "switch decode-0 opt-1.3b@6",
    ]
    assert cluster.machine.status().counters.profiles == 4
    assert cluster.machine.status().barred == {}, "a new profile is a new chance"


def test_a_scout_profiles_while_the_others_serve() -> None:
    cluster = with_scout()
    cluster.tick()
    assert cluster.machine.routing.serve == (S24,)
    assert cluster.machine.routing.profile_replica == "scout"
    cluster.profile()
    cluster.done()
    assert cluster.machine.routing.serve == (S24,), "they serve on"
    cluster.profile()
    assert cluster.trace == [
        "switch scout opt-6.7b@32",
        "choose opt-1.3b@6",
        "switch scout opt-1.3b@24",  # to sample, and for strict requests to escalate to
    ]
    cluster.done()
    cluster.done()
    assert cluster.machine.routing.serve == (S6, S24), "half-way both serve, the chosen one first"
    cluster.done()
    assert cluster.trace[3:] == ["resize decode-0 opt-1.3b@6", "resize decode-1 opt-1.3b@6"]
    assert cluster.machine.routing.serve == (S6,)
    assert cluster.machine.routing.profile is None


def test_places_are_taken_given_back_and_never_too_many() -> None:
    cluster = with_scout()
    cluster.tick()
    for _ in range(5):
        cluster.tell(RequestStarted("scout"))
    assert cluster.machine.routing.profile_places == 0
    cluster.tell(RequestLost("scout"))
    assert cluster.machine.routing.profile_places == 1
    cluster.tell(RequestStarted("decode-0"))
    assert cluster.machine.routing.profile_places == 1, "that one is served elsewhere"
    for _ in range(4):
        cluster.tell(finished(S24, "scout"))
    assert cluster.machine.routing.profile_places == 1
    assert cluster.order is None
    cluster.profile(1)
    assert cluster.trace == ["switch scout opt-6.7b@32"]


def test_requests_that_nobody_hears_of_again_get_successors() -> None:
    """Their ingress was killed, or their scout: the profile ends all the same."""
    cluster = with_scout()
    cluster.tick()
    for _ in range(5):
        cluster.tell(RequestStarted("scout"))
    cluster.tick(PLACE_S - 1.0)
    assert cluster.machine.routing.profile_places == 0, "they may still come"
    cluster.tick(2.0)
    assert cluster.machine.routing.profile_places == 5
    cluster.profile()
    assert cluster.trace == ["switch scout opt-6.7b@32"]


def test_a_request_that_was_served_elsewhere_gives_its_place_back() -> None:
    cluster = with_scout()
    cluster.tick()
    cluster.tell(RequestStarted("scout"))
    assert cluster.machine.routing.profile_places == 4
    cluster.tell(finished(S6, "scout"))
    assert cluster.machine.routing.profile_places == 5


def test_breach_switches_where_that_is_cheaper() -> None:
    """A large model whose first exit is fast: switching beats loading more by the margin."""
    cluster = with_scout(1)
    cluster.profile_both(decode_s=999 * 0.011, ttft_s=0.042, nll=385.0)
    cluster.settle()
    assert cluster.trace[1] == "choose opt-1.3b@6"
    cluster.trace.clear()
    cluster.tick(100)
    cluster.breach(60, 51)
    assert cluster.trace == ["choose opt-6.7b@9", "switch scout opt-6.7b@32"]
    cluster.settle()
    assert cluster.trace[2:] == ["switch decode-0 opt-6.7b@9"]
    assert set(cluster.machine.status().barred) == {"opt-1.3b@6", "opt-1.3b@12"}
    # From there it cannot go back to what broke: it loads all of the large one.
    cluster.trace.clear()
    cluster.tick(1000)
    cluster.breach(60, 51)
    cluster.settle()
    assert cluster.trace == ["choose opt-6.7b@32", "resize decode-0 opt-6.7b@32"]


def test_work_in_flight_speaks_against_a_switch() -> None:
    """The same breach with much KV to rebuild: loading more costs less."""
    cluster = with_scout(1)
    cluster.profile_both(decode_s=999 * 0.011, ttft_s=0.42, nll=385.0)
    cluster.settle()
    cluster.in_flight, cluster.in_flight_tokens = 1, 3_000_000
    cluster.trace.clear()
    cluster.tick(100)
    cluster.breach(60, 51)
    assert cluster.trace == ["choose opt-1.3b@24", "resize decode-0 opt-1.3b@24"]
    reason = cluster.machine.decisions[-1].output.reason
    assert "51 of the last 100 tokens" in reason
    assert "rebuild" in reason


def test_no_change_before_the_dwell_is_over() -> None:
    cluster = chosen(alone())
    cluster.machine.handle(TokensServed(S6, 1, 0, 1), cluster.now_s)
    cluster.trace.clear()
    cluster.breach(60, 51)
    cluster.breach(1, 1)
    assert cluster.trace == ["keep"], "said once"
    cluster.now_s += 1000
    cluster.breach(1, 0)
    assert cluster.trace == ["keep", "choose opt-1.3b@24", "resize decode-0 opt-1.3b@24"]


def test_full_depth_has_no_breaches_and_others_do_not_count() -> None:
    cluster = chosen(alone())
    cluster.tick(100)
    cluster.trace.clear()
    cluster.tell(TokensServed(L9, 100, 100, 1))
    assert cluster.machine.status().window_breaches == 0
    cluster.breach(100, 100)
    cluster.settle()
    cluster.tick(1000)
    cluster.breach(100, 100)
    assert cluster.trace == ["choose opt-1.3b@24", "resize decode-0 opt-1.3b@24"]


def test_a_failed_load_leaves_the_old_layers_serving() -> None:
    cluster = alone()
    cluster.profile_both()
    assert cluster.trace[-1] == "switch decode-0 opt-1.3b@6"
    cluster.fail("file is gone")
    assert cluster.machine.routing.serve == (L32,)
    assert cluster.machine.status().target == L32
    assert "file is gone" in cluster.machine.status().barred["opt-1.3b@6"]
    cluster.tick(10_000)
    assert cluster.order is None, "not asked again before the next assessment"


def test_one_of_two_failing_is_asked_again_later() -> None:
    cluster = chosen(with_scout(retry_s=30))
    cluster.replicas["decode-1"] = decode(S24)  # it restarted
    cluster.trace.clear()
    cluster.tick()
    cluster.fail()
    assert cluster.machine.status().target == S6
    cluster.tick(29)
    assert cluster.order is None
    cluster.tick(1)
    assert cluster.order is not None
    cluster.fail()
    cluster.tick(59)
    assert cluster.order is None, "twice as long"
    cluster.tick(1)
    cluster.done()
    assert cluster.trace == [
        "resize decode-1 opt-1.3b@6",
        "keep",
        "resize decode-1 opt-1.3b@6",
        "keep",
        "resize decode-1 opt-1.3b@6",
    ]


def test_what_a_replica_failed_to_do_keeps_nothing_else_from_it() -> None:
    cluster = chosen(with_scout(retry_s=30))
    cluster.replicas["decode-1"] = decode(L32)  # it restarted
    for _ in range(7):
        cluster.tick(4000)
        assert cluster.trace[-1] == "switch decode-1 opt-1.3b@6"
        cluster.fail()
    cluster.tick()
    assert cluster.order is None
    cluster.breach(100, 100)
    cluster.settle()
    assert cluster.trace[-3:] == [
        "choose opt-1.3b@24",
        "resize decode-0 opt-1.3b@24",
        "switch decode-1 opt-1.3b@24",
    ]


def test_a_scout_that_failed_is_asked_anew_when_all_is_profiled_anew() -> None:
    cluster = chosen(with_scout(1, reassess_requests=10, retry_s=30))
    cluster.replicas["scout"] = decode(L32)  # it restarted
    for _ in range(7):
        cluster.tick(4000)
        assert cluster.trace[-1] == "switch scout opt-1.3b@24"
        cluster.fail()
    serve(cluster, 10, S6)
    assert cluster.trace[-1] == "switch scout opt-1.3b@24"


def test_a_candidate_that_cannot_be_loaded_is_left_out() -> None:
    cluster = with_scout(1)
    cluster.tick()
    cluster.profile()
    cluster.fail("truncated")
    assert cluster.trace[:3] == ["switch scout opt-6.7b@32", "keep", "choose opt-1.3b@6"]
    assert "truncated" in cluster.outputs[1].reason
    cluster.settle()
    assert cluster.machine.routing.serve == (S6,)


def test_an_order_without_an_answer_is_given_up() -> None:
    cluster = with_scout(1, order_timeout_s=60)
    cluster.tick()
    cluster.profile()
    first = cluster.take()
    cluster.tick(59)
    assert cluster.machine.status().order is not None
    cluster.tick(1)
    assert cluster.trace[1:3] == ["keep", "choose opt-1.3b@6"]
    # The late answer changes nothing; what a tick shows does.
    assert cluster.machine.handle(OrderDone(first.order_id, 1.0), cluster.now_s) == []


def test_an_order_dies_with_its_replica() -> None:
    cluster = chosen(with_scout())
    cluster.replicas["decode-1"] = decode(S24)
    cluster.tick()
    assert cluster.order is not None
    del cluster.replicas["decode-1"]
    cluster.take()
    (keep,) = cluster.tick()
    assert isinstance(keep, Keep)
    assert "gone" in keep.reason
    assert cluster.machine.status().target == S6


def test_without_a_scout_profiles_wait_and_say_so() -> None:
    cluster = with_scout(1)
    scout = cluster.replicas.pop("scout")
    cluster.tick()
    cluster.tick()
    assert cluster.trace == ["keep"], "said once"
    assert cluster.machine.routing.profile is None, "who serves is not made a scout"
    cluster.replicas["scout"] = scout
    cluster.tick()
    assert cluster.machine.routing.profile == S24


def test_a_change_that_strict_requests_hold_up_is_asked_for_again() -> None:
    cluster = with_scout(1)
    cluster.profile_both()
    while cluster.order is not None and cluster.order.replica == "scout":
        cluster.done()
    assert cluster.trace[-1] == "resize decode-0 opt-1.3b@6"
    for _ in range(3):
        cluster.tell(OrderFailed(cluster.take().order_id, "12 need the layers", is_held_up=True))
        assert cluster.machine.status().target == S6 and not cluster.machine.status().barred
        cluster.tick(29)
        assert cluster.order is None
        cluster.tick(1)
        assert cluster.trace[-1] == "resize decode-0 opt-1.3b@6", "each time as soon"


def test_a_kept_table_saves_the_profile() -> None:
    first = chosen(with_scout())
    machine = Helios(
        [SMALL, LARGE], paper_config(), ChosenDevice(value_bytes=2), first.machine.table
    )
    second = Cluster(machine, dict(first.replicas), first.scouts)
    second.tick()
    assert second.trace == ["choose opt-1.3b@6"], "and everyone holds it already"
    assert machine.status().phase is HeliosPhase.SERVE


def test_hysteresis_keeps_what_is_nearly_as_good() -> None:
    """The large model becomes 5 % faster than the small one: not worth a change; 25 %: is."""
    even_s = 0.010 * (6 / 10.296) * (14.352 / 9)  # then its first exit is as fast as the other's
    for faster, expected in ((1.05, "keep"), (1.25, "choose opt-6.7b@9")):
        cluster = chosen(with_scout(1, reassess_requests=10))
        cluster.tick(1000)
        serve(cluster, 10, S6)
        cluster.trace.clear()
        cluster.profile(nll=385.0)
        cluster.done()
        cluster.profile(nll=385.0, decode_s=999 * even_s / faster)
        assert expected in cluster.trace
        assert ("keep" in cluster.trace) != ("choose opt-6.7b@9" in cluster.trace)


# Strict requests


def test_strict_requests_keep_a_deep_replica() -> None:
    cluster = with_scout(2)
    cluster.strict = {"opt-1.3b": 24}
    chosen(cluster)
    held = {name: m.depth_class for name, m in cluster.replicas.items()}
    assert held == {"decode-0": S6, "decode-1": S6, "scout": S24}, "the scout will do"
    cluster.replicas.pop("scout")
    cluster.scouts = frozenset()
    cluster.tick()
    assert cluster.order is not None
    assert said_reason(cluster) == "strict requests may need 24 layers of opt-1.3b"
    cluster.settle()
    assert cluster.replicas["decode-1"].depth_class == S24
    cluster.strict = {}
    cluster.tick(20.0)
    cluster.settle()
    assert cluster.replicas["decode-1"].depth_class == S24, "others may follow"
    cluster.tick(31.0)
    cluster.settle()
    assert cluster.replicas["decode-1"].depth_class == S6


def test_strict_requests_of_a_profile_bring_its_model_to_nobody_that_serves() -> None:
    cluster = with_scout()
    cluster.tick()
    cluster.profile()
    cluster.done()
    assert cluster.replicas["scout"].depth_class == L32, "its turn"
    cluster.strict = {"opt-6.7b": 32}
    cluster.tick()
    assert cluster.order is None and cluster.trace == ["switch scout opt-6.7b@32"]
    cluster.profile()
    cluster.tick()
    assert cluster.replicas["scout"].depth_class == L32, "the strict ones are not over"
    cluster.settle()
    cluster.strict = {}
    cluster.tick(31.0)  # others might have followed
    cluster.settle()
    assert cluster.replicas["scout"].depth_class == S24


def said_reason(cluster: Cluster) -> str:
    assert cluster.order is not None
    return cluster.order.reason


def test_loading_models_for_profiles_takes_a_small_part_of_the_time() -> None:
    """However many requests come: each profile changes the model twice, for 5 s each time."""
    cluster, loading_s = alone(reassess_requests=5, profile_share=0.1), 0.0
    while cluster.now_s < 2000.0:
        cluster.tick()
        if cluster.order is not None:
            cluster.done(load_s=5.0)
            loading_s += 5.0
        elif cluster.machine.routing.profile is not None:
            cluster.profile()
        else:
            serve(cluster, 5, cluster.replicas["decode-0"].depth_class)
    assert 0.08 * cluster.now_s < loading_s < 0.11 * cluster.now_s


def test_a_lone_deep_replica_waits_for_its_strict_requests() -> None:
    cluster = alone()
    cluster.tick()
    cluster.strict = {"opt-1.3b": 12}
    cluster.tick()
    cluster.profile()
    assert cluster.order is None, "the next candidate's turn would take their layers away"
    cluster.strict = {}
    cluster.tick()
    assert cluster.trace == ["switch decode-0 opt-6.7b@32"]


def test_strict_depths_are_rounded_up_to_what_can_be_loaded() -> None:
    cluster = alone()
    cluster.replicas["decode-1"] = decode(S24)
    chosen(cluster)
    cluster.trace.clear()
    cluster.strict = {"opt-1.3b": 7, "no-candidate": 3}
    cluster.tick()
    cluster.settle()
    assert cluster.trace == ["resize decode-1 opt-1.3b@12"]


def test_prefill_loads_what_strict_requests_wait_for() -> None:
    machine = Helios([SMALL], paper_config(scout=False), ChosenDevice(value_bytes=2))
    replicas = {
        "d0": decode(S24),
        "d1": decode(S24),
        "p0": ReplicaReport(Role.PREFILL, S24),
        "p1": ReplicaReport(Role.PREFILL, S24),
    }
    cluster = Cluster(machine, replicas)
    cluster.tick()
    cluster.profile()
    cluster.settle()
    assert {m.depth_class for m in cluster.replicas.values()} == {S6}
    cluster.trace.clear()
    cluster.strict, cluster.waiting = {"opt-1.3b": 24}, {"p0": 24}
    cluster.tick()
    assert said_reason(cluster) == "strict requests may need 24 layers of opt-1.3b"
    cluster.settle()
    held = {name: m.depth_class for name, m in cluster.replicas.items()}
    assert held == {"d0": S6, "d1": S24, "p0": S24, "p1": S6}
    cluster.waiting = {}
    cluster.tick()
    cluster.settle()
    assert cluster.replicas["p0"].depth_class == S24, "it stays while strict ones are in flight"
    cluster.strict = {}
    cluster.tick(31.0)
    cluster.settle()
    assert {m.depth_class for m in cluster.replicas.values()} == {S6}


def test_prefill_grows_first_and_shrinks_last() -> None:
    machine = Helios([SMALL], paper_config(scout=False), ChosenDevice(value_bytes=2))
    replicas = {"a-prefill": ReplicaReport(Role.PREFILL, S24), "b-decode": decode(S24)}
    cluster = Cluster(machine, replicas)
    cluster.tick()
    cluster.profile()
    cluster.settle()
    cluster.tick(100)
    cluster.breach(100, 51)
    cluster.settle()
    assert cluster.trace == [
        "choose opt-1.3b@6",
        "resize b-decode opt-1.3b@6",
        "resize a-prefill opt-1.3b@6",
        "choose opt-1.3b@24",
        "resize a-prefill opt-1.3b@24",
        "resize b-decode opt-1.3b@24",
    ]


# Samples, and small parts


def test_an_exit_whose_tokens_change_is_not_loaded() -> None:
    cluster = with_scout(1, slo="throughput", max_changed_share=0.2)
    cluster.tick()
    cluster.tell(UnchangedSampled("opt-1.3b", {6: (7_000, 10_000)}, 6))
    cluster.tell(UnchangedSampled("opt-1.3b", {6: (5_000, 5_000), 12: (4_900, 5_000)}, 12))
    chosen(cluster)
    # Six layers say something else too often; twelve do not, and 77.7 % are sure by then.
    small = [t for t in cluster.trace if "opt-1.3b@6" in t]
    assert small == []
    assert cluster.machine.status().target in (DepthClass("opt-1.3b", 12), L9)


@pytest.mark.parametrize(
    ("reports", "tripped"),
    [
        ([(100, 50, 1)], False),
        ([(100, 51, 1)], True),
        ([(51, 51, 1)], True),
        ([(50, 50, 1), (50, 0, 1), (1, 1, 1)], False),  # one of the first 50 is out again
        ([(100, 51, 1), (100, 0, 1)], False),
        ([(100, 51, 32)], False),  # 128 tokens count for 32 sequences
        ([(100, 51, 32), (28, 14, 32)], True),
        ([(1000, 501, 1)], True),
        ([(1000, 500, 1)], False),
        ([(0, 0, 1)], False),
    ],
)
def test_the_breach_window(reports: list[tuple[int, int, int]], tripped: bool) -> None:
    window = BreachWindow(100, 4, 0.5)
    for report in reports:
        window.add(*report)
    assert window.is_tripped is tripped
    window.clear()
    assert not window.is_tripped


def test_orders_say_what_they_are() -> None:
    cluster = with_scout(1)
    cluster.tick()
    cluster.profile()
    (switch,) = [o for o in cluster.outputs if isinstance(o, Switch)]
    assert switch.deadline_s == cluster.now_s + 300
    assert switch.reason == "opt-6.7b is profiled at full depth next, on scout"
    cluster.done()
    cluster.profile()
    cluster.settle()
    (resize,) = [o for o in cluster.outputs if isinstance(o, Resize)]
    assert "best for throughput: 171" in resize.reason
    assert "73% of tokens sure by then" in resize.reason
