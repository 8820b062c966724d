"""Prompts that begin alike: the same answers, and no block is lost or kept for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import ManualClock
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import KVCacheExhausted
from quadriga.scheduling.colocated import ColocatedLoop
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.prefixes.cache import PrefixCache
from quadriga.scheduling.sequence import append_token
from quadriga.scheduling.slots import SlotTable
from quadriga.scheduling.transfer.handoff import LeaseTable
from tests.crowded_replica import output_of
from tests.equivalence.models import GATED, make_spec, make_state, randomise, save, whole_prompt
from tests.equivalence.moving import move
from tests.equivalence.paged import assert_no_page_is_held, cache_of, load_on_pages
from tests.simulation.stand_ins import EngineRunner

LENGTH, ROWS, CHUNK = 512, 4, 100
KINDS = ("rows", "compiled rows", "pages")
ANSWER = SamplingParams(6, temperature=0.8, seed=3, num_logprobs=0)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    torch.manual_seed(1)
    config = LlamaConfig(**(GATED | {"max_position_embeddings": LENGTH}))
    model = LlamaForCausalLM(config)
    with TemporaryDirectory() as name:
        yield save(randomise(model), Path(name))


@cache
def load(kind: str, folder: Path) -> NativeRunner:
    spec = make_spec(folder, num_rows=ROWS, kv_capacity_tokens=ROWS * LENGTH)
    if kind == "pages":
        return load_on_pages(spec, page_tokens=16)
    return NativeRunner.load(replace(spec, compile="off" if kind == "rows" else "wait"))


def prompts_of(tree: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """Each prompt goes on from a part of an earlier one: (which one, how much of it, how many)."""
    rng = random.Random(7)
    prompts: list[list[int]] = [[]]
    for which, length, added in tree:
        begin = prompts[which % len(prompts)][:length]
        prompts.append(begin + [rng.randrange(3, 130) for _ in range(added)])
    return prompts[1:]


@dataclass(frozen=True)
class Said:
    """An answer, with the log-probability of each token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def answers(loop: ColocatedLoop, states: Sequence[SequenceState]) -> dict[str, Said]:
    said: dict[str, Said] = {}
    for outputs in loop.run(states):
        for output in outputs:
            assert output.error is None
            before = said.get(output.sequence_id, Said((), ()))
            said[output.sequence_id] = Said(
                (*before.tokens, *output.token_ids),
                (*before.logprobs, *(p.logprob or 0.0 for p in output.logprobs or ())),
            )
            loop.check()
    return said


def loop_over(runner: NativeRunner, capacity: int, *, caching: bool) -> ColocatedLoop:
    return ColocatedLoop(
        runner,
        runner.spec,
        clock=ManualClock(),
        chunk_tokens=CHUNK,
        kv_capacity_tokens=capacity,
        reservation="used",
        prefix_caching=caching,
    )


def follow(cache: PrefixCache, after: int, held: set[str]) -> int:
    """Apply what changed to what a reader knows; returns what to ask with next."""
    answer = cache.events(after)
    for event in answer["events"]:
        if event["type"] == "AllBlocksCleared":
            held.clear()
        elif event["type"] == "BlockRemoved":
            held.difference_update(event["block_hashes"])
        else:
            assert event["parent_block_hash"] in (None, *held)
            held.update(event["block_hashes"])
    return int(answer["seq"])


TREES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 330), st.integers(1, 150)), min_size=1, max_size=9
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(
    tree=TREES,
    capacity=st.integers(520, ROWS * LENGTH),
    at_once=st.integers(1, 9),
    num_salts=st.integers(1, 2),
)
def test_answers_are_those_of_whole_prompts(
    kind: str,
    folder: Path,
    tree: list[tuple[int, int, int]],
    capacity: int,
    at_once: int,
    num_salts: int,
) -> None:
    """Random trees of prompts, several at a time, in memory that holds all blocks or few."""
    runner = load(kind, folder)
    states = [
        replace(
            make_state(prompt[: LENGTH - ANSWER.max_tokens]),
            sequence_id=str(i),
            sampling=ANSWER,
            cache_salt=str(i % num_salts),
        )
        for i, prompt in enumerate(prompts_of(tree))
    ]
    again = [replace(s, output_ids=[], exit_layers=[]) for s in states]
    wanted = answers(loop_over(runner, ROWS * LENGTH, caching=False), again)
    loop = loop_over(runner, capacity, caching=True)
    cache, after, held, found = loop.prefill.prefixes, 0, set[str](), dict[str, Said]()
    assert cache is not None
    for first in range(0, len(states), at_once):
        found |= answers(loop, states[first : first + at_once])
        after = follow(cache, after, held)
        assert held == {key.hex() for key in cache._blocks}
    assert {n: s.tokens for n, s in found.items()} == {n: s.tokens for n, s in wanted.items()}
    if kind == "compiled rows":  # torch's own products differ in their last bits with the batch
        assert found == wanted
    for name, one in wanted.items():
        assert found[name].logprobs == pytest.approx(one.logprobs, abs=1e-3)
    assert not loop.decode.slots.num_held
    assert cache.held_tokens <= capacity
    if kind == "pages":
        cache_of(runner).pages.check()
    cache.clear()
    follow(cache, after, held)
    assert cache.held_tokens == 0 and not held
    if kind == "pages":
        assert_no_page_is_held(runner)


TURNS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 70), st.integers(1, 120)), min_size=2, max_size=8
)
"""Each goes on from what an earlier one ended with: (which, tokens asked, tokens answered)."""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(turns=TURNS, capacity=st.integers(520, ROWS * LENGTH))
def test_turns_go_on_from_answers_as_if_all_was_computed(
    kind: str, folder: Path, turns: list[tuple[int, int, int]], capacity: int
) -> None:
    runner = load(kind, folder)
    plain = loop_over(runner, ROWS * LENGTH, caching=False)
    loop = loop_over(runner, capacity, caching=True)
    cache = loop.prefill.prefixes
    assert cache is not None
    rng, talks = random.Random(11), [list[int]()]
    for i, (which, asked, answered) in enumerate(turns):
        before = talks[which % len(talks)][: LENGTH - asked - answered]
        prompt = before + [rng.randrange(3, 130) for _ in range(asked)]
        state = replace(
            make_state(prompt), sequence_id=str(i), sampling=replace(ANSWER, max_tokens=answered)
        )
        wanted = answers(plain, [_fresh(state)])[str(i)]
        hits = cache.totals.hits
        said = answers(loop, [state])[str(i)]
        assert said.tokens == wanted.tokens
        if kind == "compiled rows":
            assert said == wanted
        assert said.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
        if capacity == ROWS * LENGTH:
            size = cache.block_tokens
            there = max(0, len(before) - 1) // size * size  # its last token was never computed
            assert cache.totals.hits - hits >= min(there, (len(prompt) - 1) // size * size)
        talks.append(prompt + list(said.tokens))
    if kind == "pages":
        cache_of(runner).pages.check()
    cache.clear()
    if kind == "pages":
        assert_no_page_is_held(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_prompts_that_come_together_are_computed_once(kind: str, folder: Path) -> None:
    runner = load(kind, folder)
    prompt = prompts_of([(0, 0, 300)])[0]
    loop = loop_over(runner, ROWS * LENGTH, caching=True)
    assert loop.prefill.prefixes is not None
    size = loop.prefill.prefixes.block_tokens
    states = [
        replace(make_state(prompt), sequence_id=str(i), choice=i, sampling=ANSWER) for i in range(4)
    ]
    said = answers(loop, states)
    assert len(set(said.values())) > 1, "choices differ"
    assert loop.prefill.meter.totals.tokens == 300 + 3 * (300 % size)
    totals = loop.prefill.prefixes.totals
    assert (totals.queries, totals.hits) == (4 * 300, 3 * (300 - 300 % size))
    loop.prefill.prefixes.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_replica_is_sent_what_it_lacks_of_a_conversation(kind: str, folder: Path) -> None:
    """What it kept of the turn before, answer included, is as if it came with the hand-off."""
    runner = load(kind, folder)
    slots = SlotTable(num_rows=2, row_capacity_tokens=LENGTH, kv_capacity_tokens=2 * LENGTH)
    prefixes = PrefixCache(runner, slots, "m")
    decode = DecodeLoop(
        runner=runner, slots=slots, eos_token_ids=(), clock=ManualClock(), prefixes=prefixes
    )
    plain = loop_over(runner, ROWS * LENGTH, caching=False)
    rng, tokens, sent = random.Random(5), list[int](), list[int]()
    for turn in range(4):
        tokens = tokens + [rng.randrange(3, 130) for _ in range(30)]
        state = replace(
            make_state(tokens), sequence_id=str(turn), sampling=replace(ANSWER, max_tokens=60)
        )
        wanted = answers(plain, [_fresh(state)])[str(turn)]
        # As a prefill replica, in a row that no slot is for.
        runner.attach(ROWS - 1, state)
        first = runner.prefill([whole_prompt(ROWS - 1, state)])[0]
        assert first is not None
        keys = prefixes.keys(state)
        slot = decode.reserve(str(turn), state.max_total_tokens, len(tokens), block_keys=keys)
        held = decode.fill(str(turn), slot.row, keys)
        kv = runner.read_kv(ROWS - 1, 0, runner.num_layers, held, len(tokens))
        runner.detach(ROWS - 1)
        if held < len(tokens):
            runner.write_kv(slot.row, 0, held, kv)
        sent.append(len(tokens) - held)
        append_token(state, first)
        decode.join(state)
        while decode.has_work:
            decode.step()
        assert tuple(state.output_ids) == wanted.tokens
        logprobs = [p.logprob for p in state.logprobs]
        assert logprobs == pytest.approx(wanted.logprobs[1:], abs=1e-3)
        if kind == "compiled rows":
            assert tuple(logprobs) == wanted.logprobs[1:]
        tokens = tokens + state.output_ids
    size = prefixes.block_tokens
    lengths = [30 + 90 * turn for turn in range(4)]
    assert sent == [30, *(n - (n - 31) // size * size for n in lengths[1:])]
    prefixes.clear()
    if kind == "pages":
        assert_no_page_is_held(runner)


class Place:
    """A mixed replica without its process: loops over a runner whose KV tells its tokens."""

    def __init__(self, capacity: int) -> None:
        checkpoint = read_checkpoint("quadriga-s")
        spec = make_spec(checkpoint.path, num_rows=4, row_capacity_tokens=256)
        self.runner: Any = EngineRunner(spec)
        self.loops = ColocatedLoop(
            self.runner,
            spec,
            clock=ManualClock(),
            chunk_tokens=32,
            kv_capacity_tokens=capacity,
            reservation="used",
            prefix_caching=True,
        )
        self.loop = self.loops.decode
        self.table = LeaseTable(spec.depth_class, max_live=99)

    @property
    def states(self) -> list[SequenceState]:
        return self.loops.prefill.states + self.loop.running

    def end(self) -> None:
        """Verify that blocks are all that it still holds, and that they can go."""
        cache = self.loops.prefill.prefixes
        assert cache is not None and not self.loop.slots.num_held
        assert cache.held_tokens == self.runner.num_kept * self.runner.share_tokens
        cache.clear()
        assert self.runner.num_kept == 0


FAULTS = st.lists(
    st.tuples(st.sampled_from(["pause", "move", "rebuild", "die", "step", "step"]), st.integers(0)),
    max_size=40,
)


@settings(max_examples=40)
@given(tree=TREES, faults=FAULTS, capacity=st.integers(320, 1024))
def test_answers_outlive_moves_pauses_rebuilds_and_deaths(
    tree: list[tuple[int, int, int]], faults: list[tuple[str, int]], capacity: int
) -> None:
    """Whatever becomes of those that share, everyone gets the tokens that follow from its own."""
    places = [Place(capacity), Place(capacity)]
    waiting, said = [], dict[str, list[int]]()
    for i, prompt in enumerate(prompts_of(tree)):
        params = SamplingParams(1 + 7 * i, temperature=0.0, ignore_eos=True)
        state = replace(make_state(prompt[:180]), sequence_id=str(i), sampling=params)
        waiting.append(state)
        said[str(i)] = []
    wanted = {s.sequence_id: output_of(s.prompt_ids, s.sampling.max_tokens) for s in waiting}
    for i, state in enumerate(waiting):
        places[i % 2].loops.submit(state)
    ended = set[str]()
    orders = iter(faults)
    for _ in range(5000):
        kind, pick = next(orders, ("step", 0))
        place, other = places[pick % 2], places[1 - pick % 2]
        states = place.states
        if kind == "die":
            places[pick % 2] = Place(capacity)
            for state in states:
                other.loops.submit(_rebuilt(state))
        elif states and kind == "rebuild":
            state = states[pick % len(states)]
            place.loops.release(state.sequence_id)
            other.loops.submit(_rebuilt(state))
        elif place.loop.running and kind in ("pause", "move"):
            running = place.loop.running
            name = running[pick % len(running)].sequence_id
            if kind == "pause":
                place.loop.preemption.pause(name)
            elif not place.loop.is_paused(name):
                with suppress(KVCacheExhausted):
                    move(place, other, name)
        for one in places:
            for output in one.loops.step() if one.loops.has_work else ():
                assert output.error is None
                tokens = said[output.sequence_id]
                assert output.first_index == len(tokens)
                tokens += output.token_ids
                if output.finish is not None:
                    ended.add(output.sequence_id)
            if kind != "step":  # room may have come; in every step, prompts alone would be tried
                one.loops.prefill.retry()
            one.loops.check()
        if len(ended) == len(wanted):
            break
    assert said == wanted
    for one in places:
        one.end()


def _fresh(state: SequenceState) -> SequenceState:
    return replace(state, output_ids=[], exit_layers=[], logprobs=[])


def _rebuilt(state: SequenceState) -> SequenceState:
    return replace(
        state,
        epoch=state.epoch + 1,
        output_ids=list(state.output_ids),
        exit_layers=list(state.exit_layers),
        logprobs=list(state.logprobs),
    )


def test_other_salts_and_scored_prompts_share_nothing(folder: Path) -> None:
    runner = load("rows", folder)
    loop = loop_over(runner, ROWS * LENGTH, caching=True)
    prompt = prompts_of([(0, 0, 200)])[0]
    scored = replace(ANSWER, num_prompt_logprobs=0)
    hits = []
    assert loop.prefill.prefixes is not None
    for i, (salt, params) in enumerate(
        [("", ANSWER), ("other", ANSWER), ("", scored), ("other", ANSWER)]
    ):
        state = replace(make_state(prompt), sequence_id=str(i), sampling=params, cache_salt=salt)
        answers(loop, [state])
        hits.append(loop.prefill.prefixes.totals.hits)
    assert hits == [0, 0, 0, 192]


def test_keys_differ_by_model_layers_and_salt() -> None:
    """KV of one must never be taken for that of another."""
    state = make_state(list(range(3, 203)))
    keys = set()
    for model, layers, salt in (
        ("m", 8, ""),
        ("n", 8, ""),
        ("m", 4, ""),
        ("m", 8, "s"),
        ("m", 8, "t"),
    ):
        runner: Any = SimpleNamespace(share_tokens=64, num_layers=layers)
        slots: Any = SimpleNamespace()
        cache = PrefixCache(runner, slots, model)
        keys.add(tuple(cache.keys(replace(state, cache_salt=salt))))
    assert len(keys) == 5 and len({key[0] for key in keys}) == 5


def test_memory_is_touched_ahead_only_where_nothing_was_promised(folder: Path) -> None:
    runner = load("rows", folder)
    loop = loop_over(runner, 600, caching=True)
    cache, slots = loop.prefill.prefixes, loop.decode.slots
    assert cache is not None
    for _ in range(20):
        cache.prepare()
    assert len(cache._blank) == 600 // 64
    held = slots.reserve("a", 300, 300)
    assert held.reserved_tokens >= 300
    assert len(cache._blank) * 64 <= 600 - held.reserved_tokens - 64
    slots.release("a")
    blank = {id(block) for block in cache._blank}
    answers(loop, [replace(make_state(prompts_of([(0, 0, 130)])[0]), sampling=ANSWER)])
    assert {id(block) for block in cache._blocks.values()} <= blank, "kept where it was touched"
    cache.clear()
    assert not cache._blank


def test_blocks_go_for_promises_the_end_of_a_prefix_first(folder: Path) -> None:
    runner = load("rows", folder)
    loop = loop_over(runner, 600, caching=True)
    cache = loop.prefill.prefixes
    assert cache is not None
    first, second = prompts_of([(0, 0, 320), (0, 0, 200)])

    def cached(prompt: list[int], name: str) -> int:
        before = cache.totals.hits
        answers(loop, [replace(make_state(prompt), sequence_id=name, sampling=ANSWER)])
        return cache.totals.hits - before

    assert cached(first, "a") == 0 and cache.held_tokens == 192, "what is promised leaves no more"
    assert cached(second, "b") == 0
    assert cached(first, "c") == 128, "its end went, and its own promise took what others had"
    assert cached(second, "d") == 0
    assert cached(first, "e") == 128
    assert cache.totals.evicted == 64 * 8
