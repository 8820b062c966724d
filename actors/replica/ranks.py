"""The ranks of a tensor-parallel replica behind the first: an actor each, in its placement group.

They belong to the replica's actor: Ray ends them with it, and the first that ends before is the end
of the replica. Which sequences there are, only the replica knows.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.rpc.lifecycle import actor_class
from actors.rpc.ray_rpc import NAMESPACE
from quadriga.background import background
from quadriga.config.engine_spec import EngineSpec
from quadriga.config.ingress import LoggingConfig
from quadriga.config.loader import QuadrigaConfig
from quadriga.config.resolve import ReplicaSpec
from quadriga.observability.logs import configure_logging
from quadriga.replica.engine_thread import yield_by


class RankedReplica(Protocol):
    """What the ranks know of their replica."""

    name: str
    spec: ReplicaSpec
    config: QuadrigaConfig
    node_ip: str
    nice: int

    def post(self, callback: Callable[..., object], *args: object) -> None: ...

    def break_engine(self, reason: str) -> Coroutine[Any, Any, None]: ...


def rank_name(replica: str, rank: int) -> str:
    """The actor's name: no replica is called so."""
    return f"{replica}:rank{rank}"


class Rank:
    """Ray actor: a rank behind the first."""

    def __init__(self, name: str, logs: LoggingConfig) -> None:
        configure_logging(logs.format, logs.level, process=name)

    def serve(self, spec: EngineSpec, rank: int, host: str, port: int, nice: int) -> None:
        """See `serve_rank`; on this thread, which yields as the replica's engine does."""
        from quadriga.engine.tensor_parallel.loading import serve_rank

        yield_by(nice)
        serve_rank(spec, rank, host, port)


class RankActors:
    """See `RankStarter`; the replica's own process is rank 0."""

    def __init__(self, replica: RankedReplica) -> None:
        self._replica = replica
        self._actors: list[ActorHandle[Any]] = []  # without a handle an actor ends

    @property
    def host(self) -> str:
        """The address at which the ranks reach this process."""
        return self._replica.node_ip

    def start(self, spec: EngineSpec, port: int) -> None:
        """See `RankStarter.start`; on the engine's thread."""
        replica, logs = self._replica, self._replica.config.logging
        group = ray.util.get_placement_group(replica.name)
        for rank in range(1, spec.tensor_parallel):
            name = rank_name(replica.name, rank)
            actor = (
                actor_class(Rank)
                .options(
                    name=name,
                    namespace=NAMESPACE,
                    max_restarts=0,
                    num_cpus=replica.spec.num_cpus,
                    num_gpus=replica.spec.num_gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
                )
                .remote(name, logs)
            )
            self._actors.append(actor)
            ref = actor.serve.remote(spec, rank, self.host, port, replica.nice)
            replica.post(lambda rank=rank, ref=ref: background(self._watch(rank, ref)))

    def lost(self, reason: str) -> None:
        """See `RankStarter.lost`."""
        self._replica.post(lambda: background(self._replica.break_engine(reason)))

    async def _watch(self, rank: int, ref: Any) -> None:
        """Wait for the end of a rank, which is the engine's."""
        try:
            await ref
            why = "it ended"
        except Exception as exc:  # a border: whatever it is, the rank is gone
            why = str(exc).splitlines()[0] if str(exc) else repr(exc)
        await self._replica.break_engine(f"rank {rank} is gone: {why}")
