"""`transformers` generate: static batches, padded on the left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from loadgen.bench.engines.base import GeneratedTokens
from loadgen.bench.engines.workloads import Workload

DTYPES = {"bfloat16": "bfloat16", "float16": "float16"}
"""What it computes in, by the form of the weights; others are float32."""


def load_model(checkpoint: Path | str, dtype: str = "float32", device: str = "cpu") -> Any:
    """Return the model as `transformers` has it, ready to generate."""
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device).eval()


@torch.inference_mode()
def generate_padded(
    model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, **hooks: Any
) -> list[list[int]]:
    """Return `num_tokens` greedy tokens for each prompt, all padded on the left to the longest.

    Args:
        hooks: Further arguments of `generate`: processors, criteria.
    """
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        repetition_penalty=1.0,
        **hooks,
    )
    tokens: list[list[int]] = out[:, width:].tolist()
    return tokens


class TransformersPeer:
    """Batches of `concurrency` requests in order; each runs until its longest is done."""

    name = "transformers"

    def __init__(self, checkpoint: Path, threads: int, weights: str = "auto") -> None:
        torch.set_num_threads(threads)
        self._model = load_model(checkpoint, DTYPES.get(weights, "float32"))

    def prepare(self, workloads: list[Workload]) -> None:
        """Nothing to do: the model runs eagerly."""

    def generate(self, workload: Workload) -> GeneratedTokens:
        """See `Peer.generate`."""
        tokens: list[list[int]] = []
        ttft_s: list[float] = []
        started_s = time.perf_counter()
        for begin in range(0, len(workload.requests), workload.concurrency):
            batch = workload.requests[begin : begin + workload.concurrency]
            first = _FirstToken()
            steps = max(r.max_tokens for r in batch)
            found = generate_padded(
                self._model, [r.prompt for r in batch], steps, logits_processor=[first]
            )
            tokens += [row[: r.max_tokens] for row, r in zip(found, batch, strict=True)]
            ttft_s += [first.at_s - started_s] * len(batch)
        return GeneratedTokens(time.perf_counter() - started_s, ttft_s, tokens)


class _FirstToken:
    """A logits processor that changes nothing and notes when it is first called."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.at_s:
            self.at_s = time.perf_counter()
        return scores
