"""Where requests go whose model and depth are chosen for them; the scheduler's part of it.

The controller says which classes serve, and which replicas are scouts, there for profiles and for
strict sequences that need more layers. A sequence's decision is remembered from its admission
to its end, so that its decode replica is of the kind it was admitted for. All of it is soft state:
a scheduler that starts anew treats such sequences like any others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quadriga.checkpoint.exits import MAX_LAYERS
from quadriga.core.replica import PARTS, DepthClass, ReplicaSnapshot, Role
from quadriga.core.request import AUTO_MODEL
from quadriga.core.routing import Admission, AdmitRequest, PlaceRequest
from quadriga.errors import Unavailable

UNTOLD_S = 3.0
"""So long after a profile's place was given, the controller may not have heard of it."""
SCORED_EVERY = 4
"""One of so many requests reports the log-probabilities of its tokens."""
MAX_REMEMBERED = 65_536
GONE_RETRY_S = 30.0
"""Told to who names a model that made way for another one: a change back takes about as long."""


@dataclass(frozen=True, slots=True)
class Route:
    """What the controller last decided.

    Attributes:
        serve: Classes that serve, the chosen one first.
        scouts: Replicas that profile.
        profile: The class that wants live requests now.
        profile_decode: The decode replica of it.
        places: Requests it wants.
    """

    serve: tuple[DepthClass, ...] = ()
    scouts: frozenset[str] = frozenset()
    profile: DepthClass | None = None
    profile_decode: str | None = None
    places: int = 0


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """What a sequence was admitted for.

    Attributes:
        profile: The replica whose profile it is part of.
        needs_depth: Layers it may need, for strict ones; else 0.
        by_name: It names its model, and has as many of its layers as are loaded anywhere.
    """

    profile: str | None = None
    needs_depth: int = 0
    by_name: bool = False


class AutoRouter:
    """Chooses models at admission and replicas of a fitting depth at placement.

    Attributes:
        route: None while models are not chosen: then only `groups` is asked, if depths differ.
    """

    def __init__(self) -> None:
        self.route: Route | None = None
        self._decisions: OrderedDict[str, RoutingDecision] = OrderedDict()
        self._given: deque[tuple[float, str, str]] = deque()
        self._num_served = 0

    def choose(
        self,
        request: AdmitRequest,
        snapshots: Sequence[ReplicaSnapshot],
        now_s: float,
        *,
        profiles: bool = True,
    ) -> tuple[AdmitRequest, list[ReplicaSnapshot], RoutingDecision]:
        """The request with its model filled in, and the replicas it may go to.

        Args:
            snapshots: Of replicas that take work.
            profiles: It may be part of a profile.

        Raises:
            Unavailable: No class has both a prefill and a decode replica.
        """
        route = self.route
        assert route is not None
        if profiles and request.model == AUTO_MODEL and self._has_place(route, now_s):
            assert route.profile is not None and route.profile_decode is not None
            allowed = {*route.scouts, route.profile_decode}
            on_scouts = [
                s
                for s in snapshots
                if s.info.depth_class.model == route.profile.model
                and (s.info.name in allowed or (not route.scouts and s.info.role is Role.PREFILL))
            ]
            if {s.info.role for s in on_scouts} == {*PARTS}:
                chosen = replace(request, model=route.profile.model)
                return chosen, on_scouts, RoutingDecision(route.profile_decode, request.needs_depth)
        others = [s for s in snapshots if s.info.name not in route.scouts]
        by_name = request.model != AUTO_MODEL
        decision = RoutingDecision(None, request.needs_depth, by_name)
        if by_name:
            return request, self._deep_enough(request, others, snapshots, by_name), decision
        # A scout reads prompts where no other replica of a model that serves can: one has died.
        scouts = [s for s in snapshots if s.info.name in route.scouts]
        scouts = [s for s in scouts if s.info.role is Role.PREFILL]
        for usable in (others, others + scouts):
            for depth_class in route.serve:
                of_model = [s for s in usable if s.info.depth_class.model == depth_class.model]
                if {s.info.role for s in of_model} == {*PARTS}:
                    chosen = replace(request, model=depth_class.model)
                    return chosen, self._deep_enough(chosen, of_model, snapshots), decision
        raise Unavailable("no model is ready; retry shortly", retry_after_s=1.0)

    def require_loaded(self, model: str, serving: Sequence[ReplicaSnapshot]) -> None:
        """Raises: Unavailable where another model is served in the place of the one named.

        Args:
            serving: Replicas that may take the request; see `choose`.
        """
        route = self.route or Route()
        is_gone = all(s.info.depth_class.model != model for s in serving)
        if is_gone and route.serve and all(c.model != model for c in route.serve):
            raise Unavailable(
                f"model {model!r} is not loaded now: helios.enabled chose {route.serve[0]} in its "
                f"place; ask for {AUTO_MODEL!r}, or have the service give {model!r} a pool of its "
                "own behind the first",
                retry_after_s=GONE_RETRY_S,
            )

    @staticmethod
    def _deep_enough(
        request: AdmitRequest,
        serving: list[ReplicaSnapshot],
        snapshots: Sequence[ReplicaSnapshot],
        by_name: bool = False,
    ) -> list[ReplicaSnapshot]:
        """Those that may take a request; of prefill replicas the deepest, where it is strict.

        The same of those that serve, where it names its model. Nothing tests a prompt's own token.
        Where too few layers are loaded everywhere, a strict one waits at a replica that serves
        until they are.

        Args:
            snapshots: Of all replicas, scouts included, which may be deeper.
        """
        if not request.needs_depth:
            if not by_name:
                return serving
            snapshots = serving
        layers = {
            s.info.name: min(s.info.depth_class.depth, request.needs_depth or MAX_LAYERS)
            for s in snapshots
            if s.info.role is Role.PREFILL and s.info.depth_class.model == request.model
        }
        most = max(layers.values(), default=0)
        deepest = [s for s in snapshots if layers.get(s.info.name) == most]
        rest = [s for s in serving if s.info.role is not Role.PREFILL]
        # Where a scout has no more layers than those that serve, it is left alone.
        return rest + ([s for s in deepest if s in serving] or deepest)

    def admitted(
        self, request: AdmitRequest, decision: RoutingDecision, admission: Admission, now_s: float
    ) -> Admission:
        """Note a sequence's decision; returns the admission with what its ingress must know."""
        if decision.profile is not None:
            self._given.append((now_s, decision.profile, request.sequence_id))
        if decision != RoutingDecision():
            self._decisions[request.sequence_id] = decision
            while len(self._decisions) > MAX_REMEMBERED:
                self._decisions.popitem(last=False)
        self._num_served += 1
        is_scored = decision.profile is not None or self._num_served % SCORED_EVERY == 0
        return replace(admission, profile=decision.profile, is_scored=is_scored)

    def groups(
        self, request: PlaceRequest, alive: Sequence[ReplicaSnapshot]
    ) -> list[list[ReplicaSnapshot]]:
        """Decode replicas of the model by depth class, those to be tried first in front.

        Where no route says which classes serve, that of the prefill replica does. Where only scouts
        have the model, they take a sequence too that is part of no profile: one whose decision was
        forgotten with a scheduler that died.

        Args:
            alive: Of the model, at any depth.
        """
        route = self.route or Route(serve=(request.depth_class,))
        decision = self._decisions.get(request.sequence_id, RoutingDecision())
        named = [s for s in alive if s.info.name == decision.profile]
        if named:
            return [named]
        scouts = route.scouts | {s.info.name for s in alive if s.is_scout}
        others = [s for s in alive if s.info.name not in scouts]
        # It may need layers that only a scout has; or no other has the model.
        if decision.needs_depth or not (others or request.exclude):
            others = list(alive)
        by_class: dict[tuple[DepthClass, bool], list[ReplicaSnapshot]] = {}
        for s in others:
            key = (s.info.depth_class, s.info.name in scouts)
            by_class.setdefault(key, []).append(s)
        order = {c: i for i, c in enumerate(route.serve)}

        def rank(key: tuple[DepthClass, bool]) -> tuple[int, bool, int, int]:
            depth_class, is_scout = key
            needed = MAX_LAYERS if decision.by_name else 0
            enough = -min(depth_class.depth, decision.needs_depth or needed)
            return enough, is_scout, order.get(depth_class, len(order)), -depth_class.depth

        return [by_class[key] for key in sorted(by_class, key=rank)]

    def finished(self, sequence_ids: Iterable[str]) -> None:
        """Sequences are over."""
        for sequence_id in sequence_ids:
            self._decisions.pop(sequence_id, None)

    def refused(self, sequence_ids: Sequence[str]) -> None:
        """Sequences that were admitted are not let in after all: their places are free again."""
        self._given = deque(given for given in self._given if given[2] not in sequence_ids)

    def _has_place(self, route: Route, now_s: float) -> bool:
        if route.profile is None or route.profile_decode is None:
            return False
        while self._given and self._given[0][0] < now_s - UNTOLD_S:
            self._given.popleft()
        untold = sum(name == route.profile_decode for _, name, _ in self._given)
        return route.places > untold
