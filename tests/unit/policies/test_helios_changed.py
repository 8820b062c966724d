"""The bound on tokens that a partial depth changes: expected, measured, refused, tried again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from quadriga.catalogue.records import CatalogueModel, DepthRecord
from quadriga.config.scheduling import HeliosConfig
from quadriga.core.replica import DepthClass, Role
from quadriga.policies.helios.exit_distribution import expected_changed, steadied_changed
from quadriga.policies.helios.history import HistoryRow, HistoryTable
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import ChosenDevice, ReplicaReport, UnchangedSampled
from quadriga.policies.helios.plans import Planner
from quadriga.policies.helios.selection import ChoiceReason, Chooser, Situation
from tests.unit.policies.helios_harness import (
    L9,
    L32,
    LARGE,
    S6,
    S24,
    SMALL,
    Cluster,
    chosen,
    decode,
    profiled,
    serve,
)

RECORDED = replace(SMALL, depths=(DepthRecord(6, unchanged=0.99, coverage=0.73),))
"""Six layers change one token in a hundred, by the record; of twelve nothing is known."""
WRONG = UnchangedSampled("opt-1.3b", {6: (960, 1000)}, 6)
"""An answer of six layers, one token in 25 of which all layers would not say."""


# How many are expected


@pytest.mark.parametrize(
    ("record", "coverage", "expected"),
    [
        (None, 0.73, 0.5 * 0.27),  # nothing is known: half of the breaches
        (DepthRecord(6), 0.73, 0.5 * 0.27),
        (DepthRecord(6, unchanged=0.99, coverage=0.8), 0.8, 0.01),
        (DepthRecord(6, unchanged=0.99, coverage=0.8), 0.9, 0.005),  # surer than on record
        (DepthRecord(6, unchanged=0.99, coverage=0.8), 0.4, 0.03),
        (DepthRecord(6, unchanged=0.99), 0.6, 0.01),
        (DepthRecord(6, unchanged=0.7, coverage=0.8), 0.8, 0.3),  # sure ones, too
        (DepthRecord(6, unchanged=0.7, coverage=0.8), 1.0, 0.1),
        (DepthRecord(6, unchanged=0.99, coverage=1.0), 0.5, 0.01),
        (DepthRecord(6, unchanged=0.0, coverage=0.0), 0.0, 1.0),
    ],
)
def test_what_is_expected(record: DepthRecord | None, coverage: float, expected: float) -> None:
    assert expected_changed(record, coverage) == pytest.approx(expected)


def test_what_was_read_again_outweighs_what_was_expected() -> None:
    row = HistoryRow("m", 6, unchanged={3: (400.0, 400.0), 6: (80.0, 100.0)})
    assert steadied_changed(0.1, row, 500.0) == pytest.approx((50 + 20) / 1000)
    assert steadied_changed(0.1, row, 0.0) == pytest.approx(20 / 500)
    assert (
        steadied_changed(0.1, None, 500.0)
        == steadied_changed(0.1, HistoryRow("m", 6), 500.0)
        == 0.1
    )


def test_tokens_of_other_depths_say_nothing_of_this_one() -> None:
    table = HistoryTable()
    table.sampled(UnchangedSampled("opt-1.3b", {6: (0, 1000)}), 24)
    table.sampled(UnchangedSampled("opt-1.3b", {6: (0, 1000), 12: (500, 1000)}, 12), 24)
    assert table.find("opt-1.3b", 6) is None
    planner = planner_of(table)
    at_six, at_twelve, whole = (planner.plan(DepthClass("opt-1.3b", k), 1.0) for k in (6, 12, 24))
    assert at_six is not None and at_twelve is not None and whole is not None
    assert at_six.changed_share == pytest.approx(0.5 * 0.27)
    assert at_twelve.changed_share == pytest.approx((0.5 * 0.223 * 5000 + 500) / 7000)
    assert whole.changed_share == 0.0


# What it refuses


def planner_of(table: HistoryTable, *models: CatalogueModel, **config: Any) -> Planner:
    device = ChosenDevice(value_bytes=2)
    return Planner(models or (SMALL, LARGE), HeliosConfig(**config), device, profiled(table))


def after_profile(*models: CatalogueModel, **config: Any) -> ChoiceReason:
    planner = planner_of(HistoryTable(), *models, **config)
    chooser = Chooser(planner, [m.id for m in models], HeliosConfig(**config))
    return chooser.after_profile(Situation(None, math.inf, 0.0, ()))


@pytest.mark.parametrize("slo", ["throughput", "response", "accuracy", "energy"])
def test_no_objective_chooses_what_changes_too_many(slo: Any) -> None:
    verdict = after_profile(SMALL, LARGE, slo=slo, max_changed_share=0.1)
    assert verdict.plan is not None and verdict.plan.is_full
    assert (
        "13.50% of the tokens of opt-1.3b@6 are expected to be others than the whole model's, "
        "10.00% at most are allowed"
    ) in verdict.reason
    verdict = after_profile(SMALL, LARGE, slo=slo, max_changed_share=1.0)
    assert verdict.plan is not None and verdict.plan.depth_class == S6
    assert "allowed" not in verdict.reason


@pytest.mark.parametrize(
    ("limit", "expected"), [(0.0, 24), (0.0099, 24), (0.01, 6), (0.02, 6), (1.0, 6)]
)
def test_the_record_decides_where_there_is_one(limit: float, expected: int) -> None:
    verdict = after_profile(RECORDED, max_changed_share=limit)
    assert verdict.plan is not None and verdict.plan.depth_class.depth == expected


def test_a_deeper_exit_is_taken_where_it_changes_fewer() -> None:
    records = (*RECORDED.depths, DepthRecord(12, unchanged=0.999, coverage=0.777))
    verdict = after_profile(replace(SMALL, depths=records), max_changed_share=0.005)
    assert verdict.plan is not None and verdict.plan.depth_class.depth == 12
    assert "1.00% of the tokens of opt-1.3b@6" in verdict.reason


def test_breaches_lead_to_no_exit_that_changes_too_many() -> None:
    """The paper's own rule would switch to nine layers of the large model."""
    for limit, expected in ((1.0, L9), (0.1, S24)):
        config = HeliosConfig(margin=0.0, max_changed_share=limit)
        planner = planner_of(HistoryTable(), max_changed_share=limit)
        chooser = Chooser(planner, [SMALL.id, LARGE.id], config)
        now = Situation(S6, math.inf, 0.0, (), requests_left=150)
        verdict = chooser.after_breaches(now, "51 of 100")
        assert verdict.plan is not None and verdict.plan.depth_class == expected
        assert ("13.20% of the tokens of opt-6.7b@9" in verdict.reason) is (expected == S24)
        stuck = chooser.after_breaches(replace(now, barred={S24, L9}), "51 of 100")
        assert (stuck.plan is None) is (limit == 0.1)


def test_a_table_that_was_kept_does_not_get_round_it() -> None:
    table = HistoryTable()
    planner_of(table)  # both were profiled
    for limit, expected in ((1.0, "choose opt-1.3b@6"), (0.1, "choose opt-1.3b@24")):
        config = HeliosConfig(scout=False, max_changed_share=limit)
        machine = Helios([SMALL, LARGE], config, ChosenDevice(value_bytes=2), table)
        cluster = Cluster(machine, {"decode-0": decode(L32)})
        cluster.tick()
        assert cluster.trace[0] == expected


# While it serves


def serving_six(**config: Any) -> Cluster:
    """One replica and a scout; six layers serve, as the record speaks for them."""
    made = HeliosConfig(**{"max_changed_share": 0.02, "reassess_requests": 10} | config)
    machine = Helios([RECORDED], made, ChosenDevice(value_bytes=2))
    replicas = {"decode-0": decode(S24), "scout": ReplicaReport(Role.DECODE, S24)}
    cluster = chosen(Cluster(machine, replicas, frozenset({"scout"})))
    assert machine.status().target == S6
    cluster.tick(1000)
    cluster.trace.clear()
    return cluster


def test_a_life_with_changed_tokens() -> None:
    """The record counts for 5,000 tokens, 50 of them changed; each sample weighs .98 of the next.

    Shares after one to four samples: 90/6000, 129.2/6980, 167.6/7940, 205.3/8882: .0150, .0185,
    .0211, .0231. The limit is .02, and with the margin .022. A profile forgets a fifth of the
    samples: then (50 + 124.2)/8105 and (50 + 99.4)/7484: .0215, .0200 (.01996).
    """
    cluster = serving_six()
    for _ in range(3):
        cluster.tell(WRONG)
    assert cluster.trace == [], "over the limit, but not by the margin"
    (choose, resize) = cluster.tell(WRONG)
    assert choose.reason.startswith(
        "2.31% of the tokens of opt-1.3b@6 are expected to be others than the whole model's, "
        "2.20% at most are allowed"
    )
    assert resize.reason == choose.reason
    assert cluster.machine.status().counters.trips == 1
    assert list(cluster.machine.status().barred) == ["opt-1.3b@6"]
    cluster.done()
    for _ in range(2):
        cluster.tick(1000)
        serve(cluster, 10, S24)
        chosen(cluster)
    assert cluster.trace == [
        "choose opt-1.3b@24",
        "resize decode-0 opt-1.3b@24",
        "keep",  # six layers are still refused
        "choose opt-1.3b@6",
        "resize decode-0 opt-1.3b@6",
    ]
    assert "2.15% of the tokens of opt-1.3b@6" in cluster.outputs[-3].reason


def test_it_is_not_left_before_the_dwell_is_over() -> None:
    cluster = serving_six(dwell_loads=1e3)
    cluster.now_s -= 500  # the dwell is 1,000 s, of a load of one, and just over
    for _ in range(9):
        cluster.tell(WRONG)
    assert cluster.trace == ["keep"], "said once"
    assert "there is none before" in cluster.outputs[-1].reason
    cluster.tick(500)
    cluster.tell(WRONG)
    assert cluster.trace == ["keep", "choose opt-1.3b@24", "resize decode-0 opt-1.3b@24"]


def test_an_assessment_leaves_it_without_another_sample() -> None:
    """What was seen while an order was under way counts at the next look."""
    cluster = serving_six()
    cluster.replicas["decode-1"] = decode(S24)
    cluster.tick()
    assert cluster.order is not None
    for _ in range(20):
        cluster.tell(WRONG)
    assert cluster.trace == ["resize decode-1 opt-1.3b@6"], "an order is under way"
    cluster.settle()
    cluster.tick(1000)
    serve(cluster, 10, S6)
    chosen(cluster)
    assert cluster.machine.status().target == S24
    assert "opt-1.3b@6 are expected to be others" in cluster.outputs[-3].reason


def test_samples_of_what_does_not_serve_change_nothing_at_once() -> None:
    cluster = serving_six()
    for _ in range(20):
        cluster.tell(replace(WRONG, depth=12))
        cluster.tell(replace(WRONG, depth=None))
        cluster.tell(replace(WRONG, model="opt-6.7b"))
    assert cluster.trace == []
    assert cluster.machine.table.find("opt-6.7b", 6) is None, "no candidate"


def test_the_papers_rule_asks_for_breaches_alone() -> None:
    cluster = serving_six(max_changed_share=1.0)
    for _ in range(50):
        cluster.tell(replace(WRONG, exits={6: (0, 1000)}))
    assert cluster.trace == []
    cluster.breach(100, 51)
    assert cluster.trace[0] == "choose opt-1.3b@24"
