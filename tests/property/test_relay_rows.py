"""The relay batch's book-keeping against lists: no value of a row is lost, moved or mixed up."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quadriga.engine.baton.row_kv import CacheGeometry
from quadriga.engine.baton.rows import RelayRows

GEOMETRY = CacheGeometry(num_layers=2, num_kv_heads=2, head_dim=3, vocab_size=0)
NUM_ROWS = 5
CAPACITY = 40
ROWS = st.integers(0, NUM_ROWS - 1)


def values(numbers: list[int]) -> torch.Tensor:
    """K/V of tokens that are told apart by a number: [layers, 2, heads, n, head_dim]."""
    g = GEOMETRY
    base = torch.tensor(numbers, dtype=torch.float32)[None, None, None, :, None]
    shape = (g.num_layers, 2, g.num_kv_heads, len(numbers), g.head_dim)
    place = torch.arange(g.num_layers * 2 * g.num_kv_heads) / 64
    return (base + place.view(g.num_layers, 2, g.num_kv_heads, 1, 1)).expand(shape)


def check_row(
    layer: int, mask: torch.Tensor, keys: torch.Tensor, stored: torch.Tensor, wanted: list[int]
) -> None:
    """What the model sees of one row: zeros and a mask in front, the row's own at the end."""
    pad = keys.shape[1] - len(wanted)
    assert mask.tolist() == [0] * pad + [1] * len(wanted)
    for got, kind in ((keys, 0), (stored, 1)):
        assert not got[:, :pad].any()
        assert torch.equal(got[:, pad:], values(wanted)[layer, kind])


class RelayMachine(RuleBasedStateMachine):
    """Every row's tokens as a plain list, beside the real thing."""

    @initialize(release=st.integers(1, 8))
    def start(self, release: int) -> None:
        self.rows = RelayRows(
            GEOMETRY,
            torch.float32,
            torch.device("cpu"),
            num_rows=NUM_ROWS,
            row_capacity_tokens=CAPACITY,
            release_columns=release,
        )
        self.release = release
        self.naive: dict[int, list[int]] = {}
        self.next = 1

    def _numbers(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    @rule(row=ROWS, count=st.integers(0, 15), split=st.integers(0, 15))
    def arrive(self, row: int, count: int, split: int) -> None:
        """Tokens come in from a transfer: layer after layer, in two pieces."""
        have = self.naive.setdefault(row, [])
        numbers = self._numbers(min(count, CAPACITY - len(have)))
        split = min(split, len(numbers))
        kv = values(numbers)
        for layer in range(GEOMETRY.num_layers):
            part = kv[layer : layer + 1]
            self.rows.write(row, layer, len(have), part[:, :, :, :split])
            self.rows.write(row, layer, len(have) + split, part[:, :, :, split:])
        have += numbers

    @rule(row=ROWS)
    def leave(self, row: int) -> None:
        self.rows.drop(row)
        self.naive.pop(row, None)

    @rule(row=ROWS, place=ROWS)
    def suspend(self, row: int, place: int) -> None:
        """And restore, into whichever row is free then."""
        kv = self.rows.suspend(row)
        have = self.naive.pop(row, [])
        if self.naive.get(place):
            place = row
        self.rows.restore(place, kv)
        self.naive[place] = have

    @precondition(lambda self: any(len(have) < CAPACITY for have in self.naive.values()))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some rows decode one token, after forgetting some of their last."""
        able = sorted(row for row, have in self.naive.items() if len(have) < CAPACITY)
        chosen = data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True))
        for row in chosen:
            have = self.naive[row]
            forget = data.draw(st.sampled_from([0, 0, 0, 0, 1, 4]))
            self.naive[row] = have[: max(0, len(have) - forget)]
        inputs = self.rows.begin_step({row: len(self.naive[row]) for row in chosen})
        assert sorted(inputs.rows) == sorted(chosen)
        new = {row: self._numbers(1) for row in inputs.rows}
        batch = self.rows.batch
        width = batch.num_past + 1
        assert width <= CAPACITY, "tables in a model are no longer than a row may be"
        longest = max(len(self.naive[row]) for row in chosen)
        assert width - 1 - longest < self.release, "padding of all rows is released"
        for layer in range(GEOMETRY.num_layers):
            column = torch.stack([values(new[row])[layer] for row in inputs.rows])
            keys, stored = batch.append(layer, column[:, 0], column[:, 1])
            assert keys.shape == (len(chosen), GEOMETRY.num_kv_heads, width, GEOMETRY.head_dim)
            for i, row in enumerate(inputs.rows):
                wanted = [*self.naive[row], *new[row]]
                check_row(layer, inputs.mask[i], keys[i], stored[i], wanted)
        assert inputs.positions[:, 0].tolist() == [len(self.naive[row]) for row in inputs.rows]
        self.rows.end_step()
        for row, number in new.items():
            self.naive[row] = self.naive[row] + number

    @invariant()
    def every_row_reads_back(self) -> None:
        if not hasattr(self, "naive"):
            return
        for row, have in self.naive.items():
            got = self.rows.read(row, 0, GEOMETRY.num_layers, 0, len(have))
            assert torch.equal(got, values(have))

    @invariant()
    def memory_follows_content(self) -> None:
        if not hasattr(self, "naive"):
            return
        memory = self.rows.memory()
        in_batch = [self.naive[row] for row in self.rows.batch.rows]
        assert memory.padding_cells == len(in_batch) * memory.width - sum(map(len, in_batch))
        if not in_batch:
            assert memory.batch_bytes == 0
        token_bytes = 4 * GEOMETRY.values_per_token
        assert memory.batch_bytes <= NUM_ROWS * (CAPACITY + self.release) * token_bytes


RelayMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestRelayRows = RelayMachine.TestCase
