"""The engine as measurements load it: on the CPU, in float32, compiled before the clock starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from quadriga.checkpoint.folder import Checkpoint
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.files import cache_folder


def engine_spec(
    checkpoint: Checkpoint, *, num_rows: int, row_capacity_tokens: int, **changes: Any
) -> EngineSpec:
    """Return an engine of one thread at full depth, without exits, and with room in every row.

    Args:
        changes: Other fields of `EngineSpec`.
    """
    fields: dict[str, Any] = {
        "depth": checkpoint.num_layers,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "compile": "wait",
        "cache_dir": cache_folder(),
        "num_rows": num_rows,
        "row_capacity_tokens": row_capacity_tokens,
        "kv_capacity_tokens": num_rows * row_capacity_tokens,
    }
    return EngineSpec(checkpoint, **fields | changes)


def sequence(
    name: str, prompt_ids: list[int], sampling: SamplingParams, **fields: Any
) -> SequenceState:
    """Return a sequence that no client waits for, without a deadline."""
    return SequenceState(
        sequence_id=name,
        request_id=name,
        model="",
        prompt_ids=prompt_ids,
        sampling=sampling,
        ingress_id="",
        arrival_unix_s=0.0,
        deadline_unix_s=float("inf"),
        **fields,
    )


def resident_bytes() -> int:
    """Memory that this process really holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
