from __future__ import annotations

from tests.ray_cluster import ray_cluster

__all__ = ["ray_cluster"]
