"""A runner without a model: the next token is a function of the tokens before it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quadriga.clock import ManualClock
from quadriga.core.kv import KVExtent
from quadriga.core.request import SampledToken, SequenceState
from quadriga.interfaces import LayersDone, PrefillChunk

EOS = 0


def next_token(token_ids: Sequence[int]) -> int:
    """A deterministic token in 0..99; 0, the end token, about once in a hundred."""
    return zlib.crc32(repr(list(token_ids)).encode()) % 100


def expected_output(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a sequence alone would generate."""
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < max_tokens and (not output or output[-1] != EOS):
        output.append(next_token(tokens))
        tokens.append(output[-1])
    return output


@dataclass(frozen=True)
class FakeSuspended:
    """A sequence in host memory.

    Attributes:
        tokens: What its KV stood for.
        depth: Layers of it that are complete.
    """

    tokens: list[int]
    extents: list[KVExtent]
    rest: int | None
    depth: int

    def read(self, first_layer: int, num_layers: int, start: int, stop: int) -> Any:
        assert stop <= len(self.tokens)
        return self.tokens[start:stop]


@dataclass(eq=False)
class FakeBlock:
    """A kept block of KV: the tokens before it, and those it stands for."""

    tokens: tuple[int, ...]
    is_kept: bool = True


class FakeRunner:
    """Remembers which tokens each row's KV stands for, and fails a test that mixes rows up.

    Attributes:
        num_kept: Blocks that are kept for other rows.
    """

    num_layers = 8
    share_tokens = 8

    def __init__(self, num_rows: int, row_capacity_tokens: int = 256) -> None:
        self.num_kept = 0
        self.num_rows = num_rows
        self.row_capacity_tokens = row_capacity_tokens
        self.kv: dict[int, list[int]] = {row: [] for row in range(num_rows)}
        self.attached: dict[int, SequenceState] = {}

    @property
    def segment_ends(self) -> tuple[int, ...]:
        return (self.num_layers,)

    @property
    def kv_capacity_tokens(self) -> int:
        return self.num_rows * self.row_capacity_tokens

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        raise AssertionError("a runner without exits runs whole passes")

    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        raise AssertionError("a runner without exits runs whole passes")

    num_filled = 0

    def attach(self, row: int, state: SequenceState) -> None:
        assert row not in self.attached, f"row {row} is taken"
        self.attached[row] = state

    def detach(self, row: int) -> None:
        self.attached.pop(row, None)
        self.kv[row] = []

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None = None
    ) -> list[SampledToken | None]:
        out: list[SampledToken | None] = []
        for chunk in chunks:
            assert len(self.kv[chunk.row]) == chunk.start, "chunks must follow one another"
            self.kv[chunk.row].extend(chunk.token_ids)
            out.append(self.sample(chunk.row, self.kv[chunk.row]) if chunk.is_last else None)
        if on_layers is not None:
            for layer in range(self.num_layers):
                on_layers(layer, 1)
        return out

    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        out = []
        for row in rows:
            state = self.attached[row]
            self.kv[row].append(state.output_ids[-1])
            known = state.prompt_ids + state.output_ids
            assert self.kv[row] == known, f"row {row} does not hold its sequence's tokens"
            out.append(self.sample(row, known))
        return out

    def sample(self, row: int, known: Sequence[int]) -> SampledToken:
        """The token that follows those that a row holds."""
        return SampledToken(next_token(known), self.num_layers)

    def keep(self, row: int, start: int, over: object | None = None) -> FakeBlock:
        """See `SharingRunner.keep`."""
        if over is not None:
            self.forget(over)
        stop = start + self.share_tokens
        assert stop <= len(self.kv[row]), f"row {row} has no whole block at {start}"
        self.num_kept += 1
        return FakeBlock(tuple(self.kv[row][:stop]))

    def blank(self) -> None:
        """See `SharingRunner.blank`."""

    def share(self, row: int, start: int, kept: object) -> None:
        """See `SharingRunner.share`; KV at a position follows from all tokens up to there."""
        assert isinstance(kept, FakeBlock) and kept.is_kept, "a block was shared that had gone"
        assert list(kept.tokens[:start]) == self.kv[row], "a block is behind another prefix"
        self.kv[row] = list(kept.tokens)

    def forget(self, kept: object) -> None:
        """See `SharingRunner.forget`."""
        assert isinstance(kept, FakeBlock) and kept.is_kept, "a block went twice"
        kept.is_kept = False
        self.num_kept -= 1

    def suspend(self, row: int) -> FakeSuspended:
        kept = FakeSuspended(
            list(self.kv[row]), self.extents(row), self.read_rest(row), self.num_layers
        )
        self.detach(row)
        return kept

    def restore(self, row: int, state: SequenceState, suspended: FakeSuspended) -> None:
        self.attach(row, state)
        self.kv[row] = list(suspended.tokens)

    def extents(self, row: int) -> list[KVExtent]:
        return [KVExtent(0, self.num_layers, len(self.kv[row]))]

    def read_rest(self, row: int) -> int | None:
        return None

    def resume(
        self, row: int, state: SequenceState, rest: int | None, depth: int | None = None
    ) -> None:
        self.attach(row, state)

    def read_kv(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> list[int]:
        return self.kv[row][start:stop]

    def write_kv(self, row: int, first_layer: int, start: int, kv: list[int]) -> None:
        self.kv[row][start : start + len(kv)] = kv


def token_at(token_ids: Sequence[int], depth: int) -> int:
    """The token that leaves behind `depth` layers; another one at every depth, mostly."""
    return next_token([*token_ids, -depth])


def confidence_at(token_ids: Sequence[int], depth: int) -> float:
    """In [0, 1), uniform, in steps of a thousandth."""
    return zlib.crc32(repr((depth, list(token_ids))).encode()) % 1000 / 1000


class FakeSegmentRunner(FakeRunner):
    """A runner with exits, and a watch over the order in which they are used.

    Every row's token must pass through the segments in order and through each of them once, until
    it is emitted at the exit of the pass just run. A row that is detached in between starts its
    token anew, wherever it is attached next: that alone may run a segment twice for a token.

    Args:
        base_s, row_s: A pass takes `base_s + row_s · rows` for each of its segments.
    """

    def __init__(
        self,
        num_rows: int,
        row_capacity_tokens: int = 256,
        *,
        ends: tuple[int, ...] = (2, 5, 8),
        clock: ManualClock | None = None,
        base_s: float = 1e-3,
        row_s: float = 1e-4,
    ) -> None:
        super().__init__(num_rows, row_capacity_tokens)
        assert ends[-1] == self.num_layers
        self.clock = clock or ManualClock()
        self.base_s = base_s
        self.row_s = row_s
        self.next_segment: dict[int, int] = {}  # of each attached row's token
        self._ends = ends
        self._at_exit: set[int] = set()

    @property
    def segment_ends(self) -> tuple[int, ...]:
        return self._ends

    def pass_s(self, first: int, stop: int, count: int) -> float:
        """How long a pass takes."""
        return (stop - first) * (self.base_s + self.row_s * count)

    def attach(self, row: int, state: SequenceState) -> None:
        super().attach(row, state)
        self.next_segment[row] = 0

    def detach(self, row: int) -> None:
        super().detach(row)
        self.next_segment.pop(row, None)
        self._at_exit.discard(row)

    def restore(self, row: int, state: SequenceState, suspended: FakeSuspended) -> None:
        super().restore(row, state, suspended)
        assert suspended.rest is not None
        self.next_segment[row] = suspended.rest

    def extents(self, row: int) -> list[KVExtent]:
        """Of a token that waits at an exit, the layers that were run; the others are complete."""
        at, begins = self.next_segment[row], (0, *self._ends[:-1])
        ran = [len(self.kv[row]) - (0 < at <= i) for i in range(len(self._ends))]
        return [KVExtent(*e) for e in zip(begins, self._ends, ran, strict=True)]

    def read_rest(self, row: int) -> int:
        return self.next_segment[row]

    def resume(
        self, row: int, state: SequenceState, rest: int | None, depth: int | None = None
    ) -> None:
        super().resume(row, state, rest, depth)
        assert rest is not None
        self.next_segment[row] = rest

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        assert rows and len(set(rows)) == len(rows), f"rows {rows}"
        assert 0 <= first < stop <= len(self._ends), f"segments {first}..{stop}"
        depth = self._ends[stop - 1]
        confidences = []
        for row in rows:
            at = self.next_segment[row]
            assert at == first, f"row {row} waits before segment {at}, not {first}"
            self.next_segment[row] = stop
            if first == 0:
                self.kv[row].append(self.attached[row].output_ids[-1])
            confidences.append(confidence_at(self._known(row), depth))
        self._at_exit = set(rows)
        self.clock.advance(self.pass_s(first, stop, len(rows)))
        return confidences

    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        out = []
        for row in rows:
            assert row in self._at_exit, f"row {row} is not at the exit just run"
            self._at_exit.remove(row)
            depth = self._ends[self.next_segment[row] - 1]
            self.next_segment[row] = 0
            out.append(SampledToken(token_at(self._known(row), depth), depth))
        return out

    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        self.advance(rows, 0, len(self._ends))
        return self.emit(rows)

    def _known(self, row: int) -> list[int]:
        state = self.attached[row]
        known = state.prompt_ids + state.output_ids
        assert self.kv[row] == known, f"row {row} does not hold its sequence's tokens"
        return known
