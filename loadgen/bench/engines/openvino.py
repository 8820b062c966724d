"""OpenVINO GenAI: continuous batching on the model as `optimum-cli` exports it.

In float32 it is told to compute and to keep KV so. In other forms it has its own defaults:
arithmetic in bfloat16 where the CPU has it, KV in 8 bits, and inputs of int8 weights rounded to 8
bits.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found, unused-ignore]
import openvino_genai as genai

from loadgen.bench.engines.base import GeneratedTokens
from loadgen.bench.engines.workloads import Workload
from quadriga.files import cache_folder

EXPORT_TIMEOUT_S = 600.0
CACHE_GIB = 2
WEIGHT_FORMATS = {"bfloat16": "fp16", "float16": "fp16", "int8": "int8"}
"""How they are exported; the arithmetic in bfloat16 is chosen when the model is compiled."""


class OpenVinoPeer:
    """`ContinuousBatchingPipeline` with as many sequences as the workload's concurrency."""

    name = "openvino"

    def __init__(self, checkpoint: Path, threads: int, weights: str = "auto") -> None:
        self._folder = _export(checkpoint, WEIGHT_FORMATS.get(weights, "fp32"))
        self._properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if weights in ("auto", "float32"):
            self._properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        self._pipelines: dict[int, Any] = {}

    def prepare(self, workloads: list[Workload]) -> None:
        """Compile one pipeline per concurrency."""
        for workload in workloads:
            if workload.concurrency not in self._pipelines:
                self._pipelines[workload.concurrency] = self._pipeline(workload.concurrency)

    def generate(self, workload: Workload) -> GeneratedTokens:
        """See `Peer.generate`."""
        pipeline = self._pipelines[workload.concurrency]
        ttft_s = [0.0] * len(workload.requests)
        tokens: list[list[int]] = [[] for _ in workload.requests]
        waiting = deque(enumerate(workload.requests))
        running: dict[int, Any] = {}
        started_s = time.perf_counter()
        while waiting or running:
            # The pipeline's own limit does not hold with split-fuse: keep to the concurrency here.
            while waiting and len(running) < workload.concurrency:
                index, request = waiting.popleft()
                ids = ov.Tensor(np.array([request.prompt], dtype=np.int64))
                running[index] = pipeline.add_request(index, ids, _greedy(request.max_tokens))
            pipeline.step()
            now_s = time.perf_counter() - started_s
            for index, handle in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[index] += list(output.generated_ids)
                        ttft_s[index] = ttft_s[index] or now_s
                if len(tokens[index]) >= workload.requests[index].max_tokens:
                    del running[index]
        return GeneratedTokens(time.perf_counter() - started_s, ttft_s, tokens)

    def _pipeline(self, concurrency: int) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = concurrency
        scheduler.max_num_batched_tokens = 512
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        return genai.ContinuousBatchingPipeline(
            str(self._folder), scheduler, "CPU", self._properties, {}
        )


def _greedy(max_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.min_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def _export(checkpoint: Path, weight_format: str) -> Path:
    """Export the checkpoint into the user's cache, once per content of its configuration."""
    name = str(checkpoint.resolve())
    digest = hashlib.sha256(
        (name if weight_format == "fp32" else f"{name} {weight_format}").encode()
    )
    digest.update((checkpoint / "config.json").read_bytes())
    folder = cache_folder() / "openvino" / digest.hexdigest()[:16]
    if (folder / "openvino_model.xml").is_file():
        return folder
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    command += ["--model", str(checkpoint), "--task", "text-generation-with-past"]
    command += ["--weight-format", weight_format, str(folder)]
    subprocess.run(command, check=True, timeout=EXPORT_TIMEOUT_S, stdout=sys.stderr)
    return folder
