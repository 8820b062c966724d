"""A sequence rebuilt from prompt, output and exit record has the KV that was lost, to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from quadriga.checkpoint.exits import ExitCounters, ExitParams, SkippedKV
from quadriga.checkpoint.folder import ASSETS
from quadriga.clock import SystemClock
from quadriga.core.request import SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import InvariantViolation
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.transfer.rebuild import (
    Replays,
    chunk_of,
    num_open,
    num_prefill_tokens,
    replays_of,
)
from quadriga.text import load_tokenizer
from tests.equivalence.models import begin, make_spec, make_state, whole_prompt
from tests.equivalence.paged import load_on_pages
from tests.sequences import make_decode_loop, make_slots

MODES: tuple[SkippedKV, ...] = ("linear", "project", "copy", "alias", "replay")
MODELS = ("quadriga-s", "quadriga-l")
CAPACITY = 160
MAX_TOKENS = 40
PROMPTS = ("Sort: 7 3 9 1 4 8 2 6\n", "Once upon a time")


@cache
def runner(
    model: str, mode: SkippedKV, compiled: str = "wait", replay_newest: int = 0
) -> NativeRunner:
    spec = make_spec(
        ASSETS / model,
        compile=compiled,
        skipped_kv=mode,
        replay_newest=replay_newest,
        num_rows=5,
        row_capacity_tokens=CAPACITY,
    )
    exits = spec.checkpoint.exits
    return NativeRunner.load(replace(spec, exits=exits, exit_plan=exits))


def states(model: str, threshold: float) -> list[SequenceState]:
    tokenizer = load_tokenizer(ASSETS / model, model)
    made = []
    for i, prompt in enumerate(PROMPTS):
        sampling = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": 11 + i}
        state = make_state(
            tokenizer.encode(prompt), max_tokens=MAX_TOKENS, ignore_eos=True, **sampling
        )
        made.append(replace(state, sequence_id=f"s{i}", exits=ExitParams(threshold=threshold)))
    return made


def make_loop(of: NativeRunner) -> DecodeLoop:
    counters = ExitCounters()
    costs = SegmentCosts(len(of.segment_ends), of.num_rows)
    return make_decode_loop(
        of,
        make_slots(of.num_rows, CAPACITY, of.num_rows * CAPACITY),
        SystemClock(),
        rebatcher=DrexRebatcher(costs, counters=counters, deterministic=True),
        counters=counters,
        criterion=of.spec.exits.criterion,
    )


def lost_at(of: NativeRunner, state: SequenceState, num_tokens: int) -> torch.Tensor:
    """Run a sequence to so many tokens; returns its KV, all that was skipped made up for."""
    loop = make_loop(of)
    row = begin(loop, state, of)
    while len(state.output_ids) < num_tokens:
        loop.step()
    kv = filled_kv(of, row, state.num_tokens - 1)
    loop.leave(state.sequence_id)
    return kv


def filled_kv(of: NativeRunner, row: int, num_tokens: int) -> torch.Tensor:
    """The row's KV once everything that was skipped is made up for."""
    assert of.skipped is not None
    at = np.array([row]), np.array([num_tokens])
    for first, stop in of.skipped.stretches(*at, 1, len(of.segment_ends)):
        went = of.skipped.enter(of._decoder, *at, first, stop)
        if went is not None:
            plan = of._decoder.plan_tokens(went.rows, went.positions)
            layers = of.segment_ends[first - 1], of.segment_ends[stop - 1]
            of.skipped.carried(went, of._decoder.run_layers(went.states, plan, *layers), stop)
    if of.skipped.mode == "alias" and of._decoder.reads_depths:
        of.skipped._unalias(row)
    return of.read_kv(row, 0, of.num_layers, 0, num_tokens)


def rebuild(
    of: NativeRunner,
    row: int,
    state: SequenceState,
    chunk_tokens: int,
    beside: int | None = None,
    replays: Replays | None = None,
) -> torch.Tensor:
    """Compute a sequence anew, chunk by chunk; with `beside`, in one pass with another's prompt."""
    total = num_prefill_tokens(state)
    of.attach(row, state)
    for first in range(0, total, chunk_tokens):
        stop = min(total, first + chunk_tokens)
        where = {"row": row, "start": first, "stop": stop, "num_layers": of.num_layers}
        chunks = [chunk_of(state, **where, replays=replays)]
        if beside is not None:
            other = make_state([5 + k for k in range(9)])
            of.attach(beside, other)
            chunks.append(whole_prompt(beside, other))
        seen: list[int] = []
        sampled = of.prefill(chunks, lambda first, count, seen=seen: seen.append(first + count))
        assert seen == list(range(1, of.num_layers + 1))
        assert sampled[0] is None, "a rebuild samples nothing"
        if beside is not None:
            of.detach(beside)
    kv = of.read_kv(row, 0, of.num_layers, 0, total)
    of.detach(row)
    return kv


def run_alone(of: NativeRunner, state: SequenceState) -> SequenceState:
    loop = make_loop(of)
    begin(loop, state, of)
    while loop.has_work:
        loop.step()
    return state


def go_on(of: NativeRunner, state: SequenceState, kv: torch.Tensor) -> SequenceState:
    """What a decode replica makes of rebuilt KV."""
    loop = make_loop(of)
    slot = loop.reserve(state.sequence_id, state.max_total_tokens)
    of.write_kv(slot.row, 0, 0, kv)
    loop.join(state)
    while loop.has_work:
        loop.step()
    return state


def taken_in(of: NativeRunner, state: SequenceState, kv: torch.Tensor) -> torch.Tensor:
    """Rebuilt KV at a decode replica, all that is owed and was skipped made up for."""
    of.write_kv(3, 0, 0, kv)
    of.attach(3, state)
    assert of.repay(3, CAPACITY) == 0
    found = filled_kv(of, 3, state.num_tokens - 1)
    of.detach(3)
    return found


def copy_of(state: SequenceState, num_tokens: int) -> SequenceState:
    """All that an ingress has of it after so many tokens."""
    return replace(
        state, output_ids=state.output_ids[:num_tokens], exit_layers=state.exit_layers[:num_tokens]
    )


@pytest.mark.parametrize(("model", "threshold"), list(zip(MODELS, (0.9, 0.98), strict=True)))
@pytest.mark.parametrize("mode", MODES)
def test_a_rebuilt_sequence_is_the_one_that_was_lost(
    model: str, mode: SkippedKV, threshold: float
) -> None:
    of = runner(model, mode)
    assert of.numerics.startswith("float32 kernels ")
    whole = [run_alone(of, s) for s in states(model, threshold)]
    assert len({k for s in whole for k in s.exit_layers[1:]}) > 1, "not all leave at one depth"
    for i, state in enumerate(whole):
        for num_tokens in (1, 13 + 5 * i, MAX_TOKENS - 1):
            was = lost_at(of, states(model, threshold)[i], num_tokens)
            lost = copy_of(state, num_tokens)
            kv = rebuild(of, 4, lost, chunk_tokens=(7, 256)[i % 2])
            assert torch.equal(kv, was), f"{num_tokens} tokens of {state.sequence_id}"
            again = go_on(of, lost, kv)
            assert again.output_ids == state.output_ids
            assert again.exit_layers == state.exit_layers


@pytest.mark.parametrize("newest", [2, 8])
@pytest.mark.parametrize("mode", ["linear", "project"])
@pytest.mark.parametrize("model", MODELS)
def test_what_was_replayed_is_replayed_again(model: str, mode: SkippedKV, newest: int) -> None:
    """The newest, which a later token takes along, too: the decode replica runs them again."""
    of = runner(model, mode, replay_newest=newest)
    replays = replays_of(of.spec)
    whole = [run_alone(of, s) for s in states(model, 0.9)]
    num_owed = 0
    for i, state in enumerate(whole):
        for num_tokens in (1, *range(9 + i, MAX_TOKENS, 3)):
            lost = copy_of(state, num_tokens)
            was = lost_at(of, states(model, 0.9)[i], num_tokens)
            kv = rebuild(of, 4, lost, chunk_tokens=(7, 256)[i % 2], replays=replays)
            here = taken_in(of, lost, kv)
            num_owed += num_open(lost, of.num_layers) > 0
            assert torch.equal(here, was), f"{num_tokens} tokens of {state.sequence_id}"
            if num_tokens > 20:
                assert not torch.equal(rebuild(of, 4, lost, 256), was), "replays make a difference"
            again = go_on(of, lost, kv)
            assert again.output_ids == state.output_ids
            assert again.exit_layers == state.exit_layers
    assert num_owed > 0


def test_beside_a_prompt_and_without_kernels() -> None:
    """A pass that rebuilds and prefills; the eager decoder rounds otherwise, so nearly."""
    lost = copy_of(run_alone(runner("quadriga-s", "linear"), states("quadriga-s", 0.9)[0]), 31)
    kv = rebuild(runner("quadriga-s", "linear"), 4, lost, 256)
    assert torch.equal(rebuild(runner("quadriga-s", "linear"), 4, lost, 11, beside=3), kv)
    for mode in MODES:
        exact = rebuild(runner("quadriga-s", mode), 4, lost, 256)
        eager = rebuild(runner("quadriga-s", mode, "off"), 4, lost, 19, beside=3)
        torch.testing.assert_close(eager, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_on_pages(mode: SkippedKV) -> None:
    """As GPUs keep KV; without the store that only decode replicas have."""
    lost = copy_of(run_alone(runner("quadriga-s", "linear"), states("quadriga-s", 0.9)[0]), 31)
    exact = rebuild(runner("quadriga-s", mode), 4, lost, 256)
    paged = load_on_pages(replace(runner("quadriga-s", mode).spec, compile="off", can_exit=False))
    assert paged.skipped is None
    torch.testing.assert_close(rebuild(paged, 4, lost, 19, beside=3), exact, rtol=1e-3, atol=1e-3)


def test_depths_that_are_no_exits_here_count_as_the_next_deeper() -> None:
    of = runner("quadriga-s", "linear")
    state = run_alone(of, states("quadriga-s", 0.9)[0])
    other = replace(state, exit_layers=[{2: 1, 4: 3}.get(k, k + 9) for k in state.exit_layers])
    assert torch.equal(rebuild(of, 4, other, 256), rebuild(of, 4, state, 256))


def test_a_record_that_does_not_cover_the_output_is_refused() -> None:
    state = replace(make_state([1, 2]), output_ids=[3, 4], exit_layers=[8])
    with pytest.raises(InvariantViolation, match="cannot be rebuilt"):
        chunk_of(state, row=0, start=0, stop=3, num_layers=8)
