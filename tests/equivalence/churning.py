"""Sequences that join and leave a batch at random."""

from __future__ import annotations

import random
from typing import Any

from quadriga.core.request import SequenceState
from quadriga.interfaces import PrefillChunk


class ChurningBatch:
    """Runs sequences with random joins, chunk sizes, row choices and leaves.

    Args:
        num_rows: The first rows, which it may use; None: all.
    """

    def __init__(self, runner: Any, *, seed: int, num_rows: int | None = None) -> None:
        self._runner = runner
        self._rng = random.Random(seed)
        self._free = list(range(num_rows or runner.num_rows))
        self._running: dict[int, SequenceState] = {}

    def run(self, states: list[SequenceState]) -> None:
        waiting = list(states)
        while waiting or self._is_busy:
            arrivals = {}
            while waiting and self._free and self._rng.random() < 0.6:
                arrivals[self._take_row()] = waiting.pop(0)
            if arrivals:
                self._prefill(arrivals)
            self._disturb()
            if self._running:
                self._decode()

    @property
    def _is_busy(self) -> bool:
        return bool(self._running)

    def _take_row(self) -> int:
        return self._free.pop(self._rng.randrange(len(self._free)))

    def _prefill(self, left: dict[int, SequenceState]) -> None:
        """In chunks, some prompts ahead of the others."""
        done = dict.fromkeys(left, 0)
        for row, state in left.items():
            self._runner.attach(row, state)
        while left:
            chunks = []
            for row, state in left.items():
                start = done[row]
                stop = min(len(state.prompt_ids), start + self._rng.randint(1, 48))
                is_last = stop == len(state.prompt_ids)
                chunks.append(PrefillChunk(row, state.prompt_ids[start:stop], start, is_last))
                done[row] = stop
            for chunk, token in zip(chunks, self._runner.prefill(chunks), strict=True):
                assert (token is not None) == chunk.is_last
                if token is not None:
                    self._emit(chunk.row, left.pop(chunk.row), token.token_id)

    def _disturb(self) -> None:
        """Between a pass over prompts and a step."""

    def _choose_rows(self) -> list[int]:
        """Those that decode, in random order."""
        return self._rng.sample(sorted(self._running), len(self._running))

    def _decode(self) -> None:
        rows = self._choose_rows()
        states = [self._running[row] for row in rows]
        for row, state, token in zip(rows, states, self._runner.decode(rows), strict=True):
            assert token.exit_layer == self._runner.num_layers
            self._emit(row, state, token.token_id)

    def _emit(self, row: int, state: SequenceState, token_id: int) -> None:
        self._running[row] = state
        state.output_ids.append(token_id)
        if len(state.output_ids) >= state.sampling.max_tokens:
            del self._running[row]
            self._runner.detach(row)
            self._free.append(row)
