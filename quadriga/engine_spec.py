"""All that an engine needs to start. No pydantic here: the engine runs without the service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quadriga.checkpoint import Checkpoint
from quadriga.exits import NO_EXITS, ExitSpec, SkippedKV
from quadriga.types import DepthClass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
Runner = Literal["native", "baton"]
Attention = Literal["auto", "flash", "triton", "torch"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine: a checkpoint, how deep, on what, with how much memory.

    Attributes:
        depth: Layers 1..depth are loaded.
        compile: On CPUs the compiled kernels, on GPUs CUDA graphs; `off` is neither.
        num_rows: Sequences whose KV it can hold at once.
        row_capacity_tokens: Most tokens of one sequence.
        kv_capacity_tokens: Tokens of KV over all rows; at most num_rows · row_capacity_tokens.
        exits: Early exits in use, all below `depth`; none on prefill replicas.
        skipped_kv: How KV of skipped layers is made up for.
        runner: Own layers, or the unmodified Hugging Face model in a relay batch.
        attention: Who computes attention on GPUs; `auto`: the fastest that is installed.
        gpu_memory_share: Lower `kv_capacity_tokens` at load to what, with the weights, fits into
            this share of the GPU's memory; None: hold exactly that many, or refuse to start.
    """

    checkpoint: Checkpoint
    depth: int
    device: Device
    dtype: Dtype
    threads: int
    compile: Literal["auto", "off", "wait"]
    cache_dir: Path
    num_rows: int
    row_capacity_tokens: int
    kv_capacity_tokens: int
    exits: ExitSpec = NO_EXITS
    skipped_kv: SkippedKV = "project"
    runner: Runner = "native"
    attention: Attention = "auto"
    gpu_memory_share: float | None = None

    @property
    def depth_class(self) -> DepthClass:
        return DepthClass(self.checkpoint.id, self.depth)
