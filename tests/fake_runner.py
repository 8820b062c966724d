"""A runner without a model: the next token is a function of the tokens before it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from quadriga.interfaces import LayersDone, PrefillChunk
from quadriga.types import SampledToken, SequenceState

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


class FakeRunner:
    """Remembers which tokens each row's KV stands for, and fails a test that mixes rows up."""

    num_layers = 8

    def __init__(self, num_rows: int, row_capacity_tokens: int = 256) -> None:
        self.num_rows = num_rows
        self.row_capacity_tokens = row_capacity_tokens
        self.kv: dict[int, list[int]] = {row: [] for row in range(num_rows)}
        self.attached: dict[int, SequenceState] = {}

    @property
    def segment_ends(self) -> tuple[int, ...]:
        return (self.num_layers,)

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        raise AssertionError("a runner without exits runs whole passes")

    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        raise AssertionError("a runner without exits runs whole passes")

    def attach(self, row: int, state: SequenceState) -> None:
        assert row not in self.attached, f"row {row} is taken"
        self.attached[row] = state

    def detach(self, row: int) -> None:
        del self.attached[row]
        self.kv[row] = []

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None = None
    ) -> list[SampledToken | None]:
        out: list[SampledToken | None] = []
        for chunk in chunks:
            assert len(self.kv[chunk.row]) == chunk.start, "chunks must follow one another"
            self.kv[chunk.row].extend(chunk.token_ids)
            token = next_token(self.kv[chunk.row])
            out.append(SampledToken(token, self.num_layers) if chunk.is_last else None)
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
            out.append(SampledToken(next_token(known), self.num_layers))
        return out

    def read_kv(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> list[int]:
        return self.kv[row][start:stop]

    def write_kv(self, row: int, first_layer: int, start: int, kv: list[int]) -> None:
        self.kv[row][start : start + len(kv)] = kv
