"""All that an engine needs to start. No pydantic here: the engine runs without the service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quadriga.checkpoint.exits import NO_EXITS, ExitSpec, SkippedKV
from quadriga.checkpoint.folder import Checkpoint
from quadriga.core.adapters import Adapter
from quadriga.core.replica import DepthClass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
WeightForm = Literal["auto", "float32", "bfloat16", "float16", "int8"]
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Of one weight, by the form that is asked for."""
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
        fits_length: Lower `row_capacity_tokens` at load, too, to what `kv_memory.fitting_length`
            says of the KV that the GPU holds.
        exits: Early exits in use, all below `depth`.
        can_exit: Tokens may leave early here. A prefill replica knows the exits only to give tokens
            of a sequence that is rebuilt the depth at which they once left.
        skipped_kv: How KV of skipped layers is made up for.
        replay_newest: So many of the newest skipped positions are run through the layers instead.
        weights: How matrices lie in memory and what products with them round to; `auto`: as they
            are stored, which rounds nothing.
        runner: Own layers, or the unmodified Hugging Face model in a relay batch.
        attention: Who computes attention on GPUs; `auto`: the fastest that is installed.
        exit_plan: Early exits to use where more layers are loaded; `exits` is this, cut to `depth`.
        kv_memory_bytes: What KV may take, of which `kv_capacity_tokens` follows for other depths;
            None: as much as it takes at this one.
        host_copies: KV read from a row is copied to host memory; else it stays on the device.
        pass_tokens: Most prompt tokens of one pass; a GPU keeps the memory for it.
        usable_bytes: Of the GPU's memory, for weights and KV together; None until it is known.
        keep_tokens: Per sequence, hidden states that a replica of partial depth keeps, so that
            layers loaded later need not run its tokens again.
        shared_in: Registry through which the processes of this machine read weights from one copy
            in memory; None: a copy of its own.
        adapters: LoRA adapters of the model, all of them loaded.
        tensor_parallel: Ranks among which each layer's heads, MLP and the vocabulary are divided.
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
    can_exit: bool = True
    skipped_kv: SkippedKV = "project"
    replay_newest: int = 0
    weights: WeightForm = "auto"
    runner: Runner = "native"
    attention: Attention = "auto"
    gpu_memory_share: float | None = None
    fits_length: bool = False
    exit_plan: ExitSpec = NO_EXITS
    kv_memory_bytes: int | None = None
    pass_tokens: int = 0
    usable_bytes: int | None = None
    keep_tokens: int = 256
    host_copies: bool = True
    shared_in: Path | None = None
    adapters: tuple[Adapter, ...] = ()
    tensor_parallel: int = 1

    @property
    def depth_class(self) -> DepthClass:
        return DepthClass(self.checkpoint.id, self.depth)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths between which a replica can change while it serves, ascending: each has a head."""
        exits = self.exit_plan.layers or self.checkpoint.exits.layers
        return (*exits, self.checkpoint.num_layers)
