"""Unmodified models in the relay batch answer as `generate` does, whatever happens around them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quadriga.core.request import SequenceState
from quadriga.engine.baton.row_kv import RowKV
from quadriga.engine.baton.runner import BatonRunner
from tests.equivalence.churning import ChurningBatch
from tests.equivalence.models import make_spec, make_state, save, whole_prompt
from tests.equivalence.relay_models import FAMILIES, VOCAB, build_relay, generate

NUM_ROWS = 6
NUM_SEQUENCES = 16
MAX_TOKENS = 18


class Relay(ChurningBatch):
    """Sequences also sit out, are suspended, and moved to another row."""

    def __init__(self, runner: BatonRunner, *, seed: int) -> None:
        super().__init__(runner, seed=seed)
        self._suspended: list[tuple[SequenceState, RowKV]] = []
        self.widths: list[int] = []
        self.moves = self.pauses = 0

    @property
    def _is_busy(self) -> bool:
        return bool(self._running or self._suspended)

    def _disturb(self) -> None:
        if self._running and self._rng.random() < 0.3:
            self._move()
        if self._running and self._rng.random() < 0.3:
            self._pause()
        if self._suspended and self._free and self._rng.random() < 0.5:
            self._resume()

    def _choose_rows(self) -> list[int]:
        """Some sit out."""
        return self._rng.sample(sorted(self._running), self._rng.randint(1, len(self._running)))

    def _decode(self) -> None:
        super()._decode()
        self.widths.append(self._runner.memory().width)

    def _move(self) -> None:
        """Take a sequence's KV out, let its row go, and continue in another row."""
        if not self._free:
            return
        row = self._rng.choice(sorted(self._running))
        state = self._running.pop(row)
        stop = state.num_tokens - 1
        middle = self._rng.randint(0, stop)
        parts = [
            (first, start, self._runner.read_kv(row, first, count, start, end))
            for first, count in ((0, 1), (1, self._runner.num_layers - 1))
            for start, end in ((0, middle), (middle, stop))
        ]
        self._runner.detach(row)
        target = self._take_row()
        self._free.append(row)
        for first, start, kv in parts:
            self._runner.write_kv(target, first, start, kv)
        self._runner.attach(target, state)
        self._running[target] = state
        self.moves += 1

    def _pause(self) -> None:
        """Suspend a sequence; others may decode, and take its row, before it comes back."""
        row = self._rng.choice(sorted(self._running))
        self._suspended.append((self._running.pop(row), self._runner.suspend(row)))
        self._free.append(row)
        self.pauses += 1

    def _resume(self) -> None:
        state, suspended = self._suspended.pop(0)
        row = self._take_row()
        self._runner.restore(row, state, suspended)
        self._running[row] = state


def random_states(*, seed: int, count: int = NUM_SEQUENCES) -> list[SequenceState]:
    """Prompts of 1 to 60 tokens; outputs of very different lengths."""
    rng = random.Random(seed)
    return [
        make_state(
            [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 60))],
            max_tokens=rng.choice([1, 4, 9, MAX_TOKENS]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    """Insertion on both sides, subsets, moves, pauses and releases on the way."""
    model = build_relay(FAMILIES[family]())
    spec = make_spec(save(model, tmp_path), runner="baton", num_rows=NUM_ROWS)
    runner = BatonRunner.load(spec, release_columns=3)
    relay = Relay(runner, seed=11)
    states = random_states(seed=12)
    relay.run(states)
    for state in states:
        assert state.output_ids == generate(model, state.prompt_ids, state.sampling.max_tokens)
    assert len({token for state in states for token in state.output_ids}) > 10, "a dull model"
    assert relay.moves > 3
    assert relay.pauses > 3
    widths = zip(relay.widths, relay.widths[1:], strict=False)
    assert any(after < before for before, after in widths), "columns were released"
    memory = runner.memory()
    assert (memory.kv_bytes, memory.padding_cells) == (0, 0)
    assert 0 < memory.idle_share < 1


@pytest.mark.parametrize("family", ["gpt2", "falcon", "bloom", "gemma2-window"])
def test_prefill_here_decode_there(family: str, tmp_path: Path) -> None:
    """As in service: one runner prefills, its KV goes over in layer groups while others decode."""
    model = build_relay(FAMILIES[family]())
    spec = make_spec(save(model, tmp_path), runner="baton", num_rows=NUM_ROWS)
    here, there = BatonRunner.load(spec), BatonRunner.load(spec)
    states = random_states(seed=21, count=NUM_ROWS)
    running: dict[int, SequenceState] = {}

    def step() -> None:
        rows = [row for row, s in running.items() if len(s.output_ids) < s.sampling.max_tokens]
        for row, token in zip(rows, there.decode(rows), strict=True):
            running[row].output_ids.append(token.token_id)

    for i, state in enumerate(states):
        row, target = (i + 1) % NUM_ROWS, NUM_ROWS - 1 - i
        here.attach(row, state)
        length = len(state.prompt_ids)
        announced: list[int] = []

        def on_layers(
            first: int,
            count: int,
            row: int = row,
            target: int = target,
            length: int = length,
            announced: list[int] = announced,
        ) -> None:
            there.write_kv(target, first, 0, here.read_kv(row, first, count, 0, length))
            announced.extend(range(first, first + count))

        token = here.prefill([whole_prompt(row, state)], on_layers)[0]
        assert announced == list(range(here.num_layers))
        step()
        assert token is not None
        here.detach(row)
        state.output_ids.append(token.token_id)
        there.attach(target, state)
        running[target] = state
        step()
    for _ in range(MAX_TOKENS):
        step()
    for state in states:
        assert state.output_ids == generate(model, state.prompt_ids, state.sampling.max_tokens)


def test_the_native_engine_and_the_relay_batch_exchange_kv(tmp_path: Path) -> None:
    """Llama runs in both; a sequence prefilled natively continues in the relay batch."""
    from quadriga.engine import load_runner
    from tests.equivalence.models import build

    model = build("llama")
    path = save(model, tmp_path)
    native, relay = load_runner(make_spec(path)), load_runner(make_spec(path, runner="baton"))
    state = make_state([5, 80, 41, 7, 12, 99, 3], max_tokens=12)
    native.attach(2, state)
    token = native.prefill([whole_prompt(2, state)])[0]
    assert token is not None
    relay.write_kv(4, 0, 0, native.read_kv(2, 0, native.num_layers, 0, len(state.prompt_ids)))
    state.output_ids.append(token.token_id)
    relay.attach(4, state)
    while len(state.output_ids) < 12:
        state.output_ids.append(relay.decode([4])[0].token_id)
    assert state.output_ids == generate(model, state.prompt_ids, 12)


def test_seeded_sampling_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    model = build_relay(FAMILIES["gpt-neox"]())
    spec = make_spec(save(model, tmp_path), runner="baton", num_rows=NUM_ROWS)
    runner = BatonRunner.load(spec)

    def states() -> list[SequenceState]:
        return [
            make_state([3 + i, 9, 4], max_tokens=15, temperature=0.8, top_p=0.9, seed=i)
            for i in range(8)
        ]

    together, alone = states(), states()
    Relay(runner, seed=5).run(together)
    for state in alone:
        Relay(runner, seed=6).run([state])
    assert [s.output_ids for s in together] == [s.output_ids for s in alone]
