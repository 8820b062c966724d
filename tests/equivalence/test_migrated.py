"""A sequence that was moved between decode replicas says what it would have said."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quadriga.checkpoint.exits import ExitParams, SkippedKV
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SequenceState
from quadriga.engine.baton.runner import BatonRunner
from quadriga.errors import KVCacheExhausted
from quadriga.policies.slot_reservation import WINDOW
from quadriga.text.tokenizer import load_tokenizer
from tests.equivalence.models import build, make_spec, make_state, save
from tests.equivalence.moving import Member, Move, move
from tests.equivalence.relay_models import FAMILIES as RELAY_FAMILIES
from tests.equivalence.relay_models import build_relay

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


@pytest.mark.parametrize(
    ("model", "rebatches", "sampling"),
    [
        ("quadriga-s", True, GREEDY),
        ("quadriga-s", True, SEEDED),
        ("quadriga-s", False, GREEDY),
        ("quadriga-l", True, SEEDED),
    ],
)
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


def test_a_new_replica_goes_on_with_a_token_that_waits_at_an_exit() -> None:
    """Its first pass is for a sequence that came, not for any that began there."""
    spec = bundled("quadriga-s")
    first, middle, _ = spec.exits.layers[0], spec.exits.layers[1], spec.depth
    text = load_tokenizer(spec.checkpoint.path, spec.checkpoint.id)
    prompt = text.prompt_ids("Sort: 7 3 9 1 4 8 2 6\n")

    def made() -> SequenceState:
        state = make_state(prompt, max_tokens=32, **GREEDY)
        return replace(state, exits=ExitParams(threshold=0.9))

    source = Member(spec, rebatches=True)
    [wanted] = undisturbed(source, [made()])
    at = [i for i, layers in enumerate(wanted.exit_layers) if layers == middle][:3]
    assert len(at) == 3, f"tokens pass the exit at layer {first} and leave at the next"
    for index in at:
        state = made()
        source.begin(state)
        sequence = source.loop.batch.sequences[state.sequence_id]
        while len(state.output_ids) < index or sequence.next_segment != 1:
            source.loop.step()
        new = Member(spec, rebatches=True)
        state, transfer = move(source, new, state.sequence_id)
        assert transfer.resume is not None
        assert transfer.resume.waited_at == 0
        while new.loop.has_work:
            new.loop.step()
        assert_same([state], [wanted])


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


class Traffic:
    """Pieces go while the source steps on; sequences go to and fro among replicas.

    Args:
        pauses: Chance of a step to have a sequence paused; it comes back with its replica's next.

    Attributes:
        moves, waited, aborted: How often a sequence moved, with a token that waited at an exit; or
            stayed.
        rested: Moves of sequences that were paused when they came to rest.
    """

    def __init__(
        self,
        members: list[Member],
        states: list[SequenceState],
        rng: random.Random,
        *,
        pauses: float = 0.0,
    ) -> None:
        self.moves = self.waited = self.aborted = self.rested = 0
        self._members, self._rng, self._pauses = members, rng, pauses
        self._states = {s.sequence_id: s for s in states}
        self._under_way: dict[str, Move] = {}
        for state in states:
            rng.choice(members).begin(state)

    def run(self) -> list[SequenceState]:
        """Until all have ended; returns their last states."""
        members, rng = self._members, self._rng
        for _ in range(MAX_STEPS):
            if not any(m.loop.has_work for m in members):
                assert all(m.is_at_base_line for m in members)
                return list(self._states.values())
            rng.choice(members).loop.step()
            running = [(m, s.sequence_id) for m in members for s in m.loop.running]
            if running and rng.random() < self._pauses:
                member, sequence_id = rng.choice(running)
                member.loop.preemption.pause(sequence_id)
            if running and len(self._under_way) < 3:
                source, sequence_id = rng.choice(running)
                if sequence_id not in self._under_way:
                    destination = rng.choice([m for m in members if m is not source])
                    with suppress(KVCacheExhausted):  # its own paused sequences come first
                        self._under_way[sequence_id] = Move(source, destination, sequence_id)
            for sequence_id, transfer in list(self._under_way.items()):
                self._carry_on(sequence_id, transfer)
                for member in members:
                    member.loop.check()
        raise AssertionError("the sequences did not end")

    def _carry_on(self, sequence_id: str, transfer: Move) -> None:
        loop = transfer.source.loop
        is_ready = transfer.piece()
        is_paused = loop.is_paused(sequence_id)
        rest = transfer.freeze() if is_ready else None
        if rest is None and is_ready is not False:
            transfer.abort()  # it was over before
        elif rest is None:
            return
        elif self._rng.random() < 0.2:
            self.aborted += 1
            loop.step()
            loop.export.abort_cutover(sequence_id)
            transfer.abort()
        else:
            self.moves += 1
            self.rested += is_paused
            self._states[sequence_id] = transfer.finish(rest)
            self.waited += transfer.resume is not None and transfer.resume.waited_at is not None
        del self._under_way[sequence_id]


@pytest.mark.parametrize(
    ("mode", "seed"),
    [("linear", 0), *((mode, 1) for mode in ("linear", "project", "alias", "copy", "replay"))],
)
def test_at_random_in_long_requests(small: Path, mode: SkippedKV, seed: int) -> None:
    members = [Member(s, rebatches=True) for s in specs(small, mode, "wait", "wait", "wait")]
    sampling = SEEDED if seed else GREEDY
    wanted = undisturbed(members[0], sequences(6, 60, **sampling))
    assert len({k for s in wanted for k in s.exit_layers}) > 1, "tokens leave at several exits"
    traffic = Traffic(members, sequences(6, 60, **sampling), random.Random(seed))
    assert_same(traffic.run(), wanted)
    assert traffic.moves > 60
    assert traffic.waited > 5
    assert traffic.aborted > 5


def test_a_sequence_may_end_while_it_is_copied(small: Path) -> None:
    (spec,) = specs(small, "linear", "wait")
    source, destination = Member(spec, rebatches=True), Member(spec, rebatches=True)
    [wanted] = undisturbed(source, sequences(1, 12, **GREEDY))
    [state] = sequences(1, 12, **GREEDY)
    source.begin(state)
    transfer = Move(source, destination, state.sequence_id)
    transfer.piece()
    while source.loop.has_work:
        source.loop.step()
    assert transfer.piece() is None
    assert transfer.freeze() is None
    transfer.abort()
    assert source.is_at_base_line and destination.is_at_base_line
    assert_same([state], [wanted])


@pytest.mark.parametrize("mode", ["linear", "alias"])
def test_out_of_host_memory(small: Path, mode: SkippedKV) -> None:
    """Paused before, while they are copied, or coming back then; tokens that wait at exits, too."""
    members = [Member(s, rebatches=True) for s in specs(small, mode, "wait", "wait", "wait")]
    wanted = undisturbed(members[0], sequences(5, 40, **GREEDY))
    traffic = Traffic(members, sequences(5, 40, **GREEDY), random.Random(2), pauses=0.5)
    assert_same(traffic.run(), wanted)
    assert traffic.moves > 30
    assert traffic.rested > 10
    assert traffic.waited > 3
    assert traffic.aborted > 5
    assert sum(m.loop.preemption.num_resumes for m in members) > 30


def test_a_full_replica_gives_its_paused_sequences_to_one_with_room(small: Path) -> None:
    """There they run at once, where here they would wait for memory."""
    (spec,) = specs(small, "linear", "wait")
    wanted = undisturbed(Member(spec, rebatches=True), sequences(5, 40))
    narrow = replace(spec, kv_capacity_tokens=spec.row_capacity_tokens)
    full = Member(narrow, rebatches=True, is_crowded=True)
    for _ in range(WINDOW):
        full.loop.answers.ended(1)  # it promises little, and takes in more than it can keep
    roomy = Member(spec, rebatches=True)
    states = {s.sequence_id: s for s in sequences(5, 40)}
    for state in states.values():
        roomy.begin(state)
        with suppress(KVCacheExhausted):  # until it is full to its mark
            states[state.sequence_id], _ = move(roomy, full, state.sequence_id)
    assert full.loop.num_running > 1
    paused: list[str] = []
    while full.loop.has_work and not paused:
        full.loop.step()
        paused = [name for name in states if full.loop.is_paused(name)]
    assert paused, "memory filled"
    for sequence_id in paused:
        said = len(states[sequence_id].output_ids)
        states[sequence_id], transfer = move(full, roomy, sequence_id)
        assert transfer.resume is not None
        roomy.loop.step()
        roomy.loop.step()
        roomy.loop.step()
        assert len(states[sequence_id].output_ids) > said
    for member in (full, roomy):
        while member.loop.has_work:
            member.loop.step()
        assert member.is_at_base_line
    assert_same(list(states.values()), wanted)


def test_unmodified_models_move_too(tmp_path: Path) -> None:
    """Relay batches: rows join and leave the dense batch, are paused, and go on elsewhere."""
    path = save(build_relay(RELAY_FAMILIES["gpt2"]()), tmp_path)
    spec = make_spec(path, num_rows=6, runner="baton")
    members = [Member(spec, rebatches=False, runner=BatonRunner.load(spec)) for _ in range(3)]
    wanted = undisturbed(members[0], sequences(5, 40))
    traffic = Traffic(members, sequences(5, 40), random.Random(3), pauses=0.3)
    assert_same(traffic.run(), wanted)
    assert traffic.moves > 30
    assert traffic.rested > 5
    assert traffic.aborted > 5
    for member in members:
        assert isinstance(member.runner, BatonRunner)
        assert member.runner.memory().kv_bytes == 0, "nothing is left in a batch or beside it"


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
