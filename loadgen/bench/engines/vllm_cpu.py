"""vLLM on CPUs: continuous batching, in float32.

Written to vLLM's documentation (`LLMEngine.add_request` and `step`); it runs where the CPU build of
vLLM is installed (`--peer-python vllm=…`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

import torch
from vllm import (  # type: ignore[import-not-found, unused-ignore]
    EngineArgs,
    LLMEngine,
    SamplingParams,
)

from loadgen.bench.engines.base import Generation
from loadgen.bench.engines.workloads import Workload

CACHE_GIB = 2


class VllmPeer:
    """One engine with as many sequences as the largest concurrency; fewer are kept in flight."""

    name = "vllm"

    def __init__(self, checkpoint: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        # vLLM reads its environment when it is used, not when it is imported.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB))
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process
        self._checkpoint = checkpoint
        self._engine: LLMEngine | None = None

    def prepare(self, workloads: list[Workload]) -> None:
        """Start the engine; it compiles and warms up by itself."""
        arguments = EngineArgs(
            model=str(self._checkpoint),
            dtype="float32",
            max_num_seqs=max(w.concurrency for w in workloads),
            max_model_len=max(len(r.prompt) + r.max_tokens for w in workloads for r in w.requests),
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)

    def generate(self, workload: Workload) -> Generation:
        """See `Peer.generate`."""
        engine = self._engine
        assert engine is not None, "prepared before"
        ttft_s = [0.0] * len(workload.requests)
        tokens: list[list[int]] = [[] for _ in workload.requests]
        waiting = deque(enumerate(workload.requests))
        num_running = 0
        started_s = time.perf_counter()
        while waiting or num_running:
            while waiting and num_running < workload.concurrency:
                index, request = waiting.popleft()
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=request.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                )
                engine.add_request(str(index), {"prompt_token_ids": request.prompt}, params)
                num_running += 1
            outputs = engine.step()
            now_s = time.perf_counter() - started_s
            for output in outputs:
                index = int(output.request_id)
                tokens[index] = list(output.outputs[0].token_ids)
                ttft_s[index] = ttft_s[index] or now_s
                num_running -= output.finished
        return Generation(time.perf_counter() - started_s, ttft_s, tokens)
