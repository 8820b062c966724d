"""The places of replicas whose models and depths are chosen, and what each of them shall hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from quadriga.clock import Clock
from quadriga.config.resolve import ReplicaSpec
from quadriga.control.helios_setup import HeliosSetup
from quadriga.control.replica_record import PlaceKey, ReplicaPhase, ReplicaRecord, place_name
from quadriga.core.replica import DepthClass, Role

ANSWER_S = 5.0
"""For the first answer of a replica that another controller started."""


class HeliosPools:
    """What shall run where; the controller's loop makes it so.

    Args:
        replicas: The controller's table of replicas by name, which it keeps up to date.

    Attributes:
        base: The places there are, with what they hold at first; scaling adds some.
        held: What each place shall hold; changes with the orders.
        scouts: Places that profile.
        fixed: Places of other pools, which hold what they are configured to, and are not among
            `base`.
        changing: The place whose order is being carried out.
    """

    def __init__(
        self, setup: HeliosSetup, replicas: Mapping[str, ReplicaRecord], clock: Clock
    ) -> None:
        self.base = dict(setup.base)
        self.held: dict[PlaceKey, DepthClass] = {}
        self.scouts = setup.scouts
        self.fixed = setup.fixed
        self.changing: PlaceKey | None = None
        self._specs = setup.specs
        self._is_scaled = setup.config.helios.scaling.enabled
        self._replicas = replicas
        self._clock = clock
        self._empty_s: dict[PlaceKey, float] = {}  # since when a place is empty
        self._given_up: set[PlaceKey] = set()
        self._leave_out_removed(setup.config.helios.scaling.min_replicas)

    def _leave_out_removed(self, least: int) -> None:
        """Places that an earlier controller's scaling took away are none of this one's either."""
        filled = {replica.key for replica in self._replicas.values()}
        own = [key for key in self.base if key[0] is Role.DECODE and key not in self.scouts]
        empty = [key for key in own if key not in filled]
        if self._is_scaled and len(empty) < len(own):  # else there was none before
            for key in empty[: max(0, len(own) - least)]:
                del self.base[key]

    def specs(self) -> dict[PlaceKey, ReplicaSpec]:
        """What shall run now; a replica that was found running keeps what it holds."""
        if self._is_scaled:
            self._adopt_added()
        chosen = {key: self._specs[key[0], self._wanted(key)] for key in self.base}
        return {**chosen, **self.fixed}

    def _adopt_added(self) -> None:
        """Replicas that an earlier controller added are places of this one, too."""
        self._given_up &= {replica.key for replica in self._replicas.values()}
        for replica in self._replicas.values():
            if replica.key in {*self.base, *self.fixed, *self._given_up}:
                continue
            if replica.key[0] is Role.DECODE and replica.is_ready:
                if (Role.DECODE, replica.depth_class) in self._specs:
                    self.base[replica.key] = replica.depth_class

    def add_place(self, depth_class: DepthClass) -> None:
        """One more decode replica."""
        taken = [n for role, n in (*self.base, *self.fixed) if role is Role.DECODE]
        taken += [m.key[1] for m in self._replicas.values() if m.key[0] is Role.DECODE]
        key = (Role.DECODE, max(taken) + 1)
        self.base[key] = self.held[key] = depth_class
        self._empty_s[key] = self._clock.now_s()

    def remove_place(self, name: str) -> bool:
        """One decode replica less, by its name or its place's; False: it is not one to go."""
        keys = [m.key for m in self._replicas.values() if m.name == name]
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

    def serving(self) -> dict[PlaceKey, ReplicaRecord | None]:
        """The decode places that are not scouts', and the replicas that fill them."""
        keys = [k for k in self.base if k[0] is Role.DECODE and k not in self.scouts]
        return {key: self.replica_at(key) for key in keys}

    def leaving(self) -> list[ReplicaRecord]:
        """Decode replicas on their way out that were no scouts."""
        return [
            m
            for m in self._replicas.values()
            if m.phase is ReplicaPhase.RETIRING
            and m.key[0] is Role.DECODE
            and m.key not in self.scouts
            and m.key not in self.fixed
        ]

    def empty_since_s(self, keys: Collection[PlaceKey]) -> dict[PlaceKey, float]:
        """Since when these empty places have had no placed process; others are taken for filled.

        One that is placed and starts has `lifecycle.replica_start_timeout_s`, however large its
        model is.
        """
        now_s = self._clock.now_s()
        starting = {m.key for m in self._replicas.values() if m.phase is ReplicaPhase.STARTING}
        since_s = {key: self._empty_s.get(key, now_s) for key in keys}
        self._empty_s = {key: now_s if key in starting else s for key, s in since_s.items()}
        return dict(self._empty_s)

    def _wanted(self, key: PlaceKey) -> DepthClass:
        """What a place shall hold; at first what is found there.

        An earlier controller may have ended in the middle of a switch: of two models at one place
        stays the one that the other role has too, and either role decides alike where it has both.
        Nothing is settled before all that were found have answered, or had time to.
        """
        if key in self.held:
            return self.held[key]
        partners = {
            m.depth_class.model
            for m in self._replicas.values()
            if m.is_ready
            and m.key[0] is not key[0]
            and m.key not in self.fixed
            and (m.key in self.scouts) is (key in self.scouts)
        }
        known = [c for m in self._ready_at(key) if (key[0], c := m.depth_class) in self._specs]
        best = min(known, key=lambda c: (c.model not in partners, str(c)), default=self.base[key])
        latest_s = self._clock.now_s() - ANSWER_S
        unheard = (m for m in self._replicas.values() if m.fingerprint is None)
        if (known or not self._at(key)) and all(m.since_s < latest_s for m in unheard):
            self.held[key] = best
        return best

    def who_decides(self, key: PlaceKey) -> Callable[[ReplicaRecord], bool] | None:
        """Whom to ask before an outdated replica of a place goes; None: other pools' go as any."""
        return None if key in self.fixed else self.may_go

    def may_go(self, replica: ReplicaRecord) -> bool:
        """Whether a replaced replica may be retired without leaving sequences without their model.

        The last prefill replica of a model stays until every place of decode has gone over to
        another; the last decode replica of a model until no replica computes its prompts any more.
        Scouts and those that serve do not stand in for each other.
        """
        if replica.status is None or not replica.is_ready:
            return True
        model, is_scout = replica.depth_class.model, replica.key in self.scouts
        living = [
            m
            for m in self._replicas.values()
            if m is not replica
            and m.status
            and m.key not in self.fixed
            and (m.key in self.scouts) is is_scout
        ]
        same = [m for m in living if m.depth_class.model == model]
        if any(m.key[0] is replica.key[0] and m.is_ready and self._is_current(m) for m in same):
            return True
        if replica.key[0] is Role.DECODE:
            return not any(m.key[0] is Role.PREFILL for m in same)
        return all(
            any(self._is_current(m) and m.depth_class.model != model for m in self._ready_at(key))
            for key in self.base
            if key[0] is Role.DECODE and (key in self.scouts) is is_scout
        )

    def _is_current(self, replica: ReplicaRecord) -> bool:
        wanted = self.held.get(replica.key)
        return wanted is None or replica.depth_class.model == wanted.model

    def _at(self, key: PlaceKey) -> list[ReplicaRecord]:
        """Replicas of a place that are not on their way out."""
        retiring = ReplicaPhase.RETIRING
        return [m for m in self._replicas.values() if m.key == key and m.phase is not retiring]

    def _ready_at(self, key: PlaceKey) -> list[ReplicaRecord]:
        return [m for m in self._at(key) if m.is_ready]

    def replica_at(self, key: PlaceKey) -> ReplicaRecord | None:
        """The replica that fills a place; what the place shall hold comes first, then its model."""
        ready, held = self._ready_at(key), self.held.get(key)
        return min(
            ready,
            key=lambda m: (m.depth_class != held, not self._is_current(m), m.since_s),
            default=None,
        )
