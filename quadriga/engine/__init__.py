"""The engine: forward passes over KV rows, and nothing of requests, queues or time.

Importing this package is cheap; torch is imported when a runner is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quadriga.config.engine_spec import EngineSpec
    from quadriga.engine.baton.runner import BatonRunner
    from quadriga.engine.model_runner import NativeRunner
    from quadriga.engine.tensor_parallel.loading import RankStarter

    AnyRunner = NativeRunner | BatonRunner

__all__ = ["load_runner"]


def load_runner(spec: EngineSpec, starter: RankStarter | None = None) -> AnyRunner:
    """Load the checkpoint's first `spec.depth` layers and return the runner the spec names.

    Sets this process's torch thread count to `spec.threads`.

    Args:
        starter: See `NativeRunner.load`.

    Raises:
        ConfigError: The checkpoint is not on this node, or cannot be served: see `weights` and
            `checkpoint.model_config` for the native runner, `baton.loading` and `baton.probe` for
            the relay batch.
    """
    from quadriga.checkpoint.folder import on_this_node
    from quadriga.observability.load_progress import LOADING

    LOADING.begin("finds or fetches the checkpoint")
    spec = replace(spec, checkpoint=on_this_node(spec.checkpoint, spec.cache_dir))
    if spec.runner == "baton":
        from quadriga.engine.baton.runner import BatonRunner

        return BatonRunner.load(spec)
    from quadriga.engine.model_runner import NativeRunner

    return NativeRunner.load(spec, starter)
