"""A runner without a model that loads and drops layers, and fails a test that runs what is owed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quadriga.clock import ManualClock
from quadriga.core.request import SequenceState
from quadriga.errors import ConfigError
from tests.fake_runner import FakeSegmentRunner, FakeSuspended

ALL_ENDS = (2, 5, 8)
KV_BYTES = 8 * 2048


class FakeDepthRunner(FakeSegmentRunner):
    """`FakeSegmentRunner` with the first of its layers; `prepared` is a number of layers.

    Every row owes all its positions after its replica grew: nothing is kept.
    """

    def __init__(self, num_rows: int, depth: int = 8, *, clock: ManualClock | None = None) -> None:
        self.num_layers = depth
        super().__init__(num_rows, ends=_cut(depth), clock=clock)
        self.full_depth = ALL_ENDS[-1]
        self.owed: dict[int, int] = {}  # row → positions
        self.complete: dict[int, int] = {}  # row → layers of its KV, for those that owe
        self.num_repaid = 0
        self._came_back: set[int] = set()  # from host memory, no pass since

    @property
    def kv_capacity_tokens(self) -> int:
        return KV_BYTES // self.num_layers

    def take_depth(self, prepared: int) -> None:
        if prepared not in ALL_ENDS or prepared <= self.num_layers:
            raise ConfigError(f"depth: {prepared} is not deeper than {self.num_layers}")
        for row in self.attached:
            self.complete.setdefault(row, self.num_layers)
            self.owed[row] = len(self.kv[row])
        self._set(prepared)

    def check_drop(self, depth: int) -> None:
        if depth not in ALL_ENDS or depth >= self.num_layers:
            raise ConfigError(f"depth: {depth} is not below {self.num_layers}")

    def drop_to(self, depth: int) -> None:
        self.check_drop(depth)
        for row, segment in self.next_segment.items():
            assert segment < len(_cut(depth)), f"row {row} waits for layers that go"
        self._set(depth)
        for row in [row for row, layers in self.complete.items() if layers >= depth]:
            del self.complete[row], self.owed[row]

    def set_depth_of(self, row: int, depth: int) -> None:
        self.complete[row], self.owed[row] = depth, len(self.kv[row])

    def depth_of(self, row: int) -> int:
        return self.complete.get(row, self.num_layers)

    def repay(self, row: int, max_tokens: int) -> int:
        assert self.owed.get(row), f"row {row} owes nothing"
        self.num_repaid += min(max_tokens, self.owed[row])
        self.owed[row] -= min(max_tokens, self.owed[row])
        if self.owed[row]:
            return self.owed[row]
        del self.owed[row], self.complete[row]
        return 0

    def detach(self, row: int) -> None:
        super().detach(row)
        self._came_back.discard(row)
        self.owed.pop(row, None)
        self.complete.pop(row, None)

    def suspend(self, row: int) -> FakeSuspended:
        depth = self.depth_of(row)
        return replace(super().suspend(row), depth=depth)

    def restore(self, row: int, state: SequenceState, suspended: FakeSuspended) -> None:
        super().restore(row, state, suspended)
        self._came_back.add(row)
        if suspended.depth < self.num_layers:
            self.set_depth_of(row, suspended.depth)

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        for row in rows:
            assert self._ends[stop - 1] <= self.depth_of(row), f"row {row} owes layers"
            if row in self._came_back and first == 0 and self.next_segment[row]:
                self.kv[row].pop()  # the layers its token has done with are gone: it begins again
                self.next_segment[row] = 0
            self._came_back.discard(row)
        return super().advance(rows, first, stop)

    def _set(self, depth: int) -> None:
        self.num_layers = depth
        self._ends = _cut(depth)
        self._at_exit.clear()


def _cut(depth: int) -> tuple[int, ...]:
    return tuple(end for end in ALL_ENDS if end <= depth)
