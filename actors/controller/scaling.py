"""The number of decode replicas of the class that serves follows its load.

Replicas come as new places of the fleet and go as places that are taken away: what they hold is
moved to the others, and what cannot move ends where it is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from actors.controller.drain import hand_over
from actors.controller.replica_handles import place_name
from actors.rpc.lifecycle import scheduler_name
from actors.rpc.ray_rpc import call
from actors.rpc.tasks import background
from quadriga.clock import Clock
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.replica import DepthClass, ReplicaSnapshot, Role
from quadriga.errors import QuadrigaError
from quadriga.policies.load import decode_pressure
from quadriga.policies.scaling import AddReplicas, RetireReplica, ScalingOrder, ScalingPolicy
from quadriga.policies.scaling_need import ClassLoad, remaining_work

if TYPE_CHECKING:
    from actors.controller.helios_pools import HeliosPools

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
SHOWN_DECISIONS = 50


class Scaling:
    """One deployment's scaling; on the controller's event loop."""

    def __init__(self, app: str, config: QuadrigaConfig, places: HeliosPools, clock: Clock) -> None:
        self._app = app
        self._config = config
        self._places = places
        self._clock = clock
        self._policy = ScalingPolicy(config.helios.scaling)
        self._is_looking = False
        self._decisions: deque[dict[str, Any]] = deque(maxlen=SHOWN_DECISIONS)

    def tick(self, target: DepthClass | None) -> None:
        """Look at the loads and decide, in the background and once at a time."""
        if target is not None and not self._is_looking:
            self._is_looking = True
            background(self._look(target))

    async def _look(self, target: DepthClass) -> None:
        try:
            snapshots: list[ReplicaSnapshot] = await call(
                scheduler_name(self._app), "loads", timeout_s=CALL_TIMEOUT_S
            )
            self.decide(target, snapshots)
        except QuadrigaError as exc:
            logger.info("no scaling now: %s", exc)
        finally:
            self._is_looking = False

    def decide(self, target: DepthClass, snapshots: list[ReplicaSnapshot]) -> None:
        """Carry out what the policy wants for the class that serves. Raises: ConfigError."""
        now_s = self._clock.now_s()
        serving = self._places.serving()
        empty_s = self._places.empty_since_s([k for k, member in serving.items() if member is None])
        members = {m.name: m for m in serving.values() if m is not None}
        # Whatever the depth that strict sequences keep it at, or that it is about to leave.
        known = {s.info.name: s for s in snapshots if _is_of(s, Role.DECODE, target)}
        mine = [known[name] for name in members if name in known]
        gone = [known[m.name] for m in self._places.leaving() if m.name in known]
        # One that still holds another model is on its way, and nobody waits for it.
        pending_s = {name: now_s for name in members if name not in known}
        pending_s |= {place_name(key): since_s for key, since_s in empty_s.items()}
        waiting, waiting_tokens = _waiting(snapshots, target)
        load = ClassLoad(
            depth_class=target,
            snapshots=mine + [replace(s, draining=True) for s in gone],
            ready_s={name: m.since_s for name, m in members.items()},
            pending_s=pending_s,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
        )
        for order in self._policy.decide([load], now_s=now_s):
            if isinstance(order, AddReplicas):
                self._note(order)
                for _ in range(order.count):
                    self._places.add_place(order.depth_class)
            elif isinstance(order, RetireReplica):
                self._retire(order, mine)
            elif order.replica not in members and self._places.remove_place(order.replica):
                self._note(order)

    def _retire(self, order: RetireReplica, of_class: list[ReplicaSnapshot]) -> None:
        others = [s for s in of_class if s.info.name != order.replica and not s.draining]
        if not others:
            return
        others.sort(key=lambda s: (decode_pressure(s), s.info.name))
        if self._places.remove_place(order.replica):
            work = {s.info.name: round(remaining_work(s)) for s in of_class if not s.draining}
            self._note(order, work_tokens=work)
            background(self._hand_over(order.replica, [s.info.name for s in others]))

    def _note(self, order: ScalingOrder, **facts: Any) -> None:
        """Write an order down for operators."""
        entry = {"at_unix_s": self._clock.unix_s(), "what": type(order).__name__}
        entry |= asdict(order) | {"depth_class": str(order.depth_class)} | facts
        self._decisions.append(entry)
        logger.info("scaling: %s", entry)

    def view(self) -> dict[str, Any]:
        """Places that are wanted, and the last orders with their reasons, as plain values."""
        serving = self._places.serving()
        filled = sum(member is not None for member in serving.values())
        return {"wanted": len(serving), "filled": filled, "decisions": list(self._decisions)}

    async def _hand_over(self, replica: str, next_owners: Sequence[str]) -> None:
        """Move what a retiring replica holds; it drains meanwhile, so what fails ends there."""
        timeout_s = self._config.lifecycle.drain_timeout_s
        try:
            await hand_over(call, replica, next_owners, timeout_s=timeout_s)
        except QuadrigaError as exc:
            logger.info("%s hands nothing more over: %s", replica, exc)


def _is_of(snapshot: ReplicaSnapshot, role: Role, target: DepthClass) -> bool:
    return snapshot.info.role is role and snapshot.info.depth_class.model == target.model


def _waiting(snapshots: Sequence[ReplicaSnapshot], target: DepthClass) -> tuple[int, int]:
    """Sequences of the model that no decode replica has promised room to yet, and their tokens."""
    prefills = [s for s in snapshots if _is_of(s, Role.PREFILL, target)]
    decodes = [s for s in snapshots if _is_of(s, Role.DECODE, target)]
    held = sum(s.num_waiting + s.num_running for s in prefills)
    promised = sum(s.num_waiting - s.num_paused for s in decodes)
    count = max(0, held - promised)
    tokens = sum(s.waiting_tokens + s.used_tokens for s in prefills)
    return count, round(tokens * count / held) if held else 0
