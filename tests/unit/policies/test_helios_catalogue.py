"""What is on record steadies what a few live requests say, and spares hopeless profiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quadriga.catalogue.records import CatalogueModel, DepthRecord
from quadriga.core.replica import DepthClass
from quadriga.policies.helios.exit_distribution import recorded_exits, steadied
from quadriga.policies.helios.history import HistoryTable
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import ChosenDevice, Keep
from quadriga.policies.helios.plans import Planner
from tests.unit.policies.helios_harness import (
    L32,
    LARGE,
    S6,
    S24,
    SMALL,
    Cluster,
    chosen,
    decode,
    finished,
    paper_config,
    serve,
)

TOKENS = 1000
"""Of every request of the harness."""


def known(
    model: CatalogueModel, coverage: tuple[float, float], token_ms: tuple[float, float, float]
) -> CatalogueModel:
    """A model with where its tokens leave, and what they take, on record."""
    first, second, full = model.exit_depths
    depths = (
        DepthRecord(first, coverage=coverage[0], token_s=1e-3 * token_ms[0]),
        DepthRecord(second, coverage=coverage[1], token_s=1e-3 * token_ms[1]),
        DepthRecord(full, token_s=1e-3 * token_ms[2]),
    )
    return replace(model, depths=depths)


SMALL_KNOWN = known(SMALL, (0.73, 0.777), (6.0, 12.0, 24.0))
LARGE_KNOWN = known(LARGE, (0.736, 0.784), (9.0, 17.0, 32.0))


def planner(model: CatalogueModel, requests: int, **changes: Any) -> Planner:
    """After so many live requests to the whole model."""
    table = HistoryTable()
    for _ in range(requests):
        table.add(finished(DepthClass(model.id, model.num_layers), **changes))
    return Planner([model], paper_config(), ChosenDevice(value_bytes=2), table)


def test_shares_on_record_are_of_each_exit_and_all_of_them_must_be_there() -> None:
    shares = recorded_exits(SMALL_KNOWN)
    assert shares == pytest.approx({6: 0.73, 12: 0.047, 24: 0.223})
    assert recorded_exits(SMALL) is None
    assert recorded_exits(replace(SMALL_KNOWN, depths=SMALL_KNOWN.depths[:1])) is None


def test_what_is_on_record_counts_as_one_profile() -> None:
    """Five live requests, none of whose tokens left early, weigh as much as the record; fifty
    ten times as much."""
    deep = {"exit_tokens": {24: TOKENS}}
    for requests, weight in ((5, 0.5), (50, 50 / 55)):
        live = sum(0.98**i for i in range(requests)) * TOKENS
        share = 5 * TOKENS / (5 * TOKENS + live)
        plan = planner(SMALL_KNOWN, requests, **deep).plan(S6, 1.0)
        assert plan is not None
        assert plan.coverage == pytest.approx(0.73 * share)
        assert share == pytest.approx(1.0 - weight, abs=0.05)
    without = planner(SMALL, 5, **deep).plan(S6, 1.0)
    assert without is not None and without.coverage == 0.0


def test_an_unlucky_profile_no_longer_hides_an_exit() -> None:
    unlucky = {"exit_tokens": {6: 620, 12: 40, 24: 340}}
    assert planner(SMALL, 5, **unlucky).worth_loading(SMALL.id) == []
    steady = known(SMALL, (0.80, 0.85), (6.0, 12.0, 24.0))
    assert planner(steady, 5, **unlucky).worth_loading(SMALL.id) == [6, 12]


def test_partial_rows_are_steadied_by_what_they_could_have_seen() -> None:
    exits = steadied(SMALL_KNOWN, {6: 500.0}, 1000.0)
    assert exits == {6: pytest.approx(1500.0)}, "nothing leaves below what was loaded"


def test_times_are_steadied_by_the_record_and_one_speed_for_all() -> None:
    """The machine is twice as slow as on record; the large model's profile was slow besides."""
    table = HistoryTable()
    per_token_s = {
        S24: 0.73 * 6 + 0.047 * 12 + 0.223 * 24,
        L32: 0.736 * 9 + 0.048 * 17 + 0.216 * 32,
    }
    for full, factor in ((S24, 2.0), (L32, 4.0)):
        for _ in range(5):
            table.add(finished(full, decode_s=999 * factor * 1e-3 * per_token_s[full]))
    made = Planner([SMALL_KNOWN, LARGE_KNOWN], paper_config(), ChosenDevice(value_bytes=2), table)
    both = sum(per_token_s.values())
    speed = (2.0 * per_token_s[S24] + 4.0 * per_token_s[L32]) / both
    found = {full: made.plan(full, 1.0) for full in per_token_s}
    for full, factor in ((S24, 2.0), (L32, 4.0)):
        plan = found[full]
        assert plan is not None
        mean = (factor + speed) / 2  # the record weighs about as much as five requests
        assert plan.tpot_s == pytest.approx(1e-3 * per_token_s[full] * mean, rel=0.02)
    at_six = made.plan(S6, 1.0)
    whole = found[S24]
    assert at_six is not None and whole is not None
    ratio = 6.0 / per_token_s[S24]
    assert at_six.tpot_s == pytest.approx(whole.tpot_s * ratio, rel=0.01)


def pair(*models: CatalogueModel, **config: Any) -> Cluster:
    usual = {"scout": False, "reassess_requests": 10, "profile_share": 1.0, "dwell_loads": 0.0}
    config = usual | config
    machine = Helios(list(models), paper_config(**config), ChosenDevice(value_bytes=2))
    return Cluster(machine, {"decode-0": decode(S24)})


def test_a_model_that_cannot_win_is_profiled_at_first_and_then_now_and_then() -> None:
    """Nine layers of the large one take longer than the small one whole."""
    slow = known(LARGE, (0.736, 0.784), (20.0, 30.0, 60.0))
    cluster = chosen(pair(SMALL_KNOWN, slow))
    assert cluster.machine.status().counters.profiles == 2, "all of them at first"
    assert cluster.machine.status().target == S6
    profiled = []
    for _ in range(5):
        before = cluster.machine.status().counters.profiles
        cluster.outputs.clear()
        serve(cluster, 10, S6)
        said = [o.reason for o in cluster.outputs if isinstance(o, Keep)]
        chosen(cluster)
        profiled.append(cluster.machine.status().counters.profiles - before)
        if profiled[-1] == 1:
            assert any("opt-6.7b is not profiled: with all tokens at its first" in s for s in said)
    assert profiled == [1, 1, 1, 2, 1], "what is known of it grows old"


@pytest.mark.parametrize(
    "models",
    [
        (SMALL, LARGE),  # nothing is on record
        (SMALL_KNOWN, known(LARGE, (0.5, 0.784), (5.0, 17.0, 32.0))),  # it might be faster
    ],
)
def test_a_model_that_might_win_is_profiled_every_time(models: tuple[CatalogueModel, ...]) -> None:
    cluster = chosen(pair(*models))
    before = cluster.machine.status().counters.profiles
    target = cluster.machine.status().target
    assert target is not None
    serve(cluster, 10, target)
    chosen(cluster)
    assert cluster.machine.status().counters.profiles == before + 2
