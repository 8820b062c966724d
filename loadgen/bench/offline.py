"""Offline generation with our own engine: prefill and decode in one process, over one runner."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from loadgen.bench.peers.base import Generation
from loadgen.bench.workloads import Request, Workload
from quadriga.checkpoint import Checkpoint, read_checkpoint
from quadriga.engine_spec import EngineSpec
from quadriga.errors import ConfigError
from quadriga.files import cache_folder
from quadriga.interfaces import ModelRunner, PrefillChunk
from quadriga.types import SamplingParams, SequenceState

PREFILL_TOKENS = 512
"""Prompt tokens in one forward pass, at most; a longer prompt is chunked."""


class QuadrigaPeer:
    """The engine under its own name."""

    name = "quadriga"

    def __init__(self, checkpoint: Path, threads: int) -> None:
        self._checkpoint = read_checkpoint(str(checkpoint))
        self._threads = threads
        self._runner: ModelRunner | None = None

    def prepare(self, workloads: list[Workload]) -> None:
        """Load the model with rows for the widest and longest of the workloads."""
        from quadriga.engine import load_runner

        _check(self._checkpoint, workloads)
        self._runner = load_runner(
            engine_spec(
                self._checkpoint,
                threads=self._threads,
                num_rows=max(w.concurrency for w in workloads),
                row_capacity_tokens=max(w.longest for w in workloads),
            )
        )

    def generate(self, workload: Workload) -> Generation:
        """Run one workload to its end."""
        assert self._runner is not None, "prepare comes first"
        return OfflineDriver(self._runner).run(workload)


def engine_spec(
    checkpoint: Checkpoint, *, threads: int, num_rows: int, row_capacity_tokens: int
) -> EngineSpec:
    """The engine at full depth in float32, compiled before the clock starts."""
    return EngineSpec(
        checkpoint=checkpoint,
        depth=checkpoint.num_layers,
        device="cpu",
        dtype="float32",
        threads=threads,
        compile="wait",
        cache_dir=cache_folder(),
        num_rows=num_rows,
        row_capacity_tokens=row_capacity_tokens,
        kv_capacity_tokens=num_rows * row_capacity_tokens,
    )


def _check(checkpoint: Checkpoint, workloads: list[Workload]) -> None:
    for workload in workloads:
        largest = max(max(r.prompt) for r in workload.requests)
        if largest >= checkpoint.vocab_size:
            raise ConfigError(
                f"workload {workload.name}: token id {largest} is beyond the "
                f"{checkpoint.vocab_size} of {checkpoint.id}"
            )
        if workload.longest > checkpoint.max_model_len:
            raise ConfigError(
                f"workload {workload.name}: {workload.longest} tokens are beyond the "
                f"{checkpoint.max_model_len} positions of {checkpoint.id}"
            )


class OfflineDriver:
    """Continuous batching without a service: rows are refilled the step they fall free.

    A row's KV stays where prefill put it; decode goes on in place.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._free: list[int] = []
        self._running: dict[int, SequenceState] = {}

    def run(self, workload: Workload) -> Generation:
        """Generate exactly `max_tokens` greedy tokens per request."""
        states = [_state(i, r) for i, r in enumerate(workload.requests)]
        num_rows = min(workload.concurrency, self._runner.num_rows)
        self._free = list(range(num_rows - 1, -1, -1))
        self._running = {}
        waiting = deque(states)
        first_token_s: dict[str, float] = {}
        started_s = time.perf_counter()
        while waiting or self._running:
            if waiting and self._free:
                for state in self._prefill(waiting):
                    first_token_s[state.sequence_id] = time.perf_counter() - started_s
            if self._running:
                self._decode()
        seconds = time.perf_counter() - started_s
        return Generation(
            seconds=seconds,
            ttft_s=[first_token_s[s.sequence_id] for s in states],
            token_ids=[s.output_ids for s in states],
        )

    def _prefill(self, waiting: deque[SequenceState]) -> list[SequenceState]:
        """One forward pass over as many waiting prompts as rows and budget allow."""
        chunks: list[PrefillChunk] = []
        started: list[SequenceState] = []
        budget = PREFILL_TOKENS
        while waiting and self._free and (not chunks or len(waiting[0].prompt_ids) <= budget):
            state = waiting.popleft()
            row = self._free.pop()
            self._runner.attach(row, state)
            start = self._prefill_head(row, state)
            chunks.append(PrefillChunk(row, state.prompt_ids[start:], start, True))
            budget -= len(state.prompt_ids) - start
            started.append(state)
        for chunk, state, token in zip(chunks, started, self._runner.prefill(chunks), strict=True):
            assert token is not None, "the last chunk of a prompt samples"
            state.output_ids.append(token.token_id)
            self._running[chunk.row] = state
        self._drop_finished()
        return started

    def _prefill_head(self, row: int, state: SequenceState) -> int:
        """Compute all but the last chunk of a long prompt; return where that one starts."""
        start = 0
        while len(state.prompt_ids) - start > PREFILL_TOKENS:
            ids = state.prompt_ids[start : start + PREFILL_TOKENS]
            self._runner.prefill([PrefillChunk(row, ids, start, False)])
            start += PREFILL_TOKENS
        return start

    def _decode(self) -> None:
        for state, token in zip(
            self._running.values(), self._runner.decode(list(self._running)), strict=True
        ):
            state.output_ids.append(token.token_id)
        self._drop_finished()

    def _drop_finished(self) -> None:
        done = [
            row
            for row, state in self._running.items()
            if len(state.output_ids) >= state.sampling.max_tokens
        ]
        for row in done:
            del self._running[row]
            self._runner.detach(row)
            self._free.append(row)


def _state(index: int, request: Request) -> SequenceState:
    return SequenceState(
        sequence_id=str(index),
        request_id=str(index),
        model="",
        prompt_ids=request.prompt,
        sampling=SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True),
        ingress_id="",
        arrival_unix_s=0.0,
        deadline_unix_s=float("inf"),
    )
