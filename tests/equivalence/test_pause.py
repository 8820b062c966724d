"""A sequence that was paused to host memory and came back says what it would have said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.checkpoint.exits import ExitCounters, ExitParams, SkippedKV
from quadriga.clock import SystemClock
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import DeviceMemoryExhausted
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.slots import SlotTable
from tests.equivalence.models import begin, build, make_spec, make_state, save

NUM_SEQUENCES = 6
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(build("llama"), tmp_path_factory.mktemp("llama"))
    (path / "exits.json").write_text(
        '{"kind": "shared", "layers": [1, 2], "criterion": "margin", "threshold": 0.2}'
    )
    return path


def states() -> list[SequenceState]:
    made = []
    for i in range(NUM_SEQUENCES):
        state = make_state([3 + 7 * i + k for k in range(4 + 3 * i)], max_tokens=MAX_TOKENS)
        made.append(
            replace(
                state,
                sequence_id=f"s{i}",
                arrival_unix_s=float(i),
                priority=i % 2,
                exits=ExitParams(threshold=0.2),
            )
        )
    return made


def make_loop(spec: EngineSpec, kv_capacity_tokens: int) -> DecodeLoop:
    runner = NativeRunner.load(spec)
    counters = ExitCounters()
    costs = SegmentCosts(len(runner.segment_ends), spec.num_rows)
    return DecodeLoop(
        runner=runner,
        slots=SlotTable(
            num_rows=spec.num_rows,
            row_capacity_tokens=spec.row_capacity_tokens,
            kv_capacity_tokens=kv_capacity_tokens,
            reservation="used",
        ),
        eos_token_ids=(),
        clock=SystemClock(),
        rebatcher=DrexRebatcher(costs, counters=counters, deterministic=True),
        counters=counters,
        criterion="margin",
    )


def run(loop: DecodeLoop, sequences: list[SequenceState], pause_every: int = 0) -> None:
    runner = loop._runner
    for state in sequences:
        begin(loop, state, runner)
    for step in range(4000):
        if not loop.has_work:
            return
        loop.step()
        loop.check()
        if pause_every and step % pause_every == 0 and loop.running:
            loop.pause(loop.running[step % len(loop.running)].sequence_id)
            loop.check()
    raise AssertionError("the sequences did not end")


@pytest.mark.parametrize("mode", ["project", "alias", "copy", "replay"])
@pytest.mark.parametrize("compiled", ["off", "wait"])
def test_paused_under_memory_pressure(checkpoint: Path, mode: SkippedKV, compiled: str) -> None:
    spec = make_spec(checkpoint, compile=compiled, skipped_kv=mode)
    spec = replace(spec, exits=spec.checkpoint.exits)
    plenty, scarce = states(), states()
    run(make_loop(spec, 8 * spec.row_capacity_tokens), plenty)
    loop = make_loop(spec, 3 * spec.row_capacity_tokens)
    run(loop, scarce)
    assert loop.preemption.num_pauses > 0
    assert len({k for s in plenty for k in s.exit_layers}) > 1, "tokens leave at several exits"
    for undisturbed, paused in zip(plenty, scarce, strict=True):
        assert len(paused.output_ids) == MAX_TOKENS
        assert paused.output_ids == undisturbed.output_ids
        assert paused.exit_layers == undisturbed.exit_layers
    assert loop.slots.reserved_tokens == 0
    assert loop.slots.num_held == 0


def test_paused_at_any_moment(checkpoint: Path) -> None:
    """Also while a token waits at an exit, between two of its segments."""
    spec = make_spec(checkpoint, compile="wait")
    spec = replace(spec, exits=spec.checkpoint.exits)
    undisturbed, paused = states(), states()
    run(make_loop(spec, 8 * spec.row_capacity_tokens), undisturbed)
    loop = make_loop(spec, 8 * spec.row_capacity_tokens)
    run(loop, paused, pause_every=3)
    assert loop.preemption.num_pauses > 30
    for one, other in zip(undisturbed, paused, strict=True):
        assert one.output_ids == other.output_ids
        assert one.exit_layers == other.exit_layers


class Faulty:
    """A decoder whose every so many calls lack memory: before a pass, behind it, and in a head.

    Only while the loop steps, as prompts are computed by another replica, and has several: it
    cannot help one alone.
    """

    def __init__(self, loop: DecodeLoop, every: int, is_lone: bool = False) -> None:
        self._every, self._calls, self._is_stepping, self.failures = every, 0, False, 0
        self._is_lone = is_lone
        runner = loop._runner
        assert isinstance(runner, NativeRunner)
        decoder: Any = runner._decoder
        for name in ("run_layers", "candidates", "best"):
            setattr(decoder, name, self._failing(getattr(decoder, name)))
        self._step, self._batch = loop.step, loop.batch
        loop.step = self.step  # type: ignore[method-assign]

    def step(self) -> Any:
        self._is_stepping = self._is_lone or self._batch.num_decoding > 1
        try:
            return self._step()
        finally:
            self._is_stepping = False

    def _failing(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._calls += self._is_stepping
            fails = self._is_stepping and self._calls % self._every == 0
            if fails and self.failures % 2 == 0:
                work(*args)
            if fails:
                self._calls += 1
                self.failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            return work(*args)

        return run


@pytest.mark.parametrize("every", [7, 10])
@pytest.mark.parametrize("newest", [0, 2])
@pytest.mark.parametrize("mode", ["project", "copy", "replay"])
def test_a_pass_that_lacks_memory_pauses_a_sequence_and_is_run_again(
    checkpoint: Path, mode: SkippedKV, newest: int, every: int
) -> None:
    if newest and mode != "project":
        pytest.skip("only maps have newest positions to replay")
    spec = make_spec(checkpoint, skipped_kv=mode, replay_newest=newest)
    spec = replace(spec, exits=spec.checkpoint.exits)
    undisturbed, disturbed = states(), states()
    run(make_loop(spec, 8 * spec.row_capacity_tokens), undisturbed)
    loop = make_loop(spec, 8 * spec.row_capacity_tokens)
    faulty = Faulty(loop, every)
    run(loop, disturbed)
    assert faulty.failures > 10 and loop.preemption.num_pauses > 5
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert one.output_ids == other.output_ids
        assert one.exit_layers == other.exit_layers


def test_a_pass_of_one_sequence_that_lacks_memory_says_what_to_lower(checkpoint: Path) -> None:
    loop = make_loop(make_spec(checkpoint), 8 * 96)
    Faulty(loop, 1, is_lone=True)
    with pytest.raises(DeviceMemoryExhausted, match=r"1 GiB; lower decode\.max_slots"):
        run(loop, states()[:1])


def test_the_important_keep_running(checkpoint: Path) -> None:
    spec = make_spec(checkpoint)
    spec = replace(spec, exits=spec.checkpoint.exits)
    loop = make_loop(spec, 3 * spec.row_capacity_tokens)
    sequences = states()
    ended: list[int] = []
    original = loop.leave

    def note(sequence_id: str) -> SequenceState | None:
        ended.append(int(sequence_id[1:]))
        return original(sequence_id)

    loop.leave = note  # type: ignore[method-assign]
    run(loop, sequences)
    important, others = [0, 2, 4], [1, 3, 5]
    assert max(ended.index(i) for i in important) < max(ended.index(i) for i in others)
    assert set(ended) == set(important + others)
