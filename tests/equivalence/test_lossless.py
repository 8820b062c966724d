"""What an exit drafts and the whole model verifies is what the whole model alone would say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.checkpoint.exits import ExitCounters, ExitParams
from quadriga.clock import SystemClock
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.scheduling.colocated import ColocatedLoop
from tests.equivalence.models import build, make_spec, make_state, save
from tests.equivalence.moving import Member
from tests.equivalence.paged import assert_no_page_is_held, load_on_pages
from tests.equivalence.test_migrated import (
    GREEDY,
    SEEDED,
    Traffic,
    assert_same,
    sequences,
    undisturbed,
)
from tests.random_drafter import RandomDrafter

FAMILIES = ("llama", "mistral-window", "qwen2-some-windows", "qwen3", "opt-pre-norm")
FULL = ExitParams(1.0, "off")
LOSSLESS = ExitParams(1.0, "lossless")
BOUNDED = ExitParams(0.2, "bounded")
NUM_PROMPTS = 200


def family(variant: str, folder: Path, *, agrees: float = 0.0) -> Path:
    """A random model with an exit behind each layer.

    Args:
        agrees: Share by which the layers behind the first are damped: at 1 all exits say the same.
    """
    model = build(variant)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("layers.1." in name or "layers.2." in name) and "norm" not in name:
                parameter.mul_(1.0 - agrees)
    path = save(model, folder)
    (path / "exits.json").write_text(
        '{"kind": "shared", "layers": [1, 2], "criterion": "margin", "threshold": 0.2}'
    )
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family(request.param, tmp_path_factory.mktemp(request.param), agrees=0.6)


def spec_of(path: Path, **overrides: object) -> EngineSpec:
    spec = make_spec(path, **({"compile": "wait"} | overrides))
    return replace(spec, exits=spec.checkpoint.exits)


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    path = family("llama", tmp_path_factory.mktemp("agreeing"), agrees=0.6)
    return NativeRunner.load(spec_of(path))


@pytest.fixture(scope="module")
def stubborn(tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    """Its exits agree rarely."""
    return NativeRunner.load(spec_of(family("llama", tmp_path_factory.mktemp("stubborn"))))


def make_loop(runner: NativeRunner, seed: int | None = 0, **options: object) -> ColocatedLoop:
    counters = ExitCounters()
    costs = SegmentCosts(len(runner.segment_ends), runner.num_rows)
    loop = ColocatedLoop(
        runner,
        runner.spec,
        clock=SystemClock(),
        rebatcher=DrexRebatcher(costs, counters=counters, deterministic=True),
        counters=counters,
        **options,  # type: ignore[arg-type]
    )
    if seed is not None:
        loop.decode.batch.drafter = RandomDrafter(costs, seed)
    return loop


def sampling(i: int, random: Random) -> SamplingParams:
    """All that sampling knows, in turn."""
    base = SamplingParams(random.randint(1, 24), temperature=0.0, seed=i)
    kinds = [
        base,
        replace(base, temperature=1.0),
        replace(base, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01),
        replace(base, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
        replace(base, temperature=0.9, frequency_penalty=0.8, num_logprobs=2),
        replace(base, logit_bias=((5, 4.0), (17, -9.0)), num_logprobs=0),
        replace(base, stop_token_ids=(3, 60, 61, 62), min_tokens=min(4, base.max_tokens)),
        replace(base, temperature=0.8, stop_token_ids=tuple(range(0, 120, 9)), ignore_eos=True),
    ]
    return kinds[i % len(kinds)]


def states(
    exits: Callable[[int], ExitParams], count: int = NUM_PROMPTS, *, seed: int = 1
) -> list[SequenceState]:
    random = Random(seed)
    made = []
    for i in range(count):
        prompt = [random.randrange(130) for _ in range(random.randint(1, 40))]
        state = replace(make_state(prompt), sampling=sampling(i, random), exits=exits(i))
        made.append(replace(state, sequence_id=f"s{i}", output_ids=[], exit_layers=[]))
    return made


def run(
    loop: ColocatedLoop, made: list[SequenceState], disturb: Callable[[int], None] | None = None
) -> dict[str, list[object]]:
    """Run sequences to their ends; returns what was emitted for each."""
    said: dict[str, list[object]] = {state.sequence_id: [] for state in made}
    for state in made:
        loop.submit(state)
    step = 0
    while loop.has_work:
        for output in loop.step():
            news = said[output.sequence_id]
            assert output.first_index == sum(isinstance(n, tuple) for n in news)
            logprobs = output.logprobs or [None] * len(output.token_ids)
            news += zip(output.token_ids, logprobs, strict=True)
            if output.finish is not None:
                news.append(output.finish)
        loop.check()
        step += 1
        if disturb is not None:
            disturb(step)
    assert loop.decode.slots.num_held == 0
    return said


def tokens_of(said: dict[str, list[object]]) -> dict[str, list[object]]:
    """Token ids, and how each ended."""
    return {
        name: [n[0] if isinstance(n, tuple) else n for n in news] for name, news in said.items()
    }


def assert_logprobs_are_near(got: dict[str, list[object]], wanted: dict[str, list[object]]) -> None:
    for name, news in wanted.items():
        for mine, theirs in zip(got[name], news, strict=True):
            if isinstance(theirs, tuple) and theirs[1] is not None:
                assert isinstance(mine, tuple)
                assert mine[1].logprob == pytest.approx(theirs[1].logprob, abs=1e-4)
                assert [t for t, _ in mine[1].top] == [t for t, _ in theirs[1].top]


@cache
def full_answers(path: Path, compiled: str = "wait") -> dict[str, list[object]]:
    """What the whole model alone says, on rows."""
    runner = NativeRunner.load(spec_of(path, compile=compiled))
    return run(make_loop(runner), states(lambda i: FULL))


@pytest.mark.parametrize("compiled", ["wait", "off"])
def test_every_parameter_of_every_family(checkpoint: Path, compiled: str) -> None:
    spec = spec_of(checkpoint, compile=compiled)
    loop = make_loop(NativeRunner.load(spec))
    made = states(lambda i: LOSSLESS)
    got = run(loop, made)
    wanted = full_answers(checkpoint, compiled)
    assert tokens_of(got) == tokens_of(wanted)
    assert_logprobs_are_near(got, wanted)
    counters = loop.decode.counters
    assert 0 < counters.accepted < counters.drafted, "some drafts agree, and some do not"
    assert {k for s in made for k in s.exit_layers} == {spec.depth}


def test_on_pages(checkpoint: Path) -> None:
    spec = spec_of(checkpoint, compile="off")
    runner = load_on_pages(spec)
    loop = make_loop(runner)
    got = run(loop, states(lambda i: LOSSLESS))
    assert tokens_of(got) == tokens_of(full_answers(checkpoint, "off"))
    assert 0 < loop.decode.counters.accepted < loop.decode.counters.drafted
    assert_no_page_is_held(runner)


def mixed(i: int) -> ExitParams:
    return (LOSSLESS, BOUNDED, FULL)[i % 3]


def test_beside_others_that_leave_early(checkpoint: Path) -> None:
    loop = make_loop(NativeRunner.load(spec_of(checkpoint)))
    made = states(mixed)
    got = tokens_of(run(loop, made))
    whole = tokens_of(full_answers(checkpoint))
    runner = NativeRunner.load(spec_of(checkpoint))
    alone = tokens_of(run(make_loop(runner), states(lambda i: BOUNDED)))
    for i, name in enumerate(whole):
        assert got[name] == (alone if mixed(i) is BOUNDED else whole)[name]
    assert loop.decode.counters.accepted > 0
    assert {k for s in made for k in s.exit_layers} == {1, 2, 3}


def test_the_decisions_of_a_service(agreeing: NativeRunner) -> None:
    loop = make_loop(agreeing, None)
    got = run(loop, states(lambda i: LOSSLESS))
    assert tokens_of(got) == tokens_of(full_answers(agreeing.spec.checkpoint.path))
    assert loop.decode.counters.verified > 0, "both kinds of rounds are tried"


def test_paused_in_the_middle_of_a_draft(agreeing: NativeRunner) -> None:
    loop = make_loop(agreeing, reservation="used")
    paused_drafts = 0

    def disturb(step: int) -> None:
        nonlocal paused_drafts
        drafting = [s for s in loop.decode.batch.decoding if s.num_drafted]
        if step % 5 == 0 and drafting:
            paused_drafts += loop.decode.preemption.pause(drafting[-1].state.sequence_id)
            loop.check()

    got = run(loop, states(lambda i: LOSSLESS), disturb)
    assert tokens_of(got) == tokens_of(full_answers(agreeing.spec.checkpoint.path))
    assert paused_drafts > 20


def test_where_memory_is_scarce(agreeing: NativeRunner) -> None:
    """Drafts keep to what is promised."""
    capacity = 2 * agreeing.row_capacity_tokens
    loop = make_loop(agreeing, reservation="used", kv_capacity_tokens=capacity)
    got = run(loop, states(lambda i: LOSSLESS))
    assert tokens_of(got) == tokens_of(full_answers(agreeing.spec.checkpoint.path))
    assert loop.decode.counters.accepted > 0


def members(path: Path, count: int) -> list[Member]:
    made = [Member(spec_of(path), rebatches=True) for _ in range(count)]
    for seed, member in enumerate(made):
        member.loop.batch.drafter = RandomDrafter(member.loop.batch.rebatcher.costs, seed)
    return made


@pytest.mark.parametrize("sampled", [False, True])
def test_moved_in_the_middle_of_a_draft(checkpoint: Path, sampled: bool) -> None:
    """Drafts stay behind, and so does nothing else: what moves is the token that waits."""

    def made(exits: ExitParams) -> list[SequenceState]:
        extras = SEEDED if sampled else GREEDY
        return [replace(s, exits=exits) for s in sequences(6, 40, **extras)]

    wanted = undisturbed(members(checkpoint, 1)[0], made(FULL))
    replicas = members(checkpoint, 3)
    traffic = Traffic(replicas, made(LOSSLESS), Random(3), pauses=0.05)
    assert_same(traffic.run(), wanted)
    assert traffic.moves > 15 and traffic.waited > 3
    assert sum(m.loop.counters.accepted for m in replicas) > 0


def test_rebuilt_after_its_replica_was_lost(agreeing: NativeRunner) -> None:
    """All that is known of a sequence is what was emitted for it; that has no drafts."""
    wanted = states(lambda i: FULL, 24)
    run(make_loop(agreeing), wanted)
    todo, random = states(lambda i: LOSSLESS, 24), Random(5)
    done: dict[str, SequenceState] = {}
    num_lost = 0
    while todo:
        loop = make_loop(agreeing, random.randrange(99))
        for state in todo:
            loop.submit(state)
        lost_at, steps, ended = random.randint(20, 60), 0, set[str]()
        while loop.has_work and steps < lost_at:
            ended |= {o.sequence_id for o in loop.step() if o.finish is not None}
            steps += 1
        num_lost += sum(s.num_drafted > 0 for s in loop.decode.batch.decoding)
        done |= {s.sequence_id: s for s in todo if s.sequence_id in ended}
        todo = [s for s in todo if s.sequence_id not in ended]
        for state in todo:
            loop.release(state.sequence_id)
    assert num_lost > 5, "replicas were lost in the middle of drafts"
    assert [done[s.sequence_id].output_ids for s in wanted] == [s.output_ids for s in wanted]


def test_layers_do_not_go_while_answers_need_them(checkpoint: Path) -> None:
    member = members(checkpoint, 1)[0]
    made = [replace(s, exits=LOSSLESS) for s in sequences(3, 20)]
    for state in made:
        member.begin(state)
    member.loop.step()
    assert member.loop.drop_to(1).blocked_by == [s.sequence_id for s in made]
    while member.loop.has_work:
        member.loop.step()
    wanted = [replace(s, exits=FULL) for s in sequences(3, 20)]
    assert_same(made, undisturbed(members(checkpoint, 1)[0], wanted))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), eagerness=st.floats(0.2, 0.98), slots=st.integers(1, 8))
def test_a_model_that_agrees_rarely(
    stubborn: NativeRunner, seed: int, eagerness: float, slots: int
) -> None:
    loop = make_loop(stubborn, max_slots=slots)
    loop.decode.batch.drafter = RandomDrafter(loop.decode.batch.drafter.costs, seed, eagerness)
    got = run(loop, states(lambda i: LOSSLESS, 12, seed=seed))
    wanted = run(make_loop(stubborn), states(lambda i: FULL, 12, seed=seed))
    assert tokens_of(got) == tokens_of(wanted)


@pytest.mark.parametrize("exits", [LOSSLESS, BOUNDED, FULL], ids=["lossless", "bounded", "full"])
def test_turns_that_go_on_from_an_answer_say_what_whole_prompts_do(
    agreeing: NativeRunner, exits: ExitParams
) -> None:
    """Answers' KV is taken over where all of it ran full depth, drafts included; to the bit."""
    random = Random(3)
    loops = [make_loop(agreeing, prefix_caching=cached) for cached in (False, True)]
    cache = loops[1].prefill.prefixes
    assert cache is not None
    num_whole = num_short = 0
    for talk in range(8):
        tokens = [random.randrange(3, 130) for _ in range(random.randint(1, 20))]
        num_asked, before = 0, [0]
        for turn in range(3):
            state = replace(
                make_state(tokens),
                sampling=SamplingParams(24, seed=talk, num_logprobs=1, ignore_eos=True),
                exits=exits,
                sequence_id=f"{talk}.{turn}",
                output_ids=[],
                exit_layers=[],
            )
            copy = replace(state, output_ids=[], exit_layers=[])
            hits = cache.totals.hits
            assert run(loops[1], [state]) == run(loops[0], [copy])
            assert state.exit_layers == copy.exit_layers
            hits = cache.totals.hits - hits
            if turn:
                end = next((i for i, d in enumerate(before[1:]) if d < before[0]), len(before) - 1)
                full = (num_asked + end) // cache.block_tokens * cache.block_tokens
                assert hits <= full, "a block behind an exit was shared"
                num_whole += hits > num_asked
                num_short += end < len(before) - 1
            num_asked, before = len(tokens), list(state.exit_layers)
            tokens = tokens + state.output_ids + [random.randrange(3, 130) for _ in range(5)]
    assert num_whole > 0 or exits is BOUNDED, "some blocks reach into an answer"
    assert (num_short > 0) is (exits is BOUNDED)
