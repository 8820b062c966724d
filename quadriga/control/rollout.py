"""Whether a place needs another replica, and which of those it has must go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from quadriga.control.replica_record import PlaceKey, ReplicaPhase, ReplicaRecord
from quadriga.core.replica import PARTS, Role

logger = logging.getLogger(__name__)

SURGE_PATIENCE_S = 10.0
"""A successor that is pending for longer needs the room of the one it replaces."""
FIRST_ANSWER_S = 5.0
"""An empty place waits so long for an adopted replica, which may have filled it before."""
LEAVE_S = 15.0
"""A replica that will go anyway is retired so long before, whether or not it has a successor."""
SHOWN_WORK = 4
"""Replicas whose remaining work is told where one goes."""


@dataclass(frozen=True, slots=True)
class DepartingReplica:
    """A replica that must go.

    Attributes:
        moves: What it runs is moved to others.
        within_s: It has so long; None: as long as its lifecycle says.
    """

    replica: ReplicaRecord
    reason: str
    moves: bool = False
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """Whether a place needs another replica, and which of its replicas must go.

    Attributes:
        waits: Why a replica that was to go serves on though its successor is ready; empty where
            none does.
    """

    lacks_one: bool
    going: Sequence[DepartingReplica]
    waits: str = ""


class WaitingRollouts:
    """The places whose `Rollout` waits; tells the log once what for."""

    def __init__(self) -> None:
        self._since: dict[PlaceKey, tuple[str, float]] = {}

    def note(self, waits: Mapping[PlaceKey, str], now_s: float) -> None:
        """Take what all places wait for now; those that do not wait are left out, or empty."""
        before, self._since = self._since, {}
        for key, text in waits.items():
            last, since_s = before.get(key, ("", now_s))
            if text:  # for another successor it goes on waiting
                self._since[key] = (text, since_s)
            if text not in ("", last):
                logger.info("the roll-out waits: %s", text)

    def of(self, key: PlaceKey) -> str:
        """What a place waits for; empty where it does not."""
        return self._since.get(key, ("", 0.0))[0]

    def overdue(self, limit_s: float, now_s: float) -> str | None:
        """What is wrong, once a place has waited for longer than `limit_s`; None until then."""
        late = [text for text, since_s in self._since.values() if now_s - since_s > limit_s]
        if not late:
            return None
        return (
            f"the roll-out has not gone on for {limit_s:.0f} s: {'; '.join(late)}. What served "
            "before serves on: mend what keeps that replica from starting, or go back to the "
            "configuration before"
        )


def _waits_long(replica: ReplicaRecord, now_s: float) -> bool:
    return replica.phase is ReplicaPhase.PENDING and now_s - replica.since_s > SURGE_PATIENCE_S


def _lacks(replica: ReplicaRecord, everyone: Iterable[ReplicaRecord]) -> list[Role]:
    """Parts of the work that no ready replica of its kind does; all, where it is not ready."""
    kind = attrgetter("depth_class", "info.numerics")
    alike = [m for m in everyone if m.is_ready and replica.is_ready and kind(m) == kind(replica)]
    return [part for part in PARTS if not any(m.key[0].does(part) for m in alike)]


def turn_over(
    key: PlaceKey,
    everyone: Collection[ReplicaRecord],
    wanted: Mapping[PlaceKey, str],
    failing: Collection[Role] = (),
    *,
    left_s: Callable[[ReplicaRecord], float | None],
    may_go: Callable[[ReplicaRecord], bool] | None,
    now_s: float,
) -> Rollout:
    """Decide for one place; a replica goes when its successor is ready, or waits for its room.

    Of a role one after the other: while a successor starts, or waits for the room of a replica that
    is on its way out, no other outdated replica gets one, or goes without. None goes without while
    successors die before they are ready. One that serves stays until its successor does: of another
    depth, or with other weights, that needs such replicas of the other role.

    Args:
        everyone: All replicas.
        wanted: Fingerprints that the replicas of all places shall have.
        failing: Roles of which processes that are wanted die before they are ready.
        left_s: Seconds until a replica goes anyway: its node does, or it was asked to; None where
            it stays.
        may_go: Asked before an outdated replica is retired, which needs a ready successor then;
            None: any may go.
    """
    alike = [m for m in everyone if m.key[0] is key[0]]
    staying = [m for m in alike if m.phase is not ReplicaPhase.RETIRING]
    is_leaving = len(staying) < len(alike)
    is_under_way = any(
        m.phase is ReplicaPhase.STARTING
        # For long it may wait in vain, if no room is about to be given back.
        or (m.phase is ReplicaPhase.PENDING and (is_leaving or not _waits_long(m, now_s)))
        for m in staying
        if m.fingerprint == wanted.get(m.key)
    )
    replicas = [m for m in staying if m.key == key]
    due_s = {m.name: left_s(m) for m in replicas}
    current = [m for m in replicas if m.fingerprint == wanted[key] and due_s[m.name] is None]
    by_worth = sorted(current, key=lambda m: (m.phase is not ReplicaPhase.READY, m.name))
    going = [DepartingReplica(m, "there are two for one place") for m in by_worth[1:]]
    has_no_room = any(_waits_long(m, now_s) for m in current)
    may_give_room = may_go is None and not (is_leaving or is_under_way or failing)
    # Where successors die, and one waits for room, none would ever come from waiting for partners.
    is_stuck = bool(failing) and any(
        _waits_long(m, now_s) and m.fingerprint == wanted.get(m.key) for m in everyone
    )
    waits = ""
    # Those first that go anyway: their time is not decided here; then those that serve nobody yet.
    others = [m for m in replicas if m not in current]
    for replica in sorted(others, key=lambda m: (due_s[m.name] is None, m.is_ready))[:1]:
        is_spare = is_stuck or may_go is not None or bool(_lacks(replica, everyone))
        successors = [m for m in current if m.is_ready]
        is_replaced = any(is_spare or not _lacks(m, everyone) for m in successors)
        within_s = due_s[replica.name]
        if within_s is not None:
            # A node that goes takes no successor: giving up the room there helps nobody.
            was_asked = replica.status is not None and replica.status.leave_s is not None
            if is_replaced or (has_no_room and was_asked) or within_s < LEAVE_S:
                going.append(
                    DepartingReplica(
                        replica, "it, or its node, was asked to go", moves=True, within_s=within_s
                    )
                )
        elif is_replaced or (has_no_room and may_give_room):
            if may_go is None:
                going.append(DepartingReplica(replica, "its configuration has changed"))
            elif may_go(replica):  # for another model: those still to change have the old one
                going.append(DepartingReplica(replica, "another model takes its place", moves=True))
        if successors and not is_replaced and not any(one.replica is replica for one in going):
            [lacking, *_] = _lacks(successors[0], everyone)
            waits = (
                f"{successors[0].name} is ready in the place of {replica.name}, and needs a "
                f"{lacking} replica of {successors[0].depth_class} with the same weights"
            )
    stays = any(due_s[m.name] is None for m in replicas)
    may_be_filled = any(m.fingerprint is None and now_s - m.since_s < FIRST_ANSWER_S for m in alike)
    comes = may_be_filled or (stays and is_under_way)
    return Rollout(not current and not comes, going, waits)


def is_relieved(
    replica: ReplicaRecord, replicas: Mapping[PlaceKey, Sequence[ReplicaRecord]], *, now_s: float
) -> bool:
    """Whether a replica that has no place any more may go.

    Where none of its role serves its model there, as prefill and decode replicas give way to mixed
    ones, it serves until the others do, or one of them waits for room.

    Args:
        replicas: Of each place that there shall be, none of them retiring.
    """
    staying = [m for of_place in replicas.values() for m in of_place]
    serving = {(m.key[0], m.depth_class.model) for m in staying if m.is_ready}
    if not replica.is_ready or (replica.key[0], replica.depth_class.model) in serving:
        return True
    waits = any(_waits_long(m, now_s) for m in staying)
    return waits or all(any(m.is_ready for m in of_place) for of_place in replicas.values())


def fewer_wanted(
    replica: ReplicaRecord, replicas: Iterable[ReplicaRecord], work: Mapping[str, float]
) -> str:
    """Say why a replica goes that has no place any more; `work` as for `kept_places`."""
    kind = replica.key[0], replica.fingerprint
    alike = {m.name for m in replicas if (m.key[0], m.fingerprint) == kind and m.name in work}
    least = sorted(alike - {replica.name}, key=lambda name: (work[name], name))
    shown = [replica.name, *least[: SHOWN_WORK - 1]] if alike else []
    figures = ", ".join(f"{name} {work.get(name, 0.0):.0f}" for name in shown)
    return f"fewer are wanted{figures and '; the work left: '}{figures}"


def kept_places(
    replicas: Sequence[ReplicaRecord], places: Mapping[PlaceKey, str], work: Mapping[str, float]
) -> dict[str, PlaceKey]:
    """Give places to replicas that are what these shall hold, whatever place they had.

    A pool that grows, comes or goes shifts the places of those behind it, whose replicas stay.
    Where fewer are wanted than there are, those of the highest places would go, however much they
    have to do. Instead those with the least remaining work give their places to others of their
    kind.

    Args:
        replicas: None of them retiring.
        places: The fingerprint that the replica of each place shall have.
        work: Remaining work by replica; one that is not in it has none.

    Returns: new places by replica, of those alone that change theirs; a replica in a place that is
        not in `places`, and not in the result, is one too many.
    """
    extra = {m.name: m for m in replicas if places.get(m.key) != m.fingerprint}
    taken = {m.key for m in replicas if m.name not in extra}
    changed: dict[str, PlaceKey] = {}

    def worth(replica: ReplicaRecord) -> tuple[bool, float, PlaceKey, str]:
        return not replica.is_ready, -work.get(replica.name, 0.0), replica.key, replica.name

    for replica in sorted(extra.values(), key=worth):
        kind = (replica.key[0], replica.fingerprint)
        free = [k for k, wanted in places.items() if (k[0], wanted) == kind and k not in taken]
        if free:
            changed[replica.name] = min(free)
            taken.add(min(free))
            continue
        others = [
            m
            for m in replicas
            if m.name not in extra
            and m.name not in changed
            and (m.key[0], m.fingerprint) == kind
            and m.key not in changed.values()
        ]
        least = min(others, key=lambda m: (work.get(m.name, 0.0), m.name), default=None)
        if least is not None and work.get(least.name, 0.0) < work.get(replica.name, 0.0):
            changed[replica.name], changed[least.name] = least.key, replica.key
    return changed
