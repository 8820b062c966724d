"""What the ingress knows of the cluster, and what it does with it while the scheduler is away."""

from __future__ import annotations

from quadriga.clock import Clock
from quadriga.core.replica import ReplicaSnapshot, Role
from quadriga.core.request import AUTO_MODEL
from quadriga.core.routing import Admission, AdmitRequest, ClusterView
from quadriga.errors import ReplicaDied, ReplicaError, Unavailable
from serve_app.request.cluster import Cluster


class ClusterStateCache:
    """The last view of the replicas, and admission that survives the scheduler.

    Args:
        max_age_s: An older view says nothing about readiness any more.
    """

    def __init__(self, cluster: Cluster, clock: Clock, *, max_age_s: float) -> None:
        self._cluster = cluster
        self._clock = clock
        self._max_age_s = max_age_s
        self._taken_s = float("-inf")
        self._is_scheduler_away = False
        self.view = ClusterView(0.0, [])

    async def refresh(self) -> None:
        """Ask the scheduler. Raises: ReplicaError; the old view stays."""
        try:
            self.view = await self._cluster.directory()
        except ReplicaError:
            self._is_scheduler_away = True
            raise
        self._is_scheduler_away = False
        self._taken_s = self._clock.now_s()

    @property
    def names(self) -> set[str]:
        return {s.info.name for s in self.view.snapshots}

    def forget(self, replica: str) -> None:
        """Send nothing to a replica that is gone, until a newer view says that it is not."""
        self.view.snapshots = [s for s in self.view.snapshots if s.info.name != replica]

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
            if self._is_scheduler_away and self.view.snapshots:
                raise ReplicaDied("the scheduler did not answer lately")  # nor would it now
            return await self._cluster.admit(request)
        except ReplicaError as exc:
            model = None if request.model == AUTO_MODEL else request.model
            candidates = self._serving(Role.PREFILL, model)
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
