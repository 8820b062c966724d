"""Decisions of a simulated run, written as a cluster's scheduler would write its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quadriga.core.migration import MigrationOrder
from quadriga.core.replica import ReplicaInfo, ReplicaSnapshot, Reservation, Role
from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.forecast import pack
from quadriga.policies.ares.recording import RecordedTick, write_tick
from quadriga.policies.ares.settings import AresSettings, TransferCosts
from quadriga.sim.config import DEPTH_CLASS, SimConfig
from quadriga.sim.placing import Placing
from quadriga.sim.policies import make_policy


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
        placing: Placing,
    ) -> None:
        """Write one decision."""
        profile = self._config.profile
        write_tick(
            self._stream,
            RecordedTick(
                at_s=now_s,
                snapshots=snapshots_of(
                    cluster,
                    profile.num_slots,
                    now_s,
                    base_s=profile.step.base_s,
                    reservation=self._config.memory.reservation,
                ),
                settings=self._settings,
                costs=costs,
                predicts=self._predicts,
                load_only=load_only,
                busy=busy,
                orders=orders,
                overload=placing.overload,
                pools={} if placing.pools is None else {DEPTH_CLASS: placing.pools},
            ),
        )

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def snapshots_of(
    cluster: ClusterForecast,
    num_slots: int,
    now_s: float,
    *,
    base_s: float,
    reservation: Reservation = "longest",
) -> list[ReplicaSnapshot]:
    """Pack the arrays again, replica by replica, as they would have been reported.

    Args:
        base_s: A step without sequences.
    """
    bounds = np.searchsorted(cluster.owner, np.arange(len(cluster) + 1))
    snapshots = []
    for i, name in enumerate(cluster.names):
        mine = slice(int(bounds[i]), int(bounds[i + 1]))
        forecast = pack(
            cluster.rows[mine],
            cluster.sequence_ids[mine],
            grid_s=cluster.grid_s.tolist(),
            step_s=float(cluster.step_s[i]),
            base_s=base_s,
            costs=cluster.measured,
            has_predictions=cluster.has_predictions,
            front_share=cluster.front_share,
        )
        capacity = int(cluster.capacity_tokens[i])
        info = ReplicaInfo(
            name, Role.DECODE, DEPTH_CLASS, name, name, num_slots, capacity, reservation=reservation
        )
        tokens = int(cluster.tokens[i, 0])
        snapshots.append(
            ReplicaSnapshot(
                info=info,
                taken_unix_s=now_s,
                num_running=num_slots - int(cluster.free_slots[i]) - int(cluster.num_paused[i]),
                num_waiting=int(cluster.num_paused[i]),
                num_paused=int(cluster.num_paused[i]),
                used_tokens=tokens,
                reserved_tokens=int(cluster.promised_tokens[i]),
                step_time_s=float(cluster.step_s[i]),
                forecast=forecast,
            )
        )
    return snapshots
