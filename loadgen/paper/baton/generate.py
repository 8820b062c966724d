"""Run-to-completion as `transformers` itself does it: `generate` on left-padded batches.

The paper's "Benchmark" taken by its word. Its cache is copied at every step and the loop around it
does more, so this contestant stands beside `run_to_completion`, which does the same on our engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from loadgen.bench.engines.hf_transformers import generate_padded
from loadgen.paper.baton.queries import Query
from loadgen.paper.baton.record import QueryRecord
from loadgen.paper.baton.relay import MEMORY_EVERY
from quadriga.engine.baton.runner import BatonRunner


def generate(
    runner: BatonRunner, record: QueryRecord, queries: Sequence[Query], batch: int
) -> None:
    token_bytes = runner.geometry.values_per_token * 4
    for first in range(0, len(queries), batch):
        _generate_batch(runner, record, queries[first : first + batch], token_bytes)


def _generate_batch(
    runner: BatonRunner, record: QueryRecord, queries: Sequence[Query], token_bytes: int
) -> None:
    longest = max(len(q.prompt_ids) for q in queries)
    observer = _Observer(record, queries, longest, token_bytes)
    generate_padded(
        runner.model.unwrapped,
        [q.prompt_ids for q in queries],
        max(q.num_output for q in queries),
        stopping_criteria=StoppingCriteriaList([observer]),
    )


class _Observer(StoppingCriteria):
    """Stops nothing; notes every step, as each token is an answer as soon as it is there."""

    def __init__(
        self, record: QueryRecord, queries: Sequence[Query], longest: int, token_bytes: int
    ) -> None:
        self._record, self._queries = record, queries
        self._longest, self._token_bytes = longest, token_bytes
        self._num_steps = 0

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        record, queries = self._record, self._queries
        tokens = input_ids[:, -1].tolist()
        if self._num_steps == 0:
            prompts = sum(len(q.prompt_ids) for q in queries)
            record.passed(computed=len(queries) * self._longest, useful=prompts)
        else:
            useful = sum(q.index not in record.done_s for q in queries)
            record.passed(computed=len(queries), useful=useful)
            record.steps += 1
        record.emitted(zip(queries, tokens, strict=True))
        self._num_steps += 1
        if self._num_steps % MEMORY_EVERY == 0:
            taken = len(queries) * (self._longest + self._num_steps - 1) * self._token_bytes
            live = sum(
                len(q.prompt_ids) + self._num_steps - 1
                for q in queries
                if q.index not in record.done_s
            )
            record.held(
                taken_bytes=taken, allocated_bytes=taken, live_bytes=live * self._token_bytes
            )
        return torch.zeros(len(queries), dtype=torch.bool)
