"""Whether the decode loop uses an exit, and why it does not."""

from __future__ import annotations

import pytest

from quadriga.checkpoint.exits import NEVER, ExitCounters, ExitParams
from quadriga.clock import ManualClock
from quadriga.core.request import SamplingParams
from quadriga.policies.baselines.exits import EagerExits, LazyExits, MajorityExits, NoExits
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.policies.drex.plan import RebatchPlan
from quadriga.policies.rebatching import Rebatcher
from quadriga.scheduling.decode_loop import DecodeLoop
from tests.fake_runner import EOS, FakeSegmentRunner
from tests.sequences import make_decode_loop, make_sequence, make_slots

ENDS = (2, 5, 8)
COSTS = SegmentCosts(3, 4)


def make_loop(rebatcher: Rebatcher) -> DecodeLoop:
    clock = ManualClock()
    return make_decode_loop(
        FakeSegmentRunner(4, 48, ends=ENDS, clock=clock),
        make_slots(4, 48, 10**6),
        clock,
        eos_token_ids=(EOS,),
        rebatcher=rebatcher,
    )


def join(loop: DecodeLoop, name: str, threshold: float) -> None:
    state = make_sequence(
        name, [3, 1, 2], SamplingParams(max_tokens=9), exits=ExitParams(threshold, "bounded")
    )
    state.output_ids, state.exit_layers = [7], [8]
    slot = loop.reserve(name, state.max_total_tokens)
    loop._runner.write_kv(slot.row, 0, 0, state.prompt_ids)
    loop.join(state)


def drex(*exits: int) -> DrexRebatcher:
    rebatcher = DrexRebatcher(COSTS, counters=ExitCounters())
    rebatcher.plan = RebatchPlan(exits, (1,) * len(exits))
    return rebatcher


def test_what_the_plan_leaves_out_is_not_worth_it() -> None:
    loop = make_loop(drex(1))
    join(loop, "a", 0.9)
    assert loop.exit_uses((2, 5)) == {2: "not_worth_it", 5: "tested"}


def test_where_every_exit_must_be_tested_the_plan_says_nothing() -> None:
    loop = make_loop(DrexRebatcher(COSTS, counters=ExitCounters(), deterministic=True))
    join(loop, "a", 0.9)
    assert loop.exit_uses((2, 5)) == {2: "tested", 5: "tested"}


@pytest.mark.parametrize("policy", [EagerExits, LazyExits, MajorityExits])
def test_grouped_policies_test_every_exit(policy: type[EagerExits]) -> None:
    loop = make_loop(policy(COSTS))
    join(loop, "a", 0.9)
    assert set(loop.exit_uses((2, 5)).values()) == {"tested"}


def test_requests_for_the_full_model_are_the_reason_where_all_are_such() -> None:
    loop = make_loop(drex(0, 1))
    join(loop, "a", NEVER)
    assert set(loop.exit_uses((2, 5)).values()) == {"full_depth_asked"}
    join(loop, "b", 0.9)
    assert set(loop.exit_uses((2, 5)).values()) == {"tested"}


def test_what_is_not_there_is_said_whether_anything_runs_or_not() -> None:
    loop = make_loop(NoExits(COSTS))
    assert loop.exit_uses((2, 4, 8, 10)) == {2: "idle", 4: "off", 8: "not_loaded", 10: "not_loaded"}
    join(loop, "a", 0.9)
    assert loop.exit_uses((2,)) == {2: "not_worth_it"}
