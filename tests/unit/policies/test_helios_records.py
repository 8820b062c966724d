"""What steadies the few requests of a profile: the catalogue, and what was served before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from quadriga.catalogue.records import DepthRecord
from quadriga.core.replica import DepthClass
from quadriga.policies.helios.history import HistoryRow, HistoryTable
from quadriga.policies.helios.messages import ChosenDevice
from quadriga.policies.helios.plans import RECORD_TOKENS, Planner
from tests.unit.policies.helios_harness import (
    L32,
    LARGE,
    S6,
    S24,
    SMALL,
    alone,
    finished,
    paper_config,
    with_scout,
)

GOOD, BAD = 1.05, 1.20
RECORDED_S = replace(SMALL, depths=(DepthRecord(24, perplexity=BAD),))
RECORDED_L = replace(LARGE, depths=(DepthRecord(32, perplexity=GOOD),))


def perplexities(small_nll: float, large_nll: float, tokens: int) -> tuple[float, float]:
    """Of both models whole, after one request of so many tokens each."""
    table = HistoryTable()
    for depth_class, nll in ((S24, small_nll), (L32, large_nll)):
        table.add(finished(depth_class, nll=nll * tokens, scored_tokens=tokens))
    planner = Planner((RECORDED_S, RECORDED_L), paper_config(), ChosenDevice(), table)
    small, large = planner.plan(S24, 1.0), planner.plan(L32, 1.0)
    assert small is not None and large is not None
    return small.perplexity, large.perplexity


def test_a_few_easy_requests_do_not_turn_the_order_round() -> None:
    small, large = perplexities(math.log(1.01), math.log(1.10), tokens=100)
    assert small > large


def test_many_live_tokens_do() -> None:
    small, large = perplexities(math.log(1.01), math.log(1.10), tokens=1_000_000)
    assert small < large
    assert small == pytest.approx(1.01, rel=0.01) and large == pytest.approx(1.10, rel=0.01)


def test_as_many_live_tokens_as_the_record_counts_for_weigh_the_same() -> None:
    small, _ = perplexities(math.log(1.01), 0.0, tokens=int(RECORD_TOKENS))
    assert small == pytest.approx(math.sqrt(1.01 * BAD))


def profile_of(tokens: dict[int, int], count: int = 5) -> HistoryRow:
    row = HistoryRow("opt-1.3b", 24)
    for _ in range(count):
        row.add(finished(S24, exit_tokens=tokens))
    return row


def test_the_class_that_serves_takes_its_profile_in() -> None:
    table = HistoryTable()
    for _ in range(50):
        table.add(finished(S24, exit_tokens={6: 90, 24: 10}))
    table.install(profile_of({24: 100}), serving=S24)
    row = table.find("opt-1.3b", 24)
    assert row is not None and row.num_requests == 55
    coverage = row.coverage(6)
    assert coverage is not None and 0.75 < coverage < 0.85  # five of the last fifty or so
    table.install(profile_of({24: 100}), serving=L32)
    replaced = table.find("opt-1.3b", 24)
    assert replaced is not None and replaced.coverage(6) == 0.0


def test_a_partial_class_that_serves_keeps_what_it_saw() -> None:
    table = HistoryTable()
    table.add(finished(S6, exit_tokens={6: 100}, breaches=20))
    table.install(profile_of({24: 100}), serving=S6)
    kept = table.find("opt-1.3b", 6)
    assert kept is not None and kept.coverage(6) == pytest.approx(0.8)
    table.install(profile_of({24: 100}), serving=S24)
    assert kept.coverage(6) is None


def test_what_loading_takes_is_learnt_where_something_was_loaded() -> None:
    cluster = alone(S24, dwell_loads=2.0)
    cluster.tick()
    cluster.profile()
    cluster.done(load_s=4.0)  # the second candidate
    cluster.profile()
    cluster.done(load_s=3.0)  # the first one at six layers
    row = cluster.machine.table.find("opt-1.3b", 6)
    assert row is not None and row.load_s == 3.0, "it was another model's process"
    cluster.tick(5.9)
    cluster.trace.clear()
    cluster.breach(100, 60)
    assert cluster.trace == ["keep"], "the dwell is two of the loads that were measured"
    cluster.tick(0.2)
    cluster.breach(1, 1)
    assert cluster.trace == ["keep", "choose opt-1.3b@24", "resize decode-0 opt-1.3b@24"]
    cluster.done(load_s=0.3)
    whole = cluster.machine.table.find("opt-1.3b", 24)
    assert whole is not None and whole.load_s != 0.3, "no process was started"
    planner = cluster.machine._planner
    assert planner.load_s(S24, held=6) == pytest.approx(0.3)


@pytest.mark.parametrize(("looked_at", "depths"), [(19, []), (20, [6])])
def test_a_share_of_few_tokens_that_were_looked_at_is_none(
    looked_at: int, depths: list[int]
) -> None:
    table = HistoryTable()
    table.add(finished(S24, exit_tokens={24: 500}, sure_tokens={6: looked_at}))
    planner = Planner((SMALL, LARGE), paper_config(), ChosenDevice(), table)
    assert planner.worth_loading("opt-1.3b")[:1] == depths


def test_dropping_layers_says_nothing_of_loading() -> None:
    cluster = with_scout(num_decode=1)
    cluster.profile_both()
    table = cluster.machine.table
    table.row("opt-1.3b", 6).load_s = 3.0
    while cluster.order is not None and cluster.order.replica == "scout":
        cluster.done(load_s=4.0)
    assert cluster.trace[-1] == "resize decode-0 opt-1.3b@6"
    cluster.done(load_s=0.0)
    row = table.find("opt-1.3b", 6)
    assert row is not None and row.load_s == 3.0


def test_the_stream_decides_how_long_answers_are() -> None:
    table = HistoryTable()
    table.add(finished(S24))  # 1,000 tokens
    table.add(finished(L32, exit_tokens={9: 150, 32: 50}))  # 200: another kind of request
    planner = Planner((SMALL, LARGE), paper_config(), ChosenDevice(), table)
    small, large = planner.plan(S24, 1.0), planner.plan(L32, 1.0)
    assert small is not None and large is not None
    assert small.tokens_per_request == large.tokens_per_request == pytest.approx(600.0)


def test_starts_and_reading_are_priced_by_what_each_took() -> None:
    table = HistoryTable()
    table.add(finished(S24))
    recorded = replace(SMALL, depths=(DepthRecord(6, load_s=9.0),))
    planner = Planner((recorded,), paper_config(), ChosenDevice(value_bytes=2), table)
    assert planner.load_s(S6) == pytest.approx(9.0)
    table.row("opt-1.3b", 24).load_s = 15.0  # seen here: the start of a process
    few, all_ = (SMALL.sizes.weight_bytes(depth, 2) for depth in (6, 24))
    planner.has_read(S24, 6, 0.3)  # the layers that a process lacked
    assert planner.load_s(S24, held=6) == pytest.approx(0.3)
    assert planner.load_s(DepthClass("opt-1.3b", 12), held=6) == pytest.approx(
        0.3 * (SMALL.sizes.weight_bytes(12, 2) - few) / (all_ - few)
    )
    assert planner.load_s(S24) == 15.0
    assert planner.load_s(S6) == pytest.approx(14.7), "its process reads less"
    table.row("opt-1.3b", 6).load_s = 0.5
    assert planner.load_s(S6) == 0.5
    device = ChosenDevice(value_bytes=2, starts_anew=True)
    assert Planner((recorded,), paper_config(), device, table).load_s(S24, held=6) == 15.0


def test_what_served_speaks_for_the_whole_where_it_saw_more() -> None:
    table = HistoryTable()
    slow = finished(S24)
    for _ in range(5):
        table.add(replace(slow, decode_s=3 * slow.decode_s))  # a profile of five unlucky ones
    planner = Planner((SMALL, LARGE), paper_config(), ChosenDevice(), table)
    alone_s = planner.plan(S24, 1.0)
    assert alone_s is not None and alone_s.tpot_s == pytest.approx(0.030, rel=0.01)
    for _ in range(30):
        table.add(finished(S6))
    known = planner.plan(S24, 1.0)
    assert known is not None and known.tpot_s == pytest.approx(0.010, rel=0.01)  # the paper's own
    part = planner.plan(S6, 1.0)
    assert part is not None and part.tpot_s < known.tpot_s
