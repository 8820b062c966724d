"""BATON without the split, which the paper equates with Orca: new prompts join as they are.

In the step in which a prompt joins, every row of the batch computes as many positions as the prompt
has: the new row its prompt, the others one token and padding. All caches grow by that much:

    columns            │ before │ the pass in which c joins │ after
    row a              │ a a a  │ a 0 0 0 0 0               │ a a …
    row c (was b's)    │ 0 0 0  │ c c c c c c               │ c c …

Columns in front of the first token of all rows are released.

Source: BATON §4.1 (vector shaping).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from loadgen.paper.baton.queries import Query
from loadgen.paper.baton.record import Record
from loadgen.paper.baton.relay import MEMORY_EVERY
from quadriga.engine.baton.dense import DenseBatch, StepInputs
from quadriga.engine.baton.passes import StoreCache
from quadriga.engine.baton.runner import BatonRunner

MAX_COLUMNS = 1 << 17
"""The batch's width has no natural limit: it grows with the prompts that join."""


class InlineBatch(DenseBatch):
    """A dense batch whose rows may have padding inside.

    The base class's `length` of a row counts the columns from its first token on.
    """

    def __init__(self, runner: BatonRunner, *, max_rows: int) -> None:
        super().__init__(
            runner.geometry,
            getattr(torch, runner.spec.dtype),
            runner.model.device,
            max_rows=max_rows,
            row_capacity_tokens=MAX_COLUMNS,
        )
        self.num_tokens: dict[int, int] = {}  # by row

    def begin_step(self) -> StepInputs:
        """See `DenseBatch.begin_step`; a row's position is what it has computed."""
        inputs = super().begin_step()
        positions = [[self.num_tokens[row]] for row in inputs.rows]
        return replace(inputs, positions=torch.tensor(positions))

    def end_step(self) -> None:
        super().end_step()
        for row in self._slots:
            self.num_tokens[row] += 1

    def begin_join(self, lengths: Mapping[int, int]) -> StepInputs:
        """Give rows to prompts and begin the pass in which they join.

        Args:
            lengths: Prompt tokens by row.
        """
        for row in lengths:
            holes = [slot for slot, held in enumerate(self._rows) if held is None]
            slot = holes[0] if holes else len(self._rows)
            self._reserve(num_slots=slot + 1, left=0, right=0)
            if slot == len(self._rows):
                self._rows.append(None)
                self._lengths.append(0)
            self._rows[slot], self._lengths[slot], self._slots[row] = row, 0, slot
            self._mask[slot, : self._end] = 0
            self.num_tokens[row] = 0
        self._close_holes()
        self._release()
        width = max(lengths.values())
        self._reserve(num_slots=len(self._rows), left=0, right=width)
        count, end = len(self._rows), self._end
        rows = [row for row in self._rows if row is not None]
        own = torch.tensor([lengths.get(row, 1) for row in rows])
        columns = torch.arange(width)
        self._mask[:count, end : end + width] = (columns < own[:, None]).to(self._mask.dtype)
        starts = torch.tensor([self.num_tokens[row] for row in rows])
        positions = starts[:, None] + columns.clamp(max=own.max() - 1)
        return StepInputs(rows, self._mask[:count, self._begin : end + width], positions)

    def end_join(self, lengths: Mapping[int, int]) -> None:
        """Make the pass's columns part of every row."""
        width = max(lengths.values())
        self._end += width
        for row, slot in self._slots.items():
            self._lengths[slot] += width
            self.num_tokens[row] += lengths.get(row, 1)


class InlineRelay:
    """The batch at work on a query set, as `Relay` is for the others."""

    def __init__(self, runner: BatonRunner, record: Record, batch: int) -> None:
        self._runner = runner
        self._record = record
        self._batch = InlineBatch(runner, max_rows=batch)
        self._queries: dict[int, Query] = {}  # by row, which is the query's index
        self._last: dict[int, int] = {}  # newest token by row
        self._token_bytes = runner.geometry.values_per_token * 4
        self._passes = 0

    @property
    def num_running(self) -> int:
        return len(self._queries)

    @torch.no_grad()
    def step(self, joining: Sequence[Query]) -> None:
        """One token of every running query, and the prompts of those that join."""
        batch = self._batch
        lengths = {q.index: len(q.prompt_ids) for q in joining}
        inputs = batch.begin_join(lengths) if lengths else batch.begin_step()
        self._queries |= {q.index: q for q in joining}
        width = inputs.positions.shape[1]
        ids = torch.zeros((len(inputs.rows), width), dtype=torch.int64)
        for i, row in enumerate(inputs.rows):
            own = self._queries[row].prompt_ids if row in lengths else (self._last[row],)
            ids[i, : len(own)] = torch.tensor(own)
        own_lengths = [lengths.get(row, 1) for row in inputs.rows]
        keep = sorted({n - 1 for n in own_lengths})
        cache = StoreCache(batch, self._runner.num_layers)
        logits = self._runner.model(ids, inputs.mask, inputs.positions, cache, keep)
        if lengths:
            batch.end_join(lengths)
        else:
            batch.end_step()
        best = logits.argmax(dim=-1)
        tokens = [int(best[i, keep.index(n - 1)]) for i, n in enumerate(own_lengths)]
        self._last.update(zip(inputs.rows, tokens, strict=True))
        self._note(inputs.rows, tokens, computed=ids.numel(), useful=sum(own_lengths))

    def _note(
        self, rows: Sequence[int], tokens: Sequence[int], *, computed: int, useful: int
    ) -> None:
        record = self._record
        record.steps += 1
        record.passed(computed=computed, useful=useful)
        record.emitted((self._queries[r], t) for r, t in zip(rows, tokens, strict=True))
        self._passes += 1
        if self._passes % MEMORY_EVERY == 0:
            live = sum(self._batch.num_tokens[row] for row in self._queries)
            record.held(
                taken_bytes=len(self._batch) * self._batch.width * self._token_bytes,
                allocated_bytes=self._batch.num_bytes,
                live_bytes=live * self._token_bytes,
            )
        for row in rows:
            if row in record.done_s:
                self._batch.remove(row)
                del self._queries[row], self._last[row], self._batch.num_tokens[row]
