"""The KV rows of the native engine and the sequences in them: what there is between two passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from quadriga.core.kv import KVExtent
from quadriga.core.request import SequenceState
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.engine.host_tensor import HostTensor
from quadriga.engine.kv_cache import KVCache
from quadriga.engine.row_engine import kept_at_end
from quadriga.engine.row_parts import RowRest, SuspendedRow
from quadriga.engine.sampler import RowSampler
from quadriga.engine.weights.loaded_model import LoadedModel
from quadriga.errors import InvariantViolation


class NativeRows:
    """The half of `ModelRunner` that runs nothing: who is in which row, and its ways in and out.

    Nothing moves when a token waits: whoever runs it next finds it by its row. One thread calls
    everything except `read_kv` and `write_kv`, which other threads may call for rows that no pass
    is working on.

    Attributes:
        model: What is loaded.
        positions: Of each row's current token, int64 [num_rows]; −1 where none was run.
        hidden: [num_rows, hidden], with which that token left its last segment.
        skipped: What early tokens left behind; None without exits.
    """

    def __init__(self, model: LoadedModel, skipped: SkippedKVStore | None) -> None:
        weights = model.weights
        num_rows = model.cache.num_rows
        self.positions = np.zeros(num_rows, dtype=np.int64)
        self.hidden = torch.zeros(
            num_rows, model.config.hidden_size, dtype=weights.dtype, device=weights.device
        )
        self.model = model
        self.skipped = skipped
        self._samplers: list[RowSampler | None] = [None] * num_rows

    @property
    def num_rows(self) -> int:
        return self._cache.num_rows

    @property
    def row_capacity_tokens(self) -> int:
        return self._cache.capacity

    def attach(self, row: int, state: SequenceState) -> None:
        """See `ModelRunner.attach`. Raises: InvariantViolation when the row is taken or absent."""
        if not 0 <= row < self.num_rows:
            raise InvariantViolation(f"row {row} is outside the {self.num_rows} rows")
        if self._samplers[row] is not None:
            raise InvariantViolation(f"row {row} is taken: {state.sequence_id} cannot attach")
        self._samplers[row] = RowSampler(
            state, self.model.config.vocab_size, self.model.spec.checkpoint.eos_token_ids
        )
        self.positions[row] = -1
        if self.skipped is not None:
            self.skipped.start(row, state.num_tokens - 1)

    def detach(self, row: int) -> None:
        """See `ModelRunner.detach`; a free row may be detached again."""
        self._samplers[row] = None
        self._cache.release(row)
        if self.skipped is not None:
            self.skipped.release(row)

    def set_depth_of(self, row: int, depth: int) -> None:
        """See `ResizableRunner.set_depth_of`."""
        if self.skipped is not None and depth < self.model.spec.depth:
            self.skipped.start(row, self._sampler(row).state.num_tokens - 1, depth)

    def depth_of(self, row: int) -> int:
        """See `ResizableRunner.depth_of`."""
        return self.model.spec.depth if self.skipped is None else self.skipped.depth_of(row)

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Let passes be run for their time alone: afterwards all is as it was.

        Between two segments of a token only; KV that such a pass writes is either what the real
        pass will write again, or is marked as missing again.
        """
        hidden, positions = self.hidden.clone(), self.positions.copy()
        with self.skipped.dry_run() if self.skipped is not None else nullcontext():
            yield
        self.hidden, self.positions = hidden, positions

    def held_bytes(self, rows: Sequence[int]) -> int:
        """Bytes of KV, of hidden states that wait and of kept ones, as far as they are in use."""
        layers = np.diff(np.array([0, *self.model.ends]))
        unit = 2 * self.model.config.kv_size * self.hidden.element_size()
        total = 0
        for row in rows:
            tokens = self._sampler(row).state.num_tokens - 1
            if self.skipped is None:
                total += tokens * self.model.spec.depth * unit
            else:
                total += int((self.skipped.computed(row, tokens) * layers).sum()) * unit
        if self.skipped is None:
            return total
        staged = len(rows) * self.hidden.shape[1] * self.hidden.element_size()
        return total + staged + self.skipped.kept_bytes()

    @torch.inference_mode()
    def suspend(self, row: int) -> SuspendedRow:
        """See `ModelRunner.suspend`."""
        extents = self.extents(row)
        kv = [
            self.read_kv(row, e.first_layer, e.stop_layer - e.first_layer, 0, e.num_tokens).cpu()
            for e in extents
        ]
        suspended = SuspendedRow(extents, kv, self.read_rest(row))
        self.detach(row)
        return suspended

    @torch.inference_mode()
    def restore(self, row: int, state: SequenceState, suspended: SuspendedRow) -> None:
        """See `ModelRunner.restore`."""
        for extent, kv in zip(suspended.extents, suspended.kv, strict=True):
            if extent.first_layer < self.model.spec.depth:
                self.write_kv(row, extent.first_layer, 0, kv)
        self.resume(row, state, suspended.rest)

    def extents(self, row: int) -> list[KVExtent]:
        """See `ModelRunner.extents`; one for each segment."""
        state = self._sampler(row).state
        # The newest token has KV where it was run already and waits at an exit.
        is_run = int(self.positions[row]) == state.num_tokens - 1
        num_tokens = state.num_tokens if is_run else state.num_tokens - 1
        ends = self.model.ends
        tokens = [num_tokens] * len(ends)
        if self.skipped is not None:
            tokens = self.skipped.computed(row, num_tokens).tolist()
        return [KVExtent(*e) for e in zip((0, *ends[:-1]), ends, tokens, strict=True)]

    @torch.inference_mode()
    def read_rest(self, row: int) -> RowRest:
        """See `ModelRunner.read_rest`."""
        num_tokens = self._sampler(row).state.num_tokens
        return RowRest(
            position=int(self.positions[row]),
            hidden=HostTensor.of(self.hidden[row]),
            skipped=None if self.skipped is None else self.skipped.suspend(row, num_tokens),
        )

    @torch.inference_mode()
    def resume(
        self, row: int, state: SequenceState, rest: RowRest, depth: int | None = None
    ) -> None:
        """See `ModelRunner.resume`."""
        if (rest.skipped is None) != (self.skipped is None):
            raise InvariantViolation("a row with exits cannot go on in one without, nor one back")
        if self.skipped is not None and rest.skipped is not None:
            self.skipped.check_segments(rest.skipped, depth)
        self.attach(row, state)
        self.positions[row] = rest.position
        self.hidden[row] = rest.hidden.tensor(self.hidden.device)
        if self.skipped is not None and rest.skipped is not None:
            self.skipped.restore(row, rest.skipped, self.model.fastest(), depth)

    def read_kv(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `ModelRunner.read_kv`."""
        return self._cache.read(row, first_layer, num_layers, start, stop)

    def write_kv(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """See `ModelRunner.write_kv`; layers of the model that are not loaded are left out."""
        cache = self._cache
        num_layers = max(0, min(kv.shape[0], cache.num_layers - first_layer))
        if num_layers < kv.shape[0] <= self.model.full_depth - first_layer:
            kv = kv[:num_layers]
        if len(kv):
            cache.write(row, first_layer, start, kv)

    @property
    def _cache(self) -> KVCache:
        return self.model.cache

    def _sampler(self, row: int) -> RowSampler:
        """The row's. Raises: InvariantViolation: It has no sequence."""
        return self._samplers_of((row,))[0]

    def _samplers_of(self, rows: Sequence[int]) -> list[RowSampler]:
        """The rows' samplers. Raises: InvariantViolation for a row without a sequence."""
        found = self._samplers
        samplers = [s for row in rows if (s := found[row]) is not None]
        if len(samplers) < len(rows):
            missing = [row for row in rows if found[row] is None]
            raise InvariantViolation(f"row {missing[0]} has no sequence attached")
        return samplers

    def _lengths(self) -> dict[int, int]:
        """Row with a sequence → its positions that were run to their end."""
        return {row: s.state.num_tokens - 1 for row, s in enumerate(self._samplers) if s}

    def _follow_depth(self) -> None:
        """The model has other segments now, and other KV memory."""
        if self.skipped is not None:
            model = self.model
            self.skipped.resize(model.ends, model.cache, kept_at_end(model.spec), self._lengths())
