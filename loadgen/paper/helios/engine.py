"""The pair's engines: read up to a depth, timed once, weighed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from loadgen.paper.drex.closed_loop import COMPILE_TIMEOUT_S, ROW_CAPACITY_TOKENS
from quadriga.checkpoint.exits import SKIPPED_KV_WEIGHTS
from quadriga.checkpoint.folder import Checkpoint
from quadriga.clock import Clock
from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.core.replica import DepthClass
from quadriga.engine.model_runner import NativeRunner
from quadriga.files import cache_folder
from quadriga.policies.drex import SegmentCosts
from quadriga.scheduling.calibration import calibrate

VALUE_BYTES = DTYPE_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class Room:
    """What one replica has, and how it uses its exits.

    Attributes:
        num_rows: Sequences in a batch, at most.
        memory_bytes: For weights and KV together; None where nothing limits.
        is_adaptive: DREX leaves exits out that do not pay; else every token is tested at every
            exit and leaves where it passes, whatever the load.
    """

    num_rows: int
    memory_bytes: int | None = None
    is_adaptive: bool = False


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the pair, and what its passes cost here.

    Attributes:
        threshold: That requests ask for.
    """

    checkpoint: Checkpoint
    costs: SegmentCosts
    threshold: float

    @property
    def full(self) -> DepthClass:
        return DepthClass(self.checkpoint.id, self.checkpoint.num_layers)

    @classmethod
    def measure(
        cls, checkpoint: Checkpoint, *, num_rows: int, threads: int, clock: Clock
    ) -> ServedModel:
        """Time the passes once at full depth, before anything is served."""
        native = load_engine(checkpoint, checkpoint.num_layers, num_rows=num_rows, threads=threads)
        costs = calibrate(native, clock, max_rows=num_rows)
        return cls(checkpoint, costs, checkpoint.exits.threshold)


def row_tokens(checkpoint: Checkpoint) -> int:
    """Most tokens of one sequence."""
    return min(ROW_CAPACITY_TOKENS, checkpoint.max_model_len)


def load_engine(checkpoint: Checkpoint, depth: int, *, num_rows: int, threads: int) -> NativeRunner:
    """Read layers 1..depth and get the kernels ready, with rows that fit at every depth."""
    capacity = row_tokens(checkpoint)
    full_kv = checkpoint.kv_bytes_per_token(checkpoint.num_layers, VALUE_BYTES)
    has_maps = (checkpoint.path / SKIPPED_KV_WEIGHTS).is_file()
    native = NativeRunner.load(
        EngineSpec(
            checkpoint=checkpoint,
            depth=depth,
            device="cpu",
            dtype="float32",
            threads=threads,
            compile="wait",
            cache_dir=cache_folder(),
            num_rows=num_rows,
            row_capacity_tokens=capacity,
            kv_capacity_tokens=num_rows * capacity,
            exits=checkpoint.exits.cut(depth),
            exit_plan=checkpoint.exits,
            skipped_kv="linear" if has_maps else "project",
            replay_newest=checkpoint.exits.replay_newest,
            kv_memory_bytes=num_rows * capacity * full_kv,
        )
    )
    native.wait_compiled(COMPILE_TIMEOUT_S)
    return native


def weight_bytes(native: NativeRunner) -> int:
    """Bytes of all tensors that a runner's weights are made of, each counted once."""
    return sum({t.data_ptr(): t.nbytes for t in _tensors(native.weights)}.values())


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "data_ptr"):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))
