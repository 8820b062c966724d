"""HELIOS on HELIOS's own example: OPT-1.3B and OPT-6.7B with the figures of Tables 1, 4 and 5."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from quadriga.catalogue.records import DepthRecord
from quadriga.core.replica import DepthClass
from quadriga.errors import ConfigError
from quadriga.policies.helios.candidates import pick_candidates
from quadriga.policies.helios.history import HistoryTable
from quadriga.policies.helios.messages import ChosenDevice
from quadriga.policies.helios.plans import Planner
from quadriga.policies.helios.selection import Chooser, Situation, best_plan
from tests.unit.policies.helios_harness import (
    EXITS,
    L9,
    L32,
    LARGE,
    S6,
    S24,
    SMALL,
    TIMES_S,
    finished,
    model,
    paper_config,
    profiled,
)

# Table 4, HELIOS's row: per cent of all tokens.
MIX = {S24.model: {6: 70.19, 12: 1.38, 24: 6.78}, L32.model: {9: 20.90, 17: 0.14, 32: 0.61}}


def planner(**config: Any) -> Planner:
    table = profiled(HistoryTable())
    return Planner([SMALL, LARGE], paper_config(**config), ChosenDevice(value_bytes=2), table)


def chooser(made: Planner, **config: Any) -> Chooser:
    return Chooser(made, [SMALL.id, LARGE.id], paper_config(**config))


def situation(target: DepthClass | None, **changes: Any) -> Situation:
    return Situation(target, math.inf, 0.0, (), requests_left=150, **changes)


def test_the_repository_would_choose_the_large_model_and_the_profile_the_small() -> None:
    """Table 1: perplexity 1.91 and 1.68 on record, 1.47 and 1.49 on the live prompts."""
    on_record = [
        model("opt-1.3b", (6, 12), depths=(DepthRecord(24, perplexity=1.91),)),
        model("opt-6.7b", (9, 17), depths=(DepthRecord(32, perplexity=1.68),)),
    ]
    picked = pick_candidates(on_record, slo="accuracy", device=ChosenDevice(), context_tokens=2048)
    assert [m.id for m in picked.candidates] == ["opt-6.7b", "opt-1.3b"]
    made = planner(slo="accuracy", min_coverage=1.0)
    verdict = chooser(made, slo="accuracy", min_coverage=1.0).after_profile(situation(None))
    assert verdict.plan is not None
    assert verdict.plan.depth_class == S24
    assert verdict.plan.perplexity == pytest.approx(1.47, abs=0.005)


def test_depths_are_those_of_the_paper() -> None:
    """§3.3.3: up to layers 6 and 9, as 74 % and 77 % of tokens leave there (Table 4: 73, 73.6)."""
    made = planner()
    assert made.worth_loading("opt-1.3b")[0] == 6
    assert made.worth_loading("opt-6.7b")[0] == 9
    assert planner(min_coverage=0.75).worth_loading("opt-1.3b") == [12]
    assert planner(min_coverage=0.80).worth_loading("opt-1.3b") == []


def test_time_goes_with_layers_as_in_tables_4_and_5() -> None:
    """The single models' speeds and HELIOS's own exits give HELIOS's own time: 8 ms a token."""
    made = planner()
    seconds = 0.0
    for full in (S24, L32):
        for depth, share in MIX[full.model].items():
            mean = sum(k * n for k, n in EXITS[full.model].items()) / 1000
            if depth == (6 if full is S24 else 9):
                plan = made.plan(DepthClass(full.model, depth), 1.0)
                assert plan is not None
                seconds += share / 100 * plan.tpot_s
            else:
                seconds += share / 100 * TIMES_S[full.model][1] * depth / mean
    assert seconds == pytest.approx(0.008, rel=0.01)
    assert 1.0 - seconds / TIMES_S["opt-6.7b"][1] == pytest.approx(0.466, abs=0.01)


def test_throughput_chooses_six_layers_of_the_small_model() -> None:
    verdict = chooser(planner()).after_profile(situation(None))
    assert verdict.plan is not None
    assert verdict.plan.depth_class == S6
    assert verdict.plan.tokens_per_s == pytest.approx(1000 / (10 * 6 / 10.296))


@pytest.mark.parametrize(
    ("slo", "expected"), [("throughput", S6), ("response", S6), ("accuracy", S6), ("energy", S6)]
)
def test_every_objective_prefers_the_small_model_here(slo: Any, expected: DepthClass) -> None:
    """Appendix E: 43 against 69 ms, 0.50 against 1.01 Wh, perplexity 0.01 apart."""
    verdict = chooser(planner(), slo=slo).after_profile(situation(None))
    assert verdict.plan is not None
    assert verdict.plan.depth_class == expected


def test_the_papers_own_rule_switches_and_hysteresis_loads_more() -> None:
    """Algorithm 1: full small model (10 ms a token) against nine layers of the large (9.4 ms)."""
    made = planner()
    full, other = made.plan(S24, 1.0), made.plan(L9, 1.0)
    assert full is not None
    assert other is not None
    assert (full.tpot_s, other.tpot_s) == pytest.approx((0.010, 0.015 * 9 / 14.352))
    paper = chooser(made, margin=0.0).after_breaches(situation(S6), "51 of 100")
    assert paper.plan is not None
    assert paper.plan.depth_class == L9
    ours = chooser(made).after_breaches(situation(S6), "51 of 100")
    assert ours.plan is not None
    assert ours.plan.depth_class == S24, "6 % are less than the margin"


def test_costs_are_in_seconds_by_hand() -> None:
    """150 requests of 1,000 tokens; loading at 1 GB/s; 20,000 tokens in flight."""
    made = planner()
    verdict = chooser(made).after_breaches(situation(S6, in_flight_tokens=20_000), "")
    layer = 2 * (12 * 2048**2 + 13 * 2048)
    load_s = 18 * layer / 1e9
    rebuild_s = 20_000 * 0.75 * 0.042 / 100
    serve_s = 150 * (0.042 + 1000 * 0.010)
    assert f"costs {load_s + rebuild_s + serve_s:.0f} s" in verdict.reason
    assert f"(load {load_s:.3g}, rebuild {rebuild_s:.3g}, serve {serve_s:.0f})" in verdict.reason


def test_barred_plans_are_not_chosen() -> None:
    made = planner()
    all_but_one = {S24, L9, DepthClass("opt-6.7b", 17)}
    now = Situation(S6, math.inf, 0.0, all_but_one, requests_left=150)
    assert chooser(made).after_breaches(now, "").plan is None
    full = Situation(S6, math.inf, 0.0, {S24}, requests_left=150)
    verdict = chooser(made).after_breaches(full, "")
    assert verdict.plan is not None
    assert verdict.plan.depth_class == L9


def test_perplexity_outranks_speed() -> None:
    """A model 3 % worse in perplexity is not admitted, however fast."""
    table = HistoryTable()
    for _ in range(5):
        table.add(finished(S24, nll=1000 * math.log(1.55)))
        table.add(finished(L32))
    made = Planner([SMALL, LARGE], paper_config(), ChosenDevice(value_bytes=2), table)
    plans = [p for m in (SMALL, LARGE) for p in made.plans(m.id, 1.0)]
    best = best_plan(plans, "throughput", 0.02)
    assert best is not None
    assert best.depth_class == L9
    response = best_plan(plans, "response", 0.02)
    assert response is not None
    assert response.depth_class == S6, "response looks at time alone"


def test_what_is_on_record_warns_of_a_shallow_exit() -> None:
    """Nobody served six layers yet; on record they are 10 % worse than all, twelve 1 %."""
    table = HistoryTable()
    for _ in range(5):
        table.add(finished(S24))
    six, twelve = DepthRecord(6, perplexity=1.65), DepthRecord(12, perplexity=1.515)
    whole = DepthRecord(24, perplexity=1.5)
    for records, expected in (((six, twelve, whole), 12), ((six, whole), 12), ((whole,), 6)):
        known = model("opt-1.3b", (6, 12), depths=records)
        made = Planner([known], paper_config(), ChosenDevice(value_bytes=2), table)
        best = best_plan(made.plans("opt-1.3b", 1.0), "throughput", 0.02)
        assert best is not None
        assert best.depth_class.depth == expected
    # Six layers of 73 % of the tokens, twelve of the rest: less than the profile's 24 of 22.3 %.
    plan = made.plan(DepthClass("opt-1.3b", 12), 1.0)
    assert plan is not None
    assert plan.tpot_s == pytest.approx(0.010 * (0.73 * 6 + 0.27 * 12) / 10.296)


def test_freed_memory_becomes_batch() -> None:
    """On 16 GiB the large model at nine layers holds many more sequences than whole."""
    table = HistoryTable()
    for _ in range(5):
        table.add(finished(L32))
    device = ChosenDevice(memory_bytes=16 << 30, value_bytes=2, max_slots=1000)
    made = Planner([LARGE], paper_config(), device, table)
    partial, _, full = made.plans("opt-6.7b", 1e9)
    assert (partial.depth_class, full.depth_class) == (L9, L32)
    kv = 1100 * 2 * 2 * 4096
    weights = {p: LARGE.sizes.weight_bytes(p.depth_class.depth, 2) for p in (partial, full)}
    assert full.batch == pytest.approx(((16 << 30) - weights[full]) / (32 * kv))
    assert partial.batch == pytest.approx(((16 << 30) - weights[partial]) / (9 * kv))
    assert partial.batch / full.batch > 10


# Step 1


def test_candidates_must_fit_and_share_the_best_ones_tokenizer() -> None:
    models = [
        model("opt-125m", (3,)),
        model("opt-1.3b", (6, 12)),
        model("opt-2.7b", (8,)),
        model("opt-6.7b", (9, 17)),
        model("opt-30b", (12,)),
        model("llama-3-8b", (8,), tokenizer="another"),
    ]
    picked = pick_candidates(
        models, slo="throughput", device=ChosenDevice(32 << 30, value_bytes=2), context_tokens=2048
    )
    assert [m.id for m in picked.candidates] == ["opt-125m", "opt-1.3b", "opt-2.7b"]
    reasons = {r.model: r.reason for r in picked.refusals}
    assert set(reasons) == {"opt-6.7b", "opt-30b", "llama-3-8b"}
    assert "55.8 GiB" in reasons["opt-30b"]
    assert "exceed the device's 32 GiB" in reasons["opt-30b"]
    assert reasons["opt-6.7b"] == "place 4 for throughput; at most 3 are profiled"
    assert "tokenizer another is not one of opt-125m" in reasons["llama-3-8b"]


def test_figures_on_record_rank_before_size() -> None:
    fast = model("opt-6.7b", (9,), depths=(DepthRecord(32, step_s=((1, 0.01), (8, 0.02))),))
    slow = model("opt-1.3b", (6,), depths=(DepthRecord(24, step_s=((1, 0.01),)),))
    unknown = model("opt-125m", (3,))

    def order(slo: Any) -> list[str]:
        picked = pick_candidates(
            [unknown, slow, fast], slo=slo, device=ChosenDevice(), context_tokens=100
        )
        return [m.id for m in picked.candidates]

    assert order("throughput") == ["opt-6.7b", "opt-1.3b", "opt-125m"]
    assert order("response") == ["opt-125m", "opt-1.3b", "opt-6.7b"]
    assert order("accuracy") == ["opt-6.7b", "opt-1.3b", "opt-125m"]


def test_no_candidate_is_an_error_with_every_reason() -> None:
    made = model("opt-125m", ())
    short = replace(made, sizes=replace(made.sizes, max_positions=1024))
    with pytest.raises(ConfigError, match=r"opt-30b: weights of 55\.8 GiB.*opt-125m: made for"):
        pick_candidates(
            [model("opt-30b", ()), short],
            slo="energy",
            device=ChosenDevice(1 << 30, value_bytes=2),
            context_tokens=2048,
        )
