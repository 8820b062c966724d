"""The operations that every contestant is written in, over the service's own loops and runner."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loadgen.model_costs.engine import sequence
from loadgen.paper.baton.queries import Query
from loadgen.paper.baton.record import QueryRecord
from quadriga.clock import SystemClock
from quadriga.core.output import EngineOutput
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.engine.baton.passes import prompt_pass
from quadriga.engine.baton.prompts import PromptSpan, group_prompts
from quadriga.engine.baton.row_kv import RowKV
from quadriga.engine.baton.runner import BatonRunner
from quadriga.interfaces import PrefillChunk
from quadriga.scheduling.colocated import ColocatedLoop
from quadriga.scheduling.sequence import RunningSequence

MEMORY_EVERY = 8
"""Passes between two looks at the memory."""


@dataclass(slots=True, eq=False)
class LiveQuery:
    """A query under way.

    Attributes:
        num_prefilled: Prompt tokens computed so far.
    """

    query: Query
    state: SequenceState
    num_prefilled: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.state.output_ids) >= self.query.num_output


class Relay(ColocatedLoop):
    """The service's loops at work on a query set; notes in `record` what they do.

    A query goes on to decode when its contestant says so, and until it is released: what comes
    after its end is of no use.
    """

    def __init__(self, runner: BatonRunner, record: QueryRecord) -> None:
        super().__init__(
            runner,
            runner.spec,
            clock=SystemClock(),
            chunk_tokens=sys.maxsize,
            kv_capacity_tokens=runner.num_rows * runner.row_capacity_tokens,
        )
        self.runner = runner
        self.record = record
        self._live: dict[str, LiveQuery] = {}
        self._joined: set[str] = set()
        self._chunks: list[PrefillChunk] = []  # of the pass under way
        self._token_bytes = runner.geometry.values_per_token * torch.finfo(self._dtype).bits // 8
        self._passes = 0

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.runner.spec.dtype)
        return dtype

    def start(self, query: Query) -> LiveQuery:
        """A query is under way."""
        # Nothing ends it here: rows that are done may idle until the longest answer is.
        sampling = SamplingParams(
            max_tokens=self.runner.row_capacity_tokens - len(query.prompt_ids),
            temperature=0.0,
            ignore_eos=True,
        )
        state = sequence(str(query.index), list(query.prompt_ids), sampling)
        live = LiveQuery(query, state)
        self._live[state.sequence_id] = live
        return live

    def let_go(self, batch: Sequence[LiveQuery]) -> list[LiveQuery]:
        """Let go of the rows of those that are done; returns the others."""
        for live in batch:
            if live.is_done:
                self.release(live.state.sequence_id)
                self._joined.discard(live.state.sequence_id)
                del self._live[live.state.sequence_id]
        return [live for live in batch if not live.is_done]

    def compute(self, lives: Sequence[LiveQuery]) -> None:
        """Compute prompts, similar lengths together, and their first tokens."""
        for live in lives:
            self.submit(live.state)
        while self.prefill.has_work:
            said = self.step()
            chunks, self._chunks = self._chunks, []
            groups = group_prompts(chunks, max_padding=self.runner.max_padding)
            computed = sum(len(g) * max(len(chunks[i].token_ids) for i in g) for g in groups)
            self.record.passed(computed=computed, useful=sum(len(c.token_ids) for c in chunks))
            self._emitted(said)

    def on_kv(
        self, sequence: RunningSequence, chunk: PrefillChunk, first_layer: int, num_layers: int
    ) -> None:
        """Note that a piece of a prompt is computed."""
        self._live[sequence.state.sequence_id].num_prefilled = chunk.stop
        self._chunks.append(chunk)

    def on_computed(self, sequence: RunningSequence) -> None:
        """Leave a computed sequence where it is, until its contestant lets it join."""

    def compute_padded(self, lives: Sequence[LiveQuery]) -> None:
        """Compute prompts in one pass, each padded to the longest, and their first tokens."""
        runner = self.runner
        rows = [
            RowKV(
                runner.geometry,
                self._dtype,
                runner.model.device,
                max_tokens=runner.row_capacity_tokens,
            )
            for _ in lives
        ]
        spans = [
            PromptSpan(row, live.query.prompt_ids, 0) for row, live in zip(rows, lives, strict=True)
        ]
        lengths = [len(live.query.prompt_ids) for live in lives]
        keep = sorted({n - 1 for n in lengths})
        logits = prompt_pass(runner.model, runner.num_layers, spans, keep)
        self.record.passed(computed=len(lives) * max(lengths), useful=sum(lengths))
        ended = []
        for i, (live, row, n) in enumerate(zip(lives, rows, lengths, strict=True)):
            state, token_id = live.state, int(logits[i, keep.index(n - 1)].argmax())
            slot = self.decode.reserve(state.sequence_id, state.max_total_tokens)
            runner.write_kv(slot.row, 0, 0, row.prefix(n))
            live.num_prefilled = n
            state.output_ids.append(token_id)
            state.exit_layers.append(runner.num_layers)
            self.decode.join(state)
            self._joined.add(state.sequence_id)
            ended.append((live.query, token_id))
        self.record.emitted(ended)
        self._look()

    def run_batch(self, batch: Sequence[LiveQuery]) -> None:
        """One step of the batch; rows whose query is done take part, to no use."""
        for live in batch:
            if live.state.sequence_id not in self._joined:
                self._joined.add(live.state.sequence_id)
                self.join(live.state)
        useful = sum(not live.is_done for live in batch)
        said = [emission for _, emission in self.decode.step()]
        self.record.steps += 1
        self.record.passed(computed=len(batch), useful=useful)
        self._emitted(said)

    def _emitted(self, said: Sequence[EngineOutput]) -> None:
        self.record.emitted((self._live[e.sequence_id].query, e.token_ids[0]) for e in said)
        self._look()

    def _look(self) -> None:
        """Now and then, note the memory held."""
        self._passes += 1
        if self._passes % MEMORY_EVERY:
            return
        memory = self.runner.memory()
        cells = memory.width * memory.num_batch_rows
        live = sum(
            x.num_prefilled + max(0, len(x.state.output_ids) - 1)
            for x in self._live.values()
            if not x.is_done
        )
        self.record.held(
            taken_bytes=cells * self._token_bytes + memory.row_bytes,
            allocated_bytes=memory.kv_bytes,
            live_bytes=live * self._token_bytes,
        )
