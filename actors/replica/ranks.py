"""The ranks of a tensor-parallel replica behind the first: an actor each, in its placement group.

Ray ends them with the replica's actor, which owns them; one that ends before is the replica's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.rpc.lifecycle import actor_class
from actors.rpc.ray_rpc import NAMESPACE
from actors.rpc.signals import ignore_sigterm
from quadriga.config.engine_spec import EngineSpec
from quadriga.config.ingress import LoggingConfig
from quadriga.config.resolve import ReplicaSpec
from quadriga.control.replica_names import rank_name
from quadriga.observability.logs import configure_logging
from quadriga.replica.engine_thread import yield_by


class Rank:
    """Ray actor: a rank behind the first."""

    def __init__(self, name: str, logs: LoggingConfig) -> None:
        configure_logging(logs.format, logs.level, process=name)
        ignore_sigterm()  # it comes to all of a machine that goes down: the replica empties first

    def serve(self, spec: EngineSpec, rank: int, host: str, port: int, nice: int) -> None:
        """See `serve_rank`; on this thread, which yields as the replica's engine does."""
        from quadriga.engine.tensor_parallel.loading import serve_rank

        yield_by(nice)
        serve_rank(spec, rank, host, port)


@dataclass
class RankActors:
    """`RankStarter`, in the replica's process, which is rank 0.

    Attributes:
        lost: Ends the engine; from any thread.
    """

    name: str
    spec: ReplicaSpec
    logs: LoggingConfig
    host: str
    nice: int
    lost: Callable[[str], None]
    _actors: list[ActorHandle[Any]] = field(default_factory=list)  # without a handle one ends

    def start(self, engine: EngineSpec, port: int) -> None:
        """See `RankStarter.start`."""
        group = ray.util.get_placement_group(self.name)
        for rank in range(1, engine.tensor_parallel):
            name = rank_name(self.name, rank)
            options = actor_class(Rank).options(
                name=name,
                namespace=NAMESPACE,
                max_restarts=0,
                num_cpus=self.spec.num_cpus,
                num_gpus=self.spec.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
            )
            actor: Any = options.remote(name, self.logs)
            self._actors.append(actor)
            served: Any = actor.serve.remote(engine, rank, self.host, port, self.nice)
            served.future().add_done_callback(lambda done, name=name: self._over(name, done))

    def join(self) -> None:
        """See `RankStarter.join`: they are processes of their own."""

    def _over(self, name: str, done: Any) -> None:
        why = str(done.exception() or "it ended").splitlines()[0]
        self.lost(f"{name} is gone: {why}")
