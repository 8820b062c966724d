"""The number of decode replicas of the class that serves follows its load.

Replicas come as new places and go as places that are taken away: what they hold is moved to the
others, and what cannot move ends where it is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from quadriga.clock import Clock
from quadriga.config.scheduling import ScalingConfig
from quadriga.control.helios_pools import HeliosPools
from quadriga.control.replica_record import place_name
from quadriga.core.replica import DepthClass, ReplicaSnapshot, Role
from quadriga.policies.scaling import AddReplicas, RetireReplica, ScalingOrder, ScalingPolicy
from quadriga.policies.scaling_need import ClassLoad, remaining_work

logger = logging.getLogger(__name__)

SHOWN_DECISIONS = 50


class Scaling:
    """Applies the scaling policy to the places of one deployment.

    Attributes:
        num_orders: Of all that were carried out.
    """

    def __init__(self, config: ScalingConfig, pools: HeliosPools, clock: Clock) -> None:
        self._pools = pools
        self._clock = clock
        self._policy = ScalingPolicy(config)
        self._decisions: deque[dict[str, Any]] = deque(maxlen=SHOWN_DECISIONS)
        self.num_orders = 0

    def decide(self, target: DepthClass, snapshots: list[ReplicaSnapshot]) -> None:
        """Add and remove places as the policy wants for the class that serves."""
        now_s = self._clock.now_s()
        serving = self._pools.serving()
        empty_s = self._pools.empty_since_s([k for k, replica in serving.items() if not replica])
        replicas = {r.name: r for r in serving.values() if r is not None}
        # Whatever the depth that strict sequences keep it at, or that it is about to leave.
        known = {s.info.name: s for s in snapshots if _is_of(s, Role.DECODE, target)}
        mine = [known[name] for name in replicas if name in known]
        gone = [known[r.name] for r in self._pools.leaving() if r.name in known]
        # One that still holds another model is on its way, and nothing waits for it.
        pending_s = {name: now_s for name in replicas if name not in known}
        pending_s |= {place_name(key): since_s for key, since_s in empty_s.items()}
        waiting, waiting_tokens = _waiting(snapshots, target)
        load = ClassLoad(
            depth_class=target,
            snapshots=mine + [replace(s, draining=True) for s in gone],
            ready_s={name: r.since_s for name, r in replicas.items()},
            pending_s=pending_s,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
        )
        for order in self._policy.decide([load], now_s=now_s):
            if isinstance(order, AddReplicas):
                self._note(order)
                for _ in range(order.count):
                    self._pools.add_place(order.depth_class)
            elif isinstance(order, RetireReplica):
                self._retire(order, mine)
            elif order.replica not in replicas and self._pools.remove_place(order.replica):
                self._note(order)

    def _retire(self, order: RetireReplica, of_class: list[ReplicaSnapshot]) -> None:
        staying = [s for s in of_class if not s.draining]
        others = [s for s in staying if s.info.name != order.replica]
        if others and self._pools.remove_place(order.replica):
            work = {s.info.name: round(remaining_work(s)) for s in staying}
            self._note(order, work_tokens=work)

    def _note(self, order: ScalingOrder, **facts: Any) -> None:
        """Write an order down for operators."""
        entry = {"at_unix_s": self._clock.unix_s(), "what": type(order).__name__}
        entry |= asdict(order) | {"depth_class": str(order.depth_class)} | facts
        self._decisions.append(entry)
        self.num_orders += 1
        logger.info("scaling: %s", entry)

    def view(self) -> dict[str, Any]:
        """Places that are wanted, and the last orders with their reasons, as plain values."""
        serving = self._pools.serving()
        filled = sum(replica is not None for replica in serving.values())
        return {"wanted": len(serving), "filled": filled, "decisions": list(self._decisions)}


def _is_of(snapshot: ReplicaSnapshot, role: Role, target: DepthClass) -> bool:
    return snapshot.info.role is role and snapshot.info.depth_class.model == target.model


def _waiting(snapshots: Sequence[ReplicaSnapshot], target: DepthClass) -> tuple[int, int]:
    """Sequences of the model that no decode replica has promised room to yet, and their tokens."""
    prefills = [s for s in snapshots if _is_of(s, Role.PREFILL, target)]
    decodes = [s for s in snapshots if _is_of(s, Role.DECODE, target)]
    held = sum(s.num_waiting + s.num_running - s.ending[0] for s in prefills)
    promised = sum(s.num_waiting - s.num_paused for s in decodes)
    count = max(0, held - promised)
    tokens = sum(s.waiting_tokens + s.used_tokens - s.ending[1] for s in prefills)
    return count, round(tokens * count / held) if held else 0
