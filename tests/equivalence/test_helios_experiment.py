"""The HELIOS experiment's replica says what the plain engine says, whatever the machine orders."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from loadgen.load.task_suite import TaskPrompt, TaskSuite
from loadgen.model_costs.engine import sequence
from loadgen.paper.clocks import ProcessorClock, TurnClock
from loadgen.paper.helios.bench import HeliosBench
from loadgen.paper.helios.record import StreamRun
from loadgen.paper.helios.replica import MAX_TOKENS, ReplicaLimits, TimedModel, weight_bytes
from loadgen.paper.helios.report import ALONE, FIXED, HeliosSetting
from loadgen.paper.helios.serve import Contestant, open_replica, serve_in_turns
from loadgen.paper.native import load_native
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.core.replica import DepthClass
from quadriga.core.request import SamplingParams
from quadriga.errors import ConfigError
from quadriga.interfaces import PrefillChunk
from quadriga.policies.drex import SegmentCosts
from tests.unit.loadgen.test_paper_helios import quick_plan

S = "quadriga-s"


def served_model(threshold: float) -> TimedModel:
    checkpoint = read_checkpoint(S)
    costs = SegmentCosts(len(checkpoint.exits.layers) + 1, 4)
    return TimedModel(checkpoint, costs, threshold)


def suite_of(count: int) -> TaskSuite:
    return TaskSuite.make(read_checkpoint(S), count, seed=5)


def plain(prompts: Sequence[TaskPrompt], depth: int, threshold: float) -> list[list[int]]:
    """The engine alone: segment after segment, each token leaves where it is sure enough."""
    checkpoint = read_checkpoint(S)
    native = load_native(checkpoint, depth=depth, num_rows=1, threads=1)
    ends = native.segment_ends
    answers = []
    for prompt in prompts:
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        state = sequence("plain", prompt.token_ids, sampling)
        native.attach(0, state)
        token = native.prefill([PrefillChunk(0, prompt.token_ids, 0, True)])[0]
        assert token is not None
        state.output_ids.append(token.token_id)
        while (
            state.output_ids[-1] not in checkpoint.eos_token_ids
            and len(state.output_ids) < MAX_TOKENS
        ):
            for segment in range(len(ends)):
                sure = native.advance([0], segment, segment + 1)[0] >= threshold
                if sure or segment == len(ends) - 1:
                    break
            state.output_ids.append(native.emit([0])[0].token_id)
        native.detach(0)
        answers.append(state.output_ids)
    return answers


def serve_alone(model: TimedModel, depth: int, room: ReplicaLimits, suite: TaskSuite) -> StreamRun:
    clock = TurnClock(ProcessorClock(time.process_time))
    replica = open_replica((model,), DepthClass(S, depth), room, clock, 1)
    service = Contestant(suite, replica, clock, clients=room.num_rows)
    serve_in_turns([service], on_done=lambda count: None)
    return service.result()


@pytest.mark.parametrize("depth", [8, 4])
def test_one_model_alone_says_what_the_plain_engine_says(depth: int) -> None:
    suite, threshold = suite_of(8), 0.9
    run = serve_alone(served_model(threshold), depth, ReplicaLimits(1), suite)
    assert [q.token_ids for q in run.requests] == plain(suite.prompts, depth, threshold)
    assert sum(run.decoded.values()) == sum(q.num_decoded for q in run.requests)
    assert {model for model, _ in run.decoded} == {S}
    assert (run.breaches > 0) is (depth == 4)
    assert run.breaches == sum(sum(q.breached) for q in run.requests)


def test_the_machine_changes_what_is_held_and_loses_nobody() -> None:
    plan = quick_plan(pair=(S, "quadriga-l"), parts=(ALONE,), requests=20)
    done: list[int] = []
    bench = HeliosBench(plan, lambda line: None, done.append)
    settings = [HeliosSetting(ALONE, name, None, 8, 2) for name in ("helios-throughput", "only-s")]
    chosen, alone = bench.run_together(settings).values()
    assert done[-1] == 40 and [q.index for q in chosen.requests] == list(range(20))
    assert chosen.switches >= 2 and chosen.profiles >= 2
    assert {c.model for c in chosen.held} == {S, "quadriga-l"}
    assert chosen.peak_running == 2
    full = DepthClass(S, 8)
    same = [q.index for q in chosen.requests if q.classes == [full]]
    assert same
    for index in same:
        assert chosen.requests[index].token_ids == alone.requests[index].token_ids


def test_memory_that_weights_leave_free_is_batch() -> None:
    checkpoint = read_checkpoint(S)
    whole = weight_bytes(load_native(checkpoint, depth=8, num_rows=1, threads=1))
    room = ReplicaLimits(16, whole + 1100 * checkpoint.kv_bytes_per_token(8, 4))
    model = TimedModel(checkpoint, SegmentCosts(3, 16), 0.9)
    suite = suite_of(16)
    peaks = {depth: serve_alone(model, depth, room, suite).peak_running for depth in (8, 4)}
    assert 4 * peaks[8] < peaks[4]
    with pytest.raises(ConfigError, match="--memory-mib"):
        serve_alone(model, 8, ReplicaLimits(16, whole), suite)


def test_the_pair_must_differ_and_have_exits() -> None:
    plan = quick_plan(pair=(S, S), parts=(FIXED,), requests=16)
    with pytest.raises(ConfigError, match="both models are called 'quadriga-s'"):
        HeliosBench(plan, lambda line: None, lambda count: None)
