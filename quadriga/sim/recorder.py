"""Decisions of a simulated run, written as a cluster's scheduler would write its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quadriga.policies.ares import AresSettings, TransferCosts
from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.recording import Tick, write_tick
from quadriga.sim.config import DEPTH_CLASS, SimConfig
from quadriga.sim.policies import make_policy
from quadriga.types import LoadForecast, MigrationOrder, ReplicaInfo, ReplicaSnapshot, Role

_WIRE = np.dtype("<f4")


class Recorder:
    """Appends each decision to a file; see `Simulation.on_decision`."""

    def __init__(
        self, path: Path, config: SimConfig, policy: str, settings: AresSettings | None = None
    ) -> None:
        made = make_policy(policy, settings, reservation=config.memory.reservation)
        self._config, self._settings, self._predicts = config, made.settings, made.foresees
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("w", encoding="utf-8")

    def decided(
        self,
        now_s: float,
        cluster: ClusterForecast,
        costs: TransferCosts,
        busy: frozenset[str],
        load_only: bool,
        orders: list[MigrationOrder],
    ) -> None:
        """Write one decision."""
        write_tick(
            self._stream,
            Tick(
                at_s=now_s,
                snapshots=snapshots_of(cluster, self._config.profile.num_slots, now_s),
                settings=self._settings,
                costs=costs,
                predicts=self._predicts,
                load_only=load_only,
                busy=busy,
                orders=orders,
            ),
        )

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def snapshots_of(cluster: ClusterForecast, num_slots: int, now_s: float) -> list[ReplicaSnapshot]:
    """Pack the arrays again, replica by replica, as they would have been reported."""
    bounds = np.searchsorted(cluster.owner, np.arange(len(cluster) + 1))
    snapshots = []
    for i, name in enumerate(cluster.names):
        mine = slice(int(bounds[i]), int(bounds[i + 1]))
        forecast = LoadForecast(
            grid_s=tuple(cluster.grid_s.tolist()),
            sequence_ids=tuple(cluster.sequence_ids[mine]),
            rows=cluster.rows[mine].astype(_WIRE, copy=False).tobytes(),
            load_s=cluster.load_s[i].astype(_WIRE).tobytes(),
            tokens=cluster.tokens[i].astype(_WIRE).tobytes(),
            base_s=float(cluster.base_s[i]),
            has_predictions=cluster.has_predictions,
        )
        capacity = int(cluster.capacity_tokens[i])
        info = ReplicaInfo(name, Role.DECODE, DEPTH_CLASS, name, name, num_slots, capacity)
        tokens = int(cluster.tokens[i, 0])
        snapshots.append(
            ReplicaSnapshot(
                info=info,
                taken_unix_s=now_s,
                num_running=num_slots - int(cluster.free_slots[i]) - int(cluster.num_paused[i]),
                num_waiting=int(cluster.num_paused[i]),
                num_paused=int(cluster.num_paused[i]),
                used_tokens=tokens,
                reserved_tokens=tokens,
                step_time_s=float(cluster.step_s[i]),
                forecast=forecast,
            )
        )
    return snapshots
