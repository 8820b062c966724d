"""Surveys tell where tokens could leave, and change neither tokens nor where they leave."""

from __future__ import annotations

from quadriga.checkpoint.exits import ExitCounters, ExitParams
from quadriga.clock import ManualClock
from quadriga.core.output import EngineOutput
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.policies.drex import DrexRebatcher, RebatchPlan, SegmentCosts
from quadriga.policies.drex.rebatcher import SURVEY_SHARE
from tests.fake_runner import EOS, FakeSegmentRunner, confidence_at
from tests.sequences import make_decode_loop, make_sequence, make_slots

ENDS = (2, 5, 8)
NUM_SEQUENCES, NUM_TOKENS, EVERY, THRESHOLD = 6, 120, 4, 0.6


def run(rebatcher: DrexRebatcher) -> tuple[list[SequenceState], list[EngineOutput]]:
    """Decode a few sequences to their ends; the plan stays as it is."""
    clock = ManualClock()
    loop = make_decode_loop(
        FakeSegmentRunner(NUM_SEQUENCES, 160, ends=ENDS, clock=clock, base_s=1e-2),
        make_slots(NUM_SEQUENCES, 160, 10**6),
        clock,
        eos_token_ids=(EOS,),
        rebatcher=rebatcher,
        counters=rebatcher._counters,
    )
    states = []
    for i in range(NUM_SEQUENCES):
        name = f"s{i}"
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        state = make_sequence(
            name,
            [3 + i, 1, 2],
            sampling,
            exits=ExitParams(THRESHOLD, "bounded"),
            output_ids=[7],
            exit_layers=[8],
        )
        slot = loop.reserve(name, state.max_total_tokens)
        loop._runner.write_kv(slot.row, 0, 0, state.prompt_ids)
        loop.join(state)
        states.append(state)
    outputs = []
    while loop.has_work:
        outputs += [output for _, output in loop.step()]
        loop.check()
    return states, outputs


def drex(*exits: int, survey_every: int = EVERY) -> DrexRebatcher:
    """A policy whose plan is these exits, for good."""
    costs = SegmentCosts(len(ENDS), NUM_SEQUENCES)
    for count in costs.knots:
        for segment in range(len(ENDS)):
            costs.set(segment, count, 1e-2)
            costs.set(segment, count, 1e-6, head=True)
    rebatcher = DrexRebatcher(
        costs, counters=ExitCounters(), survey_every=survey_every, overhead_s=0.0
    )
    rebatcher.plan = RebatchPlan(exits, (1,) * len(exits))
    rebatcher._times_seen = [9] * (len(ENDS) - 1)
    rebatcher._look = lambda *_, **__: None  # type: ignore[method-assign]
    rebatcher._choose_probe = lambda: None  # type: ignore[method-assign]
    return rebatcher


def could_leave(state: SequenceState, index: int) -> int:
    """Layers after which a token of a sequence could first have left."""
    known = state.prompt_ids + state.output_ids[:index]
    passing = (k for k in ENDS[:-1] if confidence_at(known, k) >= THRESHOLD)
    return next(passing, ENDS[-1])


def test_exits_outside_the_plan_are_surveyed_and_not_used() -> None:
    rebatcher = drex()
    states, outputs = run(rebatcher)
    by_name = {s.sequence_id: s for s in states}
    surveyed = [o for o in outputs if o.sure_layers is not None]
    for output in surveyed:
        assert output.sure_layers == [could_leave(by_name[output.sequence_id], output.first_index)]
    assert {k for o in surveyed for k in o.sure_layers or ()} == set(ENDS)
    assert rebatcher._counters.surveys == NUM_TOKENS // EVERY - (NUM_TOKENS % EVERY == 0)
    assert len(surveyed) == NUM_SEQUENCES * rebatcher._counters.surveys
    assert rebatcher._counters.tokens == {8: NUM_SEQUENCES * (NUM_TOKENS - 1)}
    plain, _ = run(drex(survey_every=0))
    assert [s.output_ids for s in states] == [s.output_ids for s in plain]


def test_tokens_that_leave_at_the_plans_exits_are_surveyed_as_well() -> None:
    states, outputs = run(drex(1))
    by_name = {s.sequence_id: s for s in states}
    surveyed = [o for o in outputs if o.sure_layers is not None]
    assert surveyed
    for output in surveyed:
        assert output.sure_layers == [could_leave(by_name[output.sequence_id], output.first_index)]
    left = {layers for s in states for layers in s.exit_layers[1:]}
    assert left == {5, 8}, "nobody leaves at the exit that the plan leaves out"


def test_surveys_keep_to_their_share_of_the_time() -> None:
    """Heads that take as long as segments: fewer surveys, by the forecast of what they cost."""
    rebatcher = drex()
    for count in rebatcher.costs.knots:
        for segment in range(len(ENDS) - 1):
            rebatcher.costs.set(segment, count, 5e-2, head=True)
    run(rebatcher)
    spent_s, busy_s = rebatcher._surveyed_s, rebatcher._busy_s
    assert 8 <= rebatcher._counters.surveys < NUM_TOKENS // EVERY - 1
    early_s = 8 * 0.1
    assert spent_s <= SURVEY_SHARE * busy_s + 1.5 * early_s


def test_deterministic_replicas_survey_every_token() -> None:
    counters = ExitCounters()
    costs = SegmentCosts(len(ENDS), NUM_SEQUENCES)
    states, outputs = run(
        DrexRebatcher(costs, counters=counters, deterministic=True, survey_every=EVERY)
    )
    told = [k for o in outputs for k in o.sure_layers or ()]
    assert sorted(told) == sorted(k for s in states for k in s.exit_layers[1:])
    _, outputs = run(DrexRebatcher(costs, counters=ExitCounters(), deterministic=True))
    assert all(o.sure_layers is None for o in outputs)
