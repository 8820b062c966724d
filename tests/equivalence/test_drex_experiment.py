"""The experiment's own loop: judging changes no token, and no exits are the full model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadgen.load.task_suite import TaskSuite
from loadgen.paper.drex.bench import DeviceModel
from loadgen.paper.drex.closed_loop import ClosedLoopRun, run_closed_loop
from loadgen.paper.drex.judged import Decisions, JudgedRebatcher
from loadgen.paper.native import load_native
from quadriga.checkpoint.exits import NEVER, ExitCounters, ExitParams
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import ManualClock, SystemClock
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.policies.rebatching import Rebatcher
from quadriga.scheduling.calibration import calibrate
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.paced_runner import PacedRunner

SLOTS = 4
DEVICE = DeviceModel("test", 1e-3, 1e-3, 0.1e-3, 0.0, "")
Make = Callable[[SegmentCosts, ExitCounters], Rebatcher]


@pytest.fixture(scope="module")
def native() -> NativeRunner:
    checkpoint = read_checkpoint("quadriga-s")
    return load_native(checkpoint, num_rows=SLOTS, threads=1, skipped_kv="linear")


@pytest.fixture(scope="module")
def suite(native: NativeRunner) -> TaskSuite:
    return TaskSuite.make(native.spec.checkpoint, 12, seed=9)


def run(
    native: NativeRunner,
    suite: TaskSuite,
    make: Make,
    threshold: float,
    on_loop: Callable[[DecodeLoop], None] | None = None,
) -> ClosedLoopRun:
    clock = ManualClock()
    runner = PacedRunner(native, DEVICE, now_s=clock.now_s, sleep=clock.advance)
    costs = calibrate(runner, clock, max_rows=SLOTS)
    return run_closed_loop(
        suite.prompts,
        runner=runner,
        native=native,
        clock=clock,
        make_rebatcher=lambda counters: make(costs, counters),
        slots=SLOTS,
        exits=ExitParams(threshold),
        max_tokens=60,
        on_loop=on_loop,
    )


def test_judging_both_branches_leaves_no_trace(native: NativeRunner, suite: TaskSuite) -> None:
    plain = run(native, suite, lambda c, k: DrexRebatcher(c, counters=k), 0.9)
    decisions, loops = Decisions(), list[DecodeLoop]()

    def judged(costs: SegmentCosts, counters: ExitCounters) -> Rebatcher:
        return JudgedRebatcher(
            costs,
            counters=counters,
            decisions=decisions,
            native=native,
            clock=SystemClock(),
            waiting_rows=lambda at: [s.row for s in loops[0].batch.groups()[at + 1]],
        )

    watched = run(native, suite, judged, 0.9, loops.append)
    assert decisions.count > 20
    assert watched.outputs == plain.outputs
    assert watched.exit_layers == plain.exit_layers
    assert watched.seconds == pytest.approx(plain.seconds)
    assert len({depth for depths in plain.exit_layers.values() for depth in depths}) > 1


def test_a_threshold_of_one_is_the_full_model(native: NativeRunner, suite: TaskSuite) -> None:
    full = run(native, suite, lambda c, k: make_rebatcher("off", c, k), NEVER)
    never = run(native, suite, lambda c, k: DrexRebatcher(c, counters=k), NEVER)
    assert never.outputs == full.outputs
    assert full.early_share(native.num_layers) == never.early_share(native.num_layers) == 0.0


def test_the_clock_runs_while_all_slots_are_taken(native: NativeRunner, suite: TaskSuite) -> None:
    outcome = run(native, suite, lambda c, k: make_rebatcher("off", c, k), NEVER)
    pass_s = DEVICE.pass_s(1.0, SLOTS)
    assert outcome.seconds == pytest.approx(outcome.steps * pass_s)
    assert outcome.tokens == outcome.steps * SLOTS == len(outcome.gaps_s)
    assert sum(map(len, outcome.outputs.values())) > outcome.tokens + len(suite.prompts)


def test_too_few_prompts_are_refused(native: NativeRunner, suite: TaskSuite) -> None:
    with pytest.raises(ConfigError, match="12 are too few for 12 slots; take 36 or more"):
        run_closed_loop(
            suite.prompts,
            runner=native,
            native=native,
            clock=SystemClock(),
            make_rebatcher=lambda _: None,
            slots=12,
            exits=ExitParams(),
            max_tokens=8,
        )
