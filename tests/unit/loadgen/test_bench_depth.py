"""`bench depth`: what its processes measure."""

from __future__ import annotations

from typing import Any

from loadgen.bench.depth_worker import changing, one_depth
from quadriga.checkpoint.folder import read_checkpoint

ORDER: dict[str, Any] = {
    "checkpoint": "quadriga-s",
    "rows": 2,
    "prompt": 8,
    "steps": 4,
    "kv_mib": 1,
    "threads": 1,
}


def test_a_depth_costs_what_its_layers_cost() -> None:
    checkpoint = read_checkpoint("quadriga-s")
    shallow, full = (
        one_depth(ORDER | {"depth": depth})
        for depth in (checkpoint.exits.layers[0], checkpoint.num_layers)
    )
    assert shallow["kv_bytes_per_token"] * checkpoint.num_layers == (
        full["kv_bytes_per_token"] * checkpoint.exits.layers[0]
    )
    assert shallow["weight_bytes"] < full["weight_bytes"]
    assert shallow["capacity_tokens"] > full["capacity_tokens"]
    assert shallow["tokens_per_s"] > 0 and shallow["load_s"] > 0


def test_changes_go_down_and_up() -> None:
    checkpoint = read_checkpoint("quadriga-s")
    ends = (checkpoint.exits.layers[0], checkpoint.num_layers)
    changes = changing(ORDER | {"changes": 2})["changes"]
    assert [(c["before"], c["after"]) for c in changes] == [ends[::-1], ends] * 2
    assert all((c["load_s"] is None) == (c["after"] < c["before"]) for c in changes)
    assert all(c["take_ms"] > 0 and c["step_ms"] > 0 for c in changes)
