"""One local Ray for all tests of a session that need one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from serve_app.cli.ray_processes import RayProcesses


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of four logical CPUs without dashboard, shared by every test of the session."""
    import ray

    is_ours = not ray.is_initialized()
    if is_ours:
        with RayProcesses().starting():
            ray.init(
                "local",
                num_cpus=4,
                object_store_memory=128 << 20,
                include_dashboard=False,
                log_to_driver=False,
            )
    yield
    if is_ours:
        with warnings.catch_warnings():
            # Ray does not reap all the processes it started: their handles complain when collected.
            warnings.simplefilter("ignore", ResourceWarning)
            ray.shutdown(wait_for_processes=True)
            gc.collect()
