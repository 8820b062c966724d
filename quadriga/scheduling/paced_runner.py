"""A runner that pretends to be a slower device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quadriga.config.pacing import PacedDevice
from quadriga.core.kv import KVExtent
from quadriga.core.request import SampledToken, SequenceState
from quadriga.errors import ConfigError
from quadriga.interfaces import LayersDone, ModelRunner, PrefillChunk, ResizableRunner, Suspended


class PacedRunner:
    """A runner whose decode steps take at least as long as on a modelled device.

    Everything else passes through. Where a step really takes longer, the machine is too small for
    the experiment.
    """

    def __init__(
        self,
        runner: ModelRunner,
        device: PacedDevice,
        *,
        now_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device = device
        self._runner = runner
        self._now_s = now_s
        self._sleep = sleep
        self._states: dict[int, SequenceState] = {}

    @property
    def num_layers(self) -> int:
        return self._runner.num_layers

    @property
    def segment_ends(self) -> tuple[int, ...]:
        return self._runner.segment_ends

    @property
    def num_rows(self) -> int:
        return self._runner.num_rows

    @property
    def row_capacity_tokens(self) -> int:
        return self._runner.row_capacity_tokens

    def attach(self, row: int, state: SequenceState) -> None:
        """See `ModelRunner.attach`."""
        self._runner.attach(row, state)
        self._states[row] = state

    def detach(self, row: int) -> None:
        """See `ModelRunner.detach`."""
        self._states.pop(row, None)
        self._runner.detach(row)

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None = None
    ) -> list[SampledToken | None]:
        """See `ModelRunner.prefill`; not paced."""
        return self._runner.prefill(chunks, on_layers)

    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.decode`; returns no earlier than the modelled time."""
        with self._paced(rows, 1.0):
            return self._runner.decode(rows)

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        """See `ModelRunner.advance`; takes its layers' share of the modelled time."""
        ends = self.segment_ends
        layers = ends[stop - 1] - (ends[first - 1] if first else 0)
        with self._paced(rows, layers / ends[-1]):
            return self._runner.advance(rows, first, stop)

    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.emit`."""
        return self._runner.emit(rows)

    @property
    def num_filled(self) -> int:
        """See `ModelRunner.num_filled`."""
        return self._runner.num_filled

    @contextmanager
    def _paced(self, rows: Sequence[int], share: float) -> Iterator[None]:
        started_s = self._now_s()
        num_tokens = sum(self._states[row].num_tokens for row in rows)
        yield
        left_s = started_s + self.device.pass_s(share, len(rows), num_tokens) - self._now_s()
        if left_s > 0:
            self._sleep(left_s)

    def suspend(self, row: int) -> Suspended:
        """See `ModelRunner.suspend`."""
        self._states.pop(row, None)
        return self._runner.suspend(row)

    def restore(self, row: int, state: SequenceState, suspended: object) -> None:
        """See `ModelRunner.restore`."""
        self._runner.restore(row, state, suspended)
        self._states[row] = state

    def extents(self, row: int) -> list[KVExtent]:
        """See `ModelRunner.extents`."""
        return self._runner.extents(row)

    def read_rest(self, row: int) -> object:
        """See `ModelRunner.read_rest`."""
        return self._runner.read_rest(row)

    def resume(
        self, row: int, state: SequenceState, rest: object, depth: int | None = None
    ) -> None:
        """See `ModelRunner.resume`."""
        self._runner.resume(row, state, rest, depth)
        self._states[row] = state

    def read_kv(self, row: int, first_layer: int, num_layers: int, start: int, stop: int) -> object:
        """See `ModelRunner.read_kv`."""
        return self._runner.read_kv(row, first_layer, num_layers, start, stop)

    def write_kv(self, row: int, first_layer: int, start: int, kv: object) -> None:
        """See `ModelRunner.write_kv`."""
        self._runner.write_kv(row, first_layer, start, kv)

    # See `ResizableRunner`: what is paced changes its depth if what is inside does.

    @property
    def full_depth(self) -> int:
        runner = self._runner
        return runner.full_depth if isinstance(runner, ResizableRunner) else runner.num_layers

    @property
    def kv_capacity_tokens(self) -> int:
        return self._runner.kv_capacity_tokens

    def take_depth(self, prepared: object) -> None:
        self._resizable.take_depth(prepared)

    def check_drop(self, depth: int) -> None:
        self._resizable.check_drop(depth)

    def drop_to(self, depth: int) -> None:
        self._resizable.drop_to(depth)

    def set_depth_of(self, row: int, depth: int) -> None:
        self._resizable.set_depth_of(row, depth)

    def depth_of(self, row: int) -> int:
        runner = self._runner
        return runner.depth_of(row) if isinstance(runner, ResizableRunner) else runner.num_layers

    def repay(self, row: int, max_tokens: int) -> int:
        return self._resizable.repay(row, max_tokens)

    @property
    def _resizable(self) -> ResizableRunner:
        if not isinstance(self._runner, ResizableRunner):
            raise ConfigError(
                "depth: the paced engine runs its model as it is; only the native engine changes "
                "its depth while it serves",
                param="depth",
            )
        return self._runner
