"""The engine: forward passes over KV rows, and nothing of requests, queues or time.

Importing this package is cheap; torch is imported when a runner is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quadriga.engine.runner import NativeRunner
    from quadriga.resolve import EngineSpec

__all__ = ["load_runner"]


def load_runner(spec: EngineSpec) -> NativeRunner:
    """Load the checkpoint's first `spec.depth` layers and return a runner for them.

    Sets this process's torch thread count to `spec.threads`.

    Raises:
        ConfigError: The checkpoint cannot be served: see `weights` and `models.config`.
    """
    from quadriga.engine.runner import NativeRunner

    return NativeRunner.load(spec)
