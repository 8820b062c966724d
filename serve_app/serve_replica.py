"""State of this process's Serve replica that Ray Serve does not publish."""

from __future__ import annotations

from typing import Any


def stop_timeout_s() -> float | None:
    """Seconds that Serve gives this replica to end, once Serve has asked it to; None before that.

    Serve notifies a replica's own code only after its last request. Ray keeps the actors of this
    process in a private place; where it is another one in a later Ray, this is always None, and
    requests that outlast the time limit are cut without an error.
    """
    from ray import serve
    from ray._private import worker

    process: Any = worker.global_worker
    for actor in getattr(process, "actors", {}).values():
        replica = getattr(actor, "_replica_impl", None)
        if getattr(replica, "_shutting_down", False):
            deployment = serve.get_replica_context()._deployment_config
            return float(deployment.graceful_shutdown_timeout_s)
    return None
