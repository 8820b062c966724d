"""`transformers` generate: static batches, padded on the left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from loadgen.bench.engines.base import Generation
from loadgen.bench.engines.workloads import Request, Workload


class TransformersPeer:
    """Batches of `concurrency` requests in order; each runs until its longest is done."""

    name = "transformers"

    def __init__(self, checkpoint: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        model: Any = AutoModelForCausalLM
        self._model = model.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def prepare(self, workloads: list[Workload]) -> None:
        """Nothing to do: the model runs eagerly."""

    @torch.inference_mode()
    def generate(self, workload: Workload) -> Generation:
        """See `Peer.generate`."""
        tokens: list[list[int]] = []
        ttft_s: list[float] = []
        started_s = time.perf_counter()
        for begin in range(0, len(workload.requests), workload.concurrency):
            batch = workload.requests[begin : begin + workload.concurrency]
            first = _FirstToken()
            tokens += self._generate_batch(batch, first)
            ttft_s += [first.at_s - started_s] * len(batch)
        return Generation(time.perf_counter() - started_s, ttft_s, tokens)

    def _generate_batch(self, batch: list[Request], first: _FirstToken) -> list[list[int]]:
        width = max(len(r.prompt) for r in batch)
        steps = max(r.max_tokens for r in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        out = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=steps,
            min_new_tokens=steps,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=1.0,
            logits_processor=[first],
        )
        return [
            row[width : width + request.max_tokens]
            for row, request in zip(out.tolist(), batch, strict=True)
        ]


class _FirstToken:
    """A logits processor that changes nothing and notes when it is first called."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.at_s:
            self.at_s = time.perf_counter()
        return scores
