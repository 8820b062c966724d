"""A sequence that was paused to host memory and came back says what it would have said."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from quadriga.checkpoint.exits import ExitCounters, ExitParams, SkippedKV
from quadriga.clock import SystemClock
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SequenceState
from quadriga.engine import model_runner, prompt_scores
from quadriga.engine.early_exit.exit_logits import ExitLogits
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.sampler import RowSampler
from quadriga.errors import DeviceMemoryExhausted
from quadriga.interfaces import PrefillChunk
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.scheduling import preemption
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.slots import SlotTable
from tests.equivalence.models import begin, build, make_spec, make_state, save, start_row
from tests.equivalence.paged import PAGE_TOKENS, assert_no_page_is_held, load_on_pages
from tests.equivalence.test_lossless import make_loop as colocated

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
            loop.preemption.pause(loop.running[step % len(loop.running)].sequence_id)
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


def lacking(work: Callable[..., Any], lacks: Callable[..., bool]) -> Callable[..., Any]:
    """`work` that fails for want of memory when `lacks` says so: behind it, then before it, ..."""
    failures = itertools.count()

    def run(*args: Any) -> Any:
        fails = lacks(*args)
        found = work(*args) if not fails or next(failures) % 2 == 0 else None
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return found

    return run


def fail_every(every: int, loop: DecodeLoop, is_lone: bool = False) -> list[str]:
    """Have every so many calls of a loop's decoder lack memory; returns which do.

    Only while the loop steps, as prompts are computed by another replica, and has several: it
    cannot help one alone.
    """
    calls, failed, is_stepping, step = itertools.count(1), list[str](), [False], loop.step
    decoder: Any = loop._runner._decoder  # type: ignore[attr-defined]

    def lacks(name: str, *_: Any) -> bool:
        fails = is_stepping[0] and next(calls) % every == 0
        failed.extend([name] * fails)
        return fails and bool(next(calls))  # what is run again does not fail at once

    def watched() -> Any:
        is_stepping[0] = is_lone or loop.batch.num_decoding > 1
        try:
            return step()
        finally:
            is_stepping[0] = False

    for name in ("run_layers", "candidates", "best"):
        setattr(decoder, name, lacking(getattr(decoder, name), partial(lacks, name)))
    loop.step = watched  # type: ignore[method-assign]
    return failed


@pytest.mark.parametrize("every", [7, 10])
@pytest.mark.parametrize("newest", [0, 2])
@pytest.mark.parametrize("mode", ["project", "copy", "replay"])
def test_a_pass_that_lacks_memory_pauses_sequences_and_is_run_again(
    checkpoint: Path, mode: SkippedKV, newest: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if newest and mode != "project":
        pytest.skip("only maps have newest positions to replay")
    monkeypatch.setattr(preemption, "REST_S", 0.0)
    spec = make_spec(checkpoint, skipped_kv=mode, replay_newest=newest)
    spec = replace(spec, exits=spec.checkpoint.exits)
    undisturbed, disturbed = states(), states()
    run(make_loop(spec, 8 * spec.row_capacity_tokens), undisturbed)
    loop = make_loop(spec, 8 * spec.row_capacity_tokens)
    failed = fail_every(every, loop)
    run(loop, disturbed)
    assert len(failed) > 10 and loop.preemption.num_pauses > 5
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert one.output_ids == other.output_ids
        assert one.exit_layers == other.exit_layers


def test_prompts_and_emissions_that_lack_memory_are_run_in_smaller_parts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is enough for eight tokens a pass, not for each head, and for one row's sampling."""
    spec = make_spec(checkpoint)
    spec = replace(spec, exits=spec.checkpoint.exits)
    kinds: list[dict[str, Any]] = [{"temperature": 1.0}, {"num_prompt_logprobs": 1}, {}]
    kinds.append({"max_tokens": 0, "pooling": "mean"})
    found, calls, seen = [], itertools.count(1), set[str]()

    def is_third(*_: Any) -> bool:
        return next(calls) % 3 == 0

    def is_first_of(_: torch.Tensor, rows: Sequence[RowSampler], depth: int) -> bool:
        state = rows[0].state
        is_seen = bool(state.output_ids) or state.sequence_id in seen
        seen.add(state.sequence_id)
        return not is_seen

    for is_limited in (False, True):
        loop = colocated(NativeRunner.load(spec), None)
        if is_limited:
            decoder: Any = loop.decode._runner._decoder  # type: ignore[attr-defined]
            decoder.run_layers = lacking(decoder.run_layers, lambda x, *_: len(x) > 8)
            score = lacking(prompt_scores.token_logprobs, is_third)
            monkeypatch.setattr(prompt_scores, "token_logprobs", score)
            monkeypatch.setattr(model_runner, "sample", lacking(model_runner.sample, is_first_of))
            sample = lacking(ExitLogits.sample, lambda _, places: len(places) > 1)
            monkeypatch.setattr(ExitLogits, "sample", sample)
        made = [
            replace(s, sampling=replace(s.sampling, **kinds[i % 4])) for i, s in enumerate(states())
        ]
        outputs = [o for some in loop.run(made) for o in some]
        embeddings = [list(o.embedding) for o in outputs if o.embedding]
        scores = [[s.token_id for s in o.prompt_logprobs] for o in outputs if o.prompt_logprobs]
        found.append(([s.output_ids for s in made], sorted(embeddings), sorted(scores)))
    (tokens, embeddings, scores), (tokens_, embeddings_, scores_) = found
    assert tokens == tokens_ and scores == scores_
    assert np.allclose(embeddings, embeddings_, atol=1e-5)


def test_a_pass_of_one_sequence_that_lacks_memory_says_what_to_lower(checkpoint: Path) -> None:
    loop = make_loop(make_spec(checkpoint), 8 * 96)
    fail_every(1, loop, is_lone=True)
    with pytest.raises(DeviceMemoryExhausted, match=r"1 GiB; lower decode\.max_slots"):
        run(loop, states()[:1])


def test_a_pass_that_is_interrupted_has_filled_nothing_in(checkpoint: Path) -> None:
    spec = make_spec(checkpoint)
    runner = NativeRunner.load(replace(spec, exits=spec.checkpoint.exits))
    state = states()[0]
    start_row(runner, 0, state)
    for _ in range(3):
        runner.advance([0], 0, 1)
        state.output_ids.append(runner.emit([0])[0].token_id)
    runner.advance([0], 0, 1)
    assert runner.skipped is not None
    before = runner.skipped.computed(0, 96).tolist()
    interrupted = patch.object(runner.model.decoder, "run_layers", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        runner.advance([0], 1, 3)
    assert runner.skipped.computed(0, 96).tolist() == before
    runner.advance([0], 1, 3)
    assert runner.skipped.computed(0, 96).tolist() != before


@pytest.mark.parametrize("has_exits", [False, True])
def test_a_pass_that_lacks_memory_leaves_no_kv_to_send(checkpoint: Path, has_exits: bool) -> None:
    """What was sent of a sequence that moves is not sent again when the pass has succeeded."""
    spec = make_spec(checkpoint)
    runner = NativeRunner.load(replace(spec, exits=spec.checkpoint.exits) if has_exits else spec)
    start_row(runner, 0, states()[0])
    before = runner.extents(0)
    run_it = partial(runner.advance, [0], 0, 1) if has_exits else partial(runner.decode, [0])
    lacks = torch.OutOfMemoryError("CUDA out of memory")
    for name in ("run_layers", "candidates" if has_exits else "best"):
        scarce = patch.object(runner.model.decoder, name, side_effect=lacks)
        with scarce, pytest.raises(DeviceMemoryExhausted):
            run_it()
        assert runner.extents(0) == before


def test_a_prompt_whose_pass_lacked_memory_begins_with_what_came_meanwhile(
    checkpoint: Path,
) -> None:
    runner = load_on_pages(make_spec(checkpoint))
    prompt = [3 + 7 * k % 120 for k in range(40)]
    runner.attach(0, make_state(prompt))
    runner.attach(1, make_state(prompt))
    lacks = lacking(runner.model.decoder.run_layers, lambda _, __, first, ___: first == 1)
    scarce = patch.object(runner.model.decoder, "run_layers", lacks)
    with scarce, pytest.raises(DeviceMemoryExhausted):
        runner.prefill([PrefillChunk(1, prompt, 0, True)])
    [wanted] = runner.prefill([PrefillChunk(0, prompt, 0, True)])
    blocks = [runner.keep(0, start) for start in (0, PAGE_TOKENS)]
    for index, kept in enumerate(blocks):
        runner.share(1, index * PAGE_TOKENS, kept)
    rest = prompt[2 * PAGE_TOKENS :]
    [token] = runner.prefill([PrefillChunk(1, rest, 2 * PAGE_TOKENS, True)])
    assert token == wanted
    for row, kept in enumerate(blocks):
        runner.detach(row)
        runner.forget(kept)
    assert_no_page_is_held(runner)


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
