"""The places of a fleet whose models and depths are chosen, and what each of them shall hold."""

from __future__ import annotations

from collections.abc import Collection

from actors.controller.helios_setup import HeliosSetup
from actors.controller.replica_handles import class_of, is_ready, place_name
from actors.controller.replica_manager import Key, ReplicaHandle, ReplicaManager, ReplicaPhase
from quadriga.clock import Clock
from quadriga.config.resolve import ReplicaSpec
from quadriga.core.replica import DepthClass, Role


class HeliosPools:
    """What shall run where; the controller's loop makes it so.

    Attributes:
        base: The places there are, with what they hold at first; scaling adds some.
        held: What each place shall hold; changes with the orders.
        scouts: Places that profile.
        changing: The place whose order is being carried out.
    """

    def __init__(self, setup: HeliosSetup, fleet: ReplicaManager, clock: Clock) -> None:
        self.base = dict(setup.base)
        self.held: dict[Key, DepthClass] = {}
        self.scouts = setup.scouts
        self.changing: Key | None = None
        self._specs = setup.specs
        self._is_scaled = setup.config.helios.scaling.enabled
        self._fleet = fleet
        self._clock = clock
        self._empty_s: dict[Key, float] = {}  # since when nobody fills a place
        self._given_up: set[Key] = set()

    def specs(self) -> dict[Key, ReplicaSpec]:
        """What shall run now; a replica that was found running keeps what it holds."""
        if self._is_scaled:
            self._adopt_added()
        return {key: self._specs[key[0], self._wanted(key)] for key in self.base}

    def _adopt_added(self) -> None:
        """Replicas that an earlier controller added are places of this one, too.

        Those that drain are on their way out, whoever sent them.
        """
        self._given_up &= {member.key for member in self._fleet.members.values()}
        for member in self._fleet.members.values():
            is_known = member.key in self.base or member.key in self._given_up
            is_leaving = member.status is not None and member.status.is_draining
            if is_known or is_leaving:
                continue
            if member.key[0] is Role.DECODE and is_ready(member):
                if (Role.DECODE, class_of(member)) in self._specs:
                    self.base[member.key] = class_of(member)

    def add_place(self, depth_class: DepthClass) -> None:
        """One more decode replica."""
        taken = [ordinal for role, ordinal in self.base if role is Role.DECODE]
        taken += [m.key[1] for m in self._fleet.members.values() if m.key[0] is Role.DECODE]
        key = (Role.DECODE, max(taken) + 1)
        self.base[key] = self.held[key] = depth_class
        self._empty_s[key] = self._clock.now_s()

    def remove_place(self, name: str) -> bool:
        """One decode replica less, by its name or its place's; False: it is not one to go."""
        keys = [m.key for m in self._fleet.members.values() if m.name == name]
        keys += [k for k in self.base if place_name(k) == name]
        key = next(iter(keys), None)
        if key is None or key not in self.base or key in self.scouts:
            return False
        if key == self.changing:
            return False
        del self.base[key]
        self.held.pop(key, None)
        self._empty_s.pop(key, None)
        self._given_up.add(key)
        return True

    def serving(self) -> dict[Key, ReplicaHandle | None]:
        """The places of decode that are no scouts', and who fills them."""
        keys = [k for k in self.base if k[0] is Role.DECODE and k not in self.scouts]
        return {key: self.member_of(key) for key in keys}

    def leaving(self) -> list[ReplicaHandle]:
        """Decode replicas on their way out that were no scouts."""
        return [
            m
            for m in self._fleet.members.values()
            if m.phase is ReplicaPhase.RETIRING
            and m.key[0] is Role.DECODE
            and m.key not in self.scouts
        ]

    def empty_since_s(self, keys: Collection[Key]) -> dict[Key, float]:
        """Since when nobody was even placed for these, which nobody fills now; others are filled.

        One that is placed and starts has `lifecycle.replica_start_timeout_s`, however large its
        model is.
        """
        now_s = self._clock.now_s()
        starting = {m.key for m in self._fleet.members.values() if m.phase is ReplicaPhase.STARTING}
        since_s = {key: self._empty_s.get(key, now_s) for key in keys}
        self._empty_s = {key: now_s if key in starting else s for key, s in since_s.items()}
        return dict(self._empty_s)

    def _wanted(self, key: Key) -> DepthClass:
        if key not in self.held:
            found = [m for m in self._fleet.of(key) if m.status is not None and is_ready(m)]
            known = [c for c in map(class_of, found) if (key[0], c) in self._specs]
            if not known and self._fleet.of(key):
                return self.base[key]  # it has not answered yet
            self.held[key] = known[0] if known else self.base[key]
        return self.held[key]

    def may_go(self, member: ReplicaHandle) -> bool:
        """Whether a replica that was replaced may be retired: nobody is left without his model.

        The last prefill replica of a model stays until every place of decode has gone over to
        another; the last decode replica of a model until nobody computes its prompts any more.
        Scouts and those that serve do not stand in for each other.
        """
        if member.status is None or not is_ready(member):
            return True
        model, is_scout = class_of(member).model, member.key in self.scouts
        living = [
            m
            for m in self._fleet.members.values()
            if m is not member and m.status and (m.key in self.scouts) is is_scout
        ]
        same = [m for m in living if class_of(m).model == model]
        if any(m.key[0] is member.key[0] and is_ready(m) and self._is_current(m) for m in same):
            return True
        if member.key[0] is Role.DECODE:
            return not any(m.key[0] is Role.PREFILL for m in same)
        return all(
            any(self._is_current(m) and class_of(m).model != model for m in self._ready_at(key))
            for key in self.base
            if key[0] is Role.DECODE and (key in self.scouts) is is_scout
        )

    def _is_current(self, member: ReplicaHandle) -> bool:
        wanted = self.held.get(member.key)
        return wanted is None or class_of(member).model == wanted.model

    def _ready_at(self, key: Key) -> list[ReplicaHandle]:
        return [m for m in self._fleet.of(key) if is_ready(m)]

    def member_of(self, key: Key) -> ReplicaHandle | None:
        """The replica that fills a place; what the place shall hold comes first."""
        ready = self._ready_at(key)
        return min(
            ready, key=lambda m: (class_of(m) != self.held.get(key), m.since_s), default=None
        )
