"""What rows draft in one call of the kernels is what they draft pass by pass, to the bit."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest
import torch

from quadriga.checkpoint.exits import Criterion
from quadriga.config.engine_spec import EngineSpec, WeightForm
from quadriga.core.request import SequenceState
from quadriga.engine.compiled import CompiledDecoder
from quadriga.engine.model_runner import NativeRunner
from quadriga.interfaces import MAX_DRAFTED, Drafted, DraftPlan
from tests.equivalence.models import VARIANTS, make_spec, make_state, start_row, whole_prompt
from tests.equivalence.test_lossless import family, spec_of

PROJECTED = "opt-post-norm-projected"
EDGES = (0.02, 0.1, 0.3)
CHANCES = (0.5, 0.7, 0.9, 0.97)


def begin(runner: NativeRunner, rows: list[int], seed: int) -> dict[int, SequenceState]:
    """Give rows prompts of different lengths, and run the tokens that follow to the first exit."""
    random, made = Random(seed), {}
    for row in rows:
        state = make_state([random.randrange(3, 120) for _ in range(random.randint(1, 40))])
        start_row(runner, row, state)
        made[row] = state
    return made


def make_plan(rows: list[int], seed: int, **fixed: object) -> DraftPlan:
    random, count = Random(seed), len(rows)
    plan = DraftPlan(
        survivals=[random.uniform(0.2, 1.0) for _ in rows],
        rooms=[random.randint(0, MAX_DRAFTED) for _ in rows],
        ends=frozenset(random.sample(range(130), 6)),
        edges=EDGES,
        chances=CHANCES,
        least=random.choice([0.0, 0.1, 0.4]),
        token_s=random.choice([1e-3, 2e-3]),
        needed_s=[
            [random.choice([0.0, 3e-4, 1e-3]) * n for n in range(count + 1)]
            for _ in range(MAX_DRAFTED)
        ],
    )
    return replace(plan, **fixed)  # type: ignore[arg-type]


def by_passes(runner: NativeRunner, rows: list[int], plan: DraftPlan) -> list[Drafted]:
    """What a plan says, one pass and one question after the other."""
    found, survivals = runner.draft(rows), list(plan.survivals)
    for needed_s in plan.needed_s:
        going = [
            i
            for i, drafted in enumerate(found)
            if len(drafted.confidences) < plan.rooms[i]
            and survivals[i] >= plan.least
            and drafted.tokens[-1] not in plan.ends
        ]
        expected_s = sum(survivals[i] for i in going) * plan.token_s
        if not going or expected_s <= needed_s[len(going)]:
            break
        some = [rows[i] for i in going]
        for i, confidence in zip(going, runner.advance(some, 0, 1), strict=True):
            found[i].confidences.append(confidence)
            survivals[i] *= plan.chances[bisect_right(plan.edges, confidence)]
        for i, drafted in zip(going, runner.draft(some), strict=True):
            found[i].tokens.extend(drafted.tokens)
    return found


def assert_alike(one: NativeRunner, other: NativeRunner, rows: list[int], seed: int) -> int:
    """Draft in both ways and verify; how many drafts were run."""
    num_run = 0
    made = [begin(runner, rows, seed) for runner in (one, other)]
    for turn in range(4):
        plan = make_plan(rows, 10 * seed + turn)
        assert one.advance(rows, 0, 1) == other.advance(rows, 0, 1)
        drafted = one.draft(rows, plan)
        assert drafted == by_passes(other, rows, plan)
        num_run += sum(len(d.confidences) for d in drafted)
        for row, d in zip(rows, drafted, strict=True):
            stop = made[0][row].num_tokens + len(d.confidences)
            mine, theirs = (r.read_kv(row, 0, r.segment_ends[0], 0, stop) for r in (one, other))
            assert torch.equal(mine, theirs)
        said = one.verify(rows)
        assert said == other.verify(rows)
        for states in made:
            for row, tokens in zip(rows, said, strict=True):
                states[row].output_ids += [t.token_id for t in tokens]
    for row in rows:
        mine, theirs = (r.read_kv(row, 0, r.num_layers, 0, stop) for r in (one, other))
        assert torch.equal(mine, theirs)
        one.detach(row)
        other.detach(row)
    return num_run


def pair(spec: EngineSpec) -> tuple[NativeRunner, NativeRunner]:
    return NativeRunner.load(spec), NativeRunner.load(spec)


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {PROJECTED}))
def test_every_family(variant: str, tmp_path: Path) -> None:
    one, other = pair(spec_of(family(variant, tmp_path, agrees=0.6)))
    runs = [assert_alike(one, other, rows, s) for s, rows in enumerate([[3], [0, 2], [5, 1, 4, 0]])]
    assert min(runs) > 0


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_weights_and_threads_of_a_bundled_model(form: WeightForm, threads: int) -> None:
    path = make_spec(Path("quadriga-s")).checkpoint.path
    one, other = pair(spec_of(path, weights=form, threads=threads, num_rows=16))
    for seed, count in enumerate((1, 4, 9, 16)):
        assert assert_alike(one, other, list(range(count)), seed) > 0


@pytest.mark.parametrize("criterion", ["top", "margin"])
def test_confidences_on_the_scale_of_thresholds(criterion: Criterion, tmp_path: Path) -> None:
    spec = spec_of(family("llama", tmp_path, agrees=0.6))
    exits = replace(
        spec.exits, criterion=criterion, sure_from=((1, 0.05), (2, 0.4)), calibrated_at=0.2
    )
    one, other = pair(replace(spec, exits=exits))
    assert assert_alike(one, other, [0, 1, 2], 7) > 0


def test_a_plan_that_asks_nothing_fills_the_room(tmp_path: Path) -> None:
    runner = NativeRunner.load(spec_of(family("llama", tmp_path, agrees=0.6)))
    rows = [0, 1]
    begin(runner, rows, 1)
    runner.advance(rows, 0, 1)
    free = [[0.0] * 3] * MAX_DRAFTED
    plan = make_plan(rows, 1, rooms=[MAX_DRAFTED, 2], ends=frozenset(), least=0.0, needed_s=free)
    assert [len(d.tokens) for d in runner.draft(rows, plan)] == [1 + MAX_DRAFTED, 3]
    assert all(tokens for tokens in runner.verify(rows))


def test_what_needs_python_drafts_one_token(tmp_path: Path) -> None:
    """Sampling, and projections that are no kernels."""
    free = [[0.0] * 2] * MAX_DRAFTED
    for variant, temperature in (("llama", 0.7), (PROJECTED, 0.0)):
        path = tmp_path / variant
        path.mkdir()
        runner = NativeRunner.load(spec_of(family(variant, path, agrees=0.6)))
        state = begin(runner, [0], 1)[0]
        runner.detach(0)
        state.sampling = replace(state.sampling, temperature=temperature)
        runner.attach(0, state)
        runner.prefill([whole_prompt(0, state)])
        runner.advance([0], 0, 1)
        [drafted] = runner.draft([0], make_plan([0], 1, needed_s=free))
        assert len(drafted.tokens) == 1 and not drafted.confidences


def test_nothing_beyond_what_there_is(tmp_path: Path) -> None:
    runner = NativeRunner.load(spec_of(family("llama", tmp_path, agrees=0.6)))
    begin(runner, [0], 1)
    runner.advance([0], 0, 1)
    decoder = runner.model.fastest()
    assert isinstance(decoder, CompiledDecoder)
    plan = make_plan([0], 1, rooms=[3], least=inf)
    ints = torch.arange(64).numpy()
    states = torch.zeros(8, decoder.config.hidden_size)
    exits = runner.spec.exits
    good = decoder.draft(1, ints[:1], ints[5:6], [7], states, ints[:1], plan, exits)
    assert good.num_run.tolist() == [0]
    last = runner.row_capacity_tokens - 2
    for rows, positions, token, places, of in (
        (ints[63:], ints[5:6], 7, ints[:1], plan),
        (ints[:1], ints[:1] + last, 7, ints[:1], plan),
        (ints[:1], ints[5:6], 130, ints[:1], plan),
        (ints[:1], ints[5:6], -1, ints[:1], plan),
        (ints[:1], ints[5:6], 7, ints[6:7], plan),
        (ints[:1], ints[5:6], 7, ints[:1], replace(plan, needed_s=[[0.0, 0.0]])),
        (ints[:1], ints[5:6], 7, ints[:1], replace(plan, needed_s=[[0.0]] * 7)),
        (ints[:1], ints[5:6], 7, ints[:1], replace(plan, survivals=[])),
        (ints[:1], ints[5:6], 7, ints[:1], replace(plan, rooms=[1, 1])),
        (ints[:1], ints[5:6], 7, ints[:1], replace(plan, chances=(0.5,))),
    ):
        with pytest.raises(IndexError):
            decoder.draft(1, rows, positions, [token], states, places, of, exits)
