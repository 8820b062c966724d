"""The engine as the experiments load it: on the CPU, in float32, compiled before it is timed."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.model_costs.engine import engine_spec
from quadriga.checkpoint.exits import SKIPPED_KV_WEIGHTS, SkippedKV
from quadriga.checkpoint.folder import Checkpoint
from quadriga.config.engine_spec import DTYPE_BYTES
from quadriga.engine.model_runner import NativeRunner

VALUE_BYTES = DTYPE_BYTES["float32"]
ROW_CAPACITY_TOKENS = 1024


def row_tokens(checkpoint: Checkpoint) -> int:
    """Most tokens of one sequence."""
    return min(ROW_CAPACITY_TOKENS, checkpoint.max_model_len)


def held_bytes(native: NativeRunner, rows: Sequence[int]) -> int:
    """KV, hidden states that wait and those that are kept, as far as they are in use."""
    extents = [extent for row in rows for extent in native.extents(row)]
    kv = sum(e.num_tokens * len(e.layers) for e in extents) * 2 * native.model.config.kv_size
    states = 0
    if native.skipped is not None:
        states = sum(1 + native.skipped.num_kept(row) for row in rows) * native.hidden.shape[1]
    return (kv + states) * native.hidden.element_size()


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
    return NativeRunner.load(
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
