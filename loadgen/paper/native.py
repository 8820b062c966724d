"""The engine as the experiments load it: on the CPU, in float32, compiled before it is timed."""

from __future__ import annotations

from loadgen.model_costs.engine import engine_spec
from quadriga.checkpoint.exits import SKIPPED_KV_WEIGHTS, SkippedKV
from quadriga.checkpoint.folder import Checkpoint
from quadriga.config.engine_spec import DTYPE_BYTES
from quadriga.engine.model_runner import NativeRunner

VALUE_BYTES = DTYPE_BYTES["float32"]
ROW_CAPACITY_TOKENS = 1024
COMPILE_TIMEOUT_S = 300.0


def row_tokens(checkpoint: Checkpoint) -> int:
    """Most tokens of one sequence."""
    return min(ROW_CAPACITY_TOKENS, checkpoint.max_model_len)


def load_native(
    checkpoint: Checkpoint,
    *,
    num_rows: int,
    threads: int,
    depth: int | None = None,
    skipped_kv: SkippedKV | None = None,
    replay_newest: int | None = None,
) -> NativeRunner:
    """Load a model with its exits and rows that fit at every depth.

    Args:
        depth: Layers that are loaded; None: all.
        skipped_kv: None: the checkpoint's fitted maps, where it has any.
        replay_newest: None: what the checkpoint says.
    """
    depth, capacity = depth or checkpoint.num_layers, row_tokens(checkpoint)
    has_maps = (checkpoint.heads_path / SKIPPED_KV_WEIGHTS).is_file()
    plan = checkpoint.exits
    native = NativeRunner.load(
        engine_spec(
            checkpoint,
            num_rows=num_rows,
            row_capacity_tokens=capacity,
            depth=depth,
            threads=threads,
            exits=plan.cut(depth),
            exit_plan=plan,
            skipped_kv=skipped_kv or ("linear" if has_maps else "project"),
            replay_newest=plan.replay_newest if replay_newest is None else replay_newest,
            kv_memory_bytes=num_rows
            * capacity
            * checkpoint.kv_bytes_per_token(checkpoint.num_layers, VALUE_BYTES),
        )
    )
    native.wait_compiled(COMPILE_TIMEOUT_S)
    return native
