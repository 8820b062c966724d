"""What the nodes of the cluster have for replicas."""

from __future__ import annotations

import ray

from quadriga.config.kv_memory import NodeMemory


def node_memory() -> dict[str, NodeMemory]:
    """By node id, of those that live and may run replicas; blocks. Raises: `RAY_FAILED`."""
    return {
        node["NodeID"]: NodeMemory(float(has["CPU"]), int(has["memory"]))
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and (has := node["Resources"]).get("CPU") and has.get("memory")
    }
