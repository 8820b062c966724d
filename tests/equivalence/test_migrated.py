"""A sequence that was moved between decode replicas says what it would have said."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quadriga.checkpoint import read_checkpoint
from quadriga.engine_spec import EngineSpec
from quadriga.exits import ExitParams, SkippedKV
from quadriga.types import SequenceState
from tests.equivalence.models import build, make_spec, make_state, save
from tests.equivalence.moving import Member, Move, move

SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}
GREEDY: dict[str, Any] = {"temperature": 0.0}
MAX_STEPS = 5000


def sequences(
    count: int, max_tokens: int, *, name: str = "s", threshold: float = 0.2, **sampling: Any
) -> list[SequenceState]:
    """Prompts of different lengths; every third sequence never leaves early."""
    return [
        replace(
            make_state(
                [3 + (7 * i + k) % 120 for k in range(3 + 4 * i)], max_tokens=max_tokens, **sampling
            ),
            sequence_id=f"{name}{i}",
            exits=ExitParams(threshold=threshold if i % 3 != 2 else 1.0),
        )
        for i in range(count)
    ]


def undisturbed(member: Member, states: list[SequenceState]) -> list[SequenceState]:
    for state in states:
        member.begin(state)
    for _ in range(MAX_STEPS):
        if not member.loop.has_work:
            return states
        member.loop.step()
    raise AssertionError("the sequences did not end")


def assert_same(moved: list[SequenceState], wanted: list[SequenceState]) -> None:
    for one, other in zip(moved, wanted, strict=True):
        assert one.output_ids == other.output_ids, one.sequence_id
        assert one.exit_layers == other.exit_layers, one.sequence_id


@cache
def bundled(model: str, compiled: str = "wait") -> EngineSpec:
    checkpoint = read_checkpoint(model)
    spec = make_spec(checkpoint.path, compile=compiled, row_capacity_tokens=128, num_rows=4)
    return replace(spec, exits=checkpoint.exits)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("rebatches", [True, False], ids=["drex", "off"])
@pytest.mark.parametrize("model", ["quadriga-s", "quadriga-l"])
def test_at_every_step_of_a_short_request(
    model: str, rebatches: bool, sampling: dict[str, Any]
) -> None:
    spec = bundled(model)
    one, other = Member(spec, rebatches=rebatches), Member(spec, rebatches=rebatches)
    wanted = undisturbed(one, sequences(3, 9, threshold=0.9, **sampling))
    waited = 0
    step = 0
    while True:
        made = sequences(3, 9, name=f"{step}.", threshold=0.9, **sampling)
        states = {s.sequence_id: s for s in made}
        for state in states.values():
            one.begin(state)
        for _ in range(step):
            one.loop.step()
        here = [s.sequence_id for s in one.loop.running]
        if not here:
            break
        for sequence_id in here:
            states[sequence_id], transfer = move(one, other, sequence_id)
            assert transfer.resume is not None
            waited += transfer.resume.waited_at is not None
            one.loop.check()
            other.loop.check()
        while other.loop.has_work:
            other.loop.step()
        assert_same(list(states.values()), wanted)
        assert one.is_at_base_line
        assert other.is_at_base_line
        step += 1
    assert step >= 8
    assert (waited > 0) is rebatches, "with exits, some tokens were moved while they waited"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(build("llama"), tmp_path_factory.mktemp("llama"))
    (path / "exits.json").write_text(
        '{"kind": "shared", "layers": [1, 2], "criterion": "margin", "threshold": 0.2}'
    )
    return path


def specs(path: Path, mode: SkippedKV, *compiled: str) -> Iterator[EngineSpec]:
    for compile_mode in compiled:
        spec = make_spec(path, compile=compile_mode, skipped_kv=mode, num_rows=8)
        yield replace(spec, exits=spec.checkpoint.exits)


@pytest.mark.parametrize("mode", ["linear", "project", "alias", "copy", "replay"])
@pytest.mark.parametrize("seed", [0, 1])
def test_at_random_in_long_requests(small: Path, mode: SkippedKV, seed: int) -> None:
    """Pieces go while the source steps on; sequences go to and fro among three replicas."""
    members = [Member(s, rebatches=True) for s in specs(small, mode, "wait", "wait", "wait")]
    sampling = SEEDED if seed else GREEDY
    wanted = undisturbed(members[0], sequences(6, 60, **sampling))
    assert len({k for s in wanted for k in s.exit_layers}) > 1, "tokens leave at several exits"
    states = {s.sequence_id: s for s in sequences(6, 60, **sampling)}
    rng = random.Random(seed)
    for state in states.values():
        rng.choice(members).begin(state)
    num_moves = num_waited = num_ended = num_aborted = 0
    under_way: dict[str, Move] = {}
    for _ in range(MAX_STEPS):
        if not any(m.loop.has_work for m in members):
            break
        rng.choice(members).loop.step()
        running = [(m, s.sequence_id) for m in members for s in m.loop.running]
        if running and len(under_way) < 3:
            source, sequence_id = rng.choice(running)
            if sequence_id not in under_way:
                destination = rng.choice([m for m in members if m is not source])
                under_way[sequence_id] = Move(source, destination, sequence_id, max_cells=1)
        for sequence_id, transfer in list(under_way.items()):
            is_ready = transfer.piece()
            rest = transfer.freeze() if is_ready else None
            if rest is None and is_ready is not False:
                num_ended += 1
                transfer.abort()
            elif rest is None:
                continue
            elif rng.random() < 0.2:
                num_aborted += 1
                transfer.source.loop.step()
                transfer.source.loop.departures.thaw(sequence_id)
                transfer.abort()
            else:
                num_moves += 1
                states[sequence_id] = transfer.finish(rest)
                num_waited += transfer.resume is not None and transfer.resume.waited_at is not None
            del under_way[sequence_id]
            for member in members:
                member.loop.check()
    assert_same(list(states.values()), wanted)
    assert num_moves > 60
    assert num_waited > 5
    assert num_aborted > 5
    assert num_ended > 0
    assert all(m.is_at_base_line for m in members)


@pytest.mark.parametrize("mode", ["alias", "linear"])
def test_from_compiled_kernels_to_the_eager_decoder(small: Path, mode: SkippedKV) -> None:
    """Kernels read aliased KV where it lies and copy nothing; the eager decoder needs copies."""
    compiled, eager = (Member(s, rebatches=True) for s in specs(small, mode, "wait", "off"))
    wanted = undisturbed(eager, sequences(4, 40))
    states = {s.sequence_id: s for s in sequences(4, 40)}
    for state in states.values():
        compiled.begin(state)
    for _ in range(40):
        compiled.loop.step()
    for sequence_id in list(states):
        states[sequence_id], _ = move(compiled, eager, sequence_id)
    while eager.loop.has_work:
        eager.loop.step()
    assert_same(list(states.values()), wanted)


def test_what_never_went_deep_takes_no_deep_layers_along(small: Path) -> None:
    one, other = (Member(s, rebatches=True) for s in specs(small, "project", "wait", "wait"))
    (state,) = sequences(1, 60, threshold=0.0)
    one.begin(state)
    for _ in range(40):
        one.loop.step()
    num_tokens, num_prompt = state.num_tokens, len(state.prompt_ids)
    assert num_tokens > num_prompt + 30
    _, transfer = move(one, other, state.sequence_id)
    assert transfer.resume is not None
    tokens = [e.num_tokens for e in transfer.resume.extents]
    assert tokens[0] >= num_tokens - 1
    assert tokens[1:] == [num_prompt, num_prompt], "only the prompt ran all layers"
