"""The operations that every contestant is written in, over the service's own relay-batch runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loadgen.paper.baton_queries import Query
from loadgen.paper.baton_record import Record
from quadriga.engine.baton.passes import prompt_pass
from quadriga.engine.baton.prompts import PromptSpan, group_prompts
from quadriga.engine.baton.row_kv import RowKV
from quadriga.engine.baton.runner import BatonRunner
from quadriga.interfaces import PrefillChunk
from quadriga.types import SamplingParams, SequenceState

MEMORY_EVERY = 8
"""Passes between two looks at the memory."""


@dataclass(slots=True, eq=False)
class Live:
    """A query that holds a row.

    Attributes:
        num_prefilled: Prompt tokens computed so far.
    """

    query: Query
    state: SequenceState
    row: int
    num_prefilled: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.state.output_ids) >= self.query.num_output


def make_state(query: Query) -> SequenceState:
    """The sequence behind a query: greedy, and nothing ends it but its length."""
    return SequenceState(
        sequence_id=str(query.index),
        request_id=str(query.index),
        model="",
        prompt_ids=list(query.prompt_ids),
        sampling=SamplingParams(max_tokens=query.num_output, temperature=0.0, ignore_eos=True),
        ingress_id="",
        arrival_unix_s=0.0,
        deadline_unix_s=float("inf"),
    )


class Relay:
    """A runner at work on a query set; notes in `record` what it does."""

    def __init__(self, runner: BatonRunner, record: Record) -> None:
        self.runner = runner
        self.record = record
        self._free = list(range(runner.num_rows - 1, -1, -1))
        self._live: dict[int, Live] = {}
        self._token_bytes = runner.geometry.values_per_token * torch.finfo(self._dtype).bits // 8
        self._passes = 0

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.runner.spec.dtype)
        return dtype

    def start(self, query: Query) -> Live:
        """Give a query a row."""
        live = Live(query, make_state(query), self._free.pop())
        self.runner.attach(live.row, live.state)
        self._live[live.row] = live
        return live

    def release(self, batch: Sequence[Live]) -> list[Live]:
        """Let go of the rows of those that are done; returns the others."""
        for live in batch:
            if live.is_done:
                self.runner.detach(live.row)
                self._free.append(live.row)
                del self._live[live.row]
        return [live for live in batch if not live.is_done]

    def prefill(self, lives: Sequence[Live], *, budget: int | None = None) -> None:
        """Compute prompts, similar lengths together, and their first tokens.

        Args:
            budget: At most so many tokens, the first in line first; None is all.
        """
        chunks, chosen = [], []
        left = budget if budget is not None else sum(len(x.query.prompt_ids) for x in lives)
        for live in lives:
            prompt, start = live.query.prompt_ids, live.num_prefilled
            stop = min(len(prompt), start + left)
            if stop > start:
                is_last = stop == len(prompt)
                chunks.append(PrefillChunk(live.row, prompt[start:stop], start, is_last))
                chosen.append(live)
                left -= stop - start
        if not chunks:
            return
        sampled = self.runner.prefill(chunks)
        groups = group_prompts(chunks, max_padding=self.runner.max_padding)
        computed = sum(len(g) * max(len(chunks[i].token_ids) for i in g) for g in groups)
        self.record.passed(computed=computed, useful=sum(len(c.token_ids) for c in chunks))
        ended = []
        for live, chunk, token in zip(chosen, chunks, sampled, strict=True):
            live.num_prefilled += len(chunk.token_ids)
            if token is not None:
                live.state.output_ids.append(token.token_id)
                ended.append((live.query, token.token_id))
        self.record.emitted(ended)
        self._look()

    def prefill_padded(self, lives: Sequence[Live]) -> None:
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
            token_id = int(logits[i, keep.index(n - 1)].argmax())
            runner.write_kv(live.row, 0, 0, row.prefix(n))
            live.num_prefilled = n
            live.state.output_ids.append(token_id)
            ended.append((live.query, token_id))
        self.record.emitted(ended)
        self._look()

    def decode(self, batch: Sequence[Live]) -> None:
        """One step of the batch; rows whose query is done take part, to no use."""
        useful = sum(not live.is_done for live in batch)
        tokens = self.runner.decode([live.row for live in batch])
        for live, token in zip(batch, tokens, strict=True):
            live.state.output_ids.append(token.token_id)
        record = self.record
        record.steps += 1
        record.passed(computed=len(batch), useful=useful)
        record.emitted(
            (live.query, token.token_id) for live, token in zip(batch, tokens, strict=True)
        )
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
