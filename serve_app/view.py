"""What the ingress knows of the cluster, and what it does with it while the scheduler is away."""

from __future__ import annotations

from quadriga.clock import Clock
from quadriga.errors import ReplicaError, Unavailable
from quadriga.types import (
    Admission,
    AdmitRequest,
    ClusterView,
    ReplicaSnapshot,
    Role,
)
from serve_app.cluster import Cluster


class ClusterWatch:
    """The last view of the replicas, and admission that survives the scheduler.

    Args:
        max_age_s: An older view says nothing about readiness any more.
    """

    def __init__(self, cluster: Cluster, clock: Clock, *, max_age_s: float) -> None:
        self._cluster = cluster
        self._clock = clock
        self._max_age_s = max_age_s
        self._taken_s = float("-inf")
        self.view = ClusterView(0.0, [])

    async def refresh(self) -> None:
        """Ask the scheduler. Raises: ReplicaError; the old view stays."""
        self.view = await self._cluster.directory()
        self._taken_s = self._clock.now_s()

    @property
    def names(self) -> set[str]:
        return {s.info.name for s in self.view.snapshots}

    def check_ready(self) -> None:
        """Raises: Unavailable while nobody is known to serve."""
        if self._clock.now_s() - self._taken_s > self._max_age_s:
            raise Unavailable("the cluster has not been heard of lately", retry_after_s=1.0)
        for role in Role:
            if not self._serving(role):
                raise Unavailable(f"no {role} replica is ready", retry_after_s=1.0)

    async def admit(self, request: AdmitRequest) -> Admission:
        """Ask the scheduler where a sequence shall go first; without it, choose by the last view.

        Raises: Overloaded, UnknownModel, Unavailable, ContextTooLong.
        """
        try:
            return await self._cluster.admit(request)
        except ReplicaError as exc:
            candidates = self._serving(Role.PREFILL, request.model)
            if not candidates:
                raise Unavailable(
                    "the scheduler is away and no replica is known", retry_after_s=2.0
                ) from exc
            best = min(candidates, key=lambda s: (s.waiting_tokens, s.num_waiting, s.info.name))
            best.waiting_tokens += request.num_prompt_tokens  # until the next view tells
            return Admission(best.info.name, best.info.depth_class)

    def _serving(self, role: Role, model: str | None = None) -> list[ReplicaSnapshot]:
        return [
            s
            for s in self.view.snapshots
            if s.info.role is role
            and not s.draining
            and (model is None or s.info.depth_class.model == model)
        ]
