"""The rebatching policies by the names the configuration knows."""

from __future__ import annotations

from collections.abc import Callable

from quadriga.checkpoint.exits import ExitCounters
from quadriga.clock import Clock
from quadriga.policies.baselines.exits import EagerExits, LazyExits, MajorityExits, NoExits
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.policies.drex.rebatcher import SURVEY_EVERY
from quadriga.policies.rebatching import Rebatcher

_GROUPED: dict[str, Callable[[SegmentCosts], Rebatcher]] = {
    "eager": EagerExits,
    "lazy": LazyExits,
    "majority": MajorityExits,
    "off": NoExits,
}
POLICIES = ("drex", *_GROUPED)


def make_rebatcher(
    name: str,
    costs: SegmentCosts,
    counters: ExitCounters,
    *,
    deterministic: bool = False,
    is_surveyed: bool = False,
    clock: Clock | None = None,
) -> Rebatcher:
    """Return a policy by name, one of `POLICIES`.

    Args:
        is_surveyed: Somebody wants to know where tokens could leave; see `DrexRebatcher`.
        clock: Of the loop; see `DrexRebatcher`.
    """
    if name == "drex":
        return DrexRebatcher(
            costs,
            counters=counters,
            deterministic=deterministic,
            survey_every=SURVEY_EVERY if is_surveyed else 0,
            clock=clock,
        )
    return _GROUPED[name](costs)
