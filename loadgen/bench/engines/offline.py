"""Offline generation with our own engine, through `quadriga.LLM`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.bench.engines.base import GeneratedTokens
from loadgen.bench.engines.workloads import Workload
from loadgen.model_costs.engine import engine_spec
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.core.request import SamplingParams
from quadriga.errors import ConfigError
from quadriga.llm import LLM

if TYPE_CHECKING:
    from quadriga.engine import AnyRunner


class QuadrigaPeer:
    """The engine under its own name."""

    name = "quadriga"

    def __init__(self, checkpoint: Path, threads: int, weights: str = "auto") -> None:
        self._checkpoint = read_checkpoint(str(checkpoint))
        self._weights = weights
        self._threads = threads
        self._runner: AnyRunner | None = None

    def prepare(self, workloads: list[Workload]) -> None:
        """Load the model with rows for the widest and longest of the workloads."""
        from quadriga.engine import load_runner

        _check(self._checkpoint, workloads)
        self._runner = load_runner(
            engine_spec(
                self._checkpoint,
                threads=self._threads,
                weights=self._weights,
                num_rows=max(w.concurrency for w in workloads),
                row_capacity_tokens=max(w.longest for w in workloads),
            )
        )

    def generate(self, workload: Workload) -> GeneratedTokens:
        """Run one workload to its end."""
        assert self._runner is not None, "prepare comes first"
        return run_offline(LLM.over(self._runner, max_slots=workload.concurrency), workload)


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


def run_offline(llm: LLM, workload: Workload) -> GeneratedTokens:
    """Generate exactly `max_tokens` greedy tokens per request."""
    started_s = time.perf_counter()
    outputs = llm.generate(
        [request.prompt for request in workload.requests],
        [
            SamplingParams(request.max_tokens, temperature=0.0, ignore_eos=True)
            for request in workload.requests
        ],
        progress=False,
    )
    return GeneratedTokens(
        seconds=time.perf_counter() - started_s,
        ttft_s=[output.ttft_s for output in outputs],
        token_ids=[output.checked().token_ids for output in outputs],
    )
