"""The ways to place and to move, by name: the objects the cluster runs, put together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quadriga.core.replica import Reservation
from quadriga.errors import ConfigError
from quadriga.policies.ares.rescheduler import Rescheduler
from quadriga.policies.ares.settings import AresSettings, settings_under
from quadriga.policies.baselines.placement import Placement
from quadriga.policies.placements import PLAIN

PLACEMENTS = {
    "round_robin": "round_robin",
    "current_load": "current_load",
    "least_requests": "least_requests",
    "least_work": "least_work",
    "shedding": "least_work",
    "reschedule": "current_load",
    "ares": "least_work",
    "ares-mixed": "least_work",
    "oracle": "least_work",
}
"""By policy, the placement without forecasts."""
POLICY_NAMES = tuple(PLACEMENTS)


@dataclass(frozen=True, slots=True)
class PolicySet:
    """A way to place and to move.

    Attributes:
        placement: Used where `foresees` is False, and while predictions are not believed.
        rescheduler: None moves nothing.
        foresees: Rescheduling looks at predictions.
        places_ahead: So does placement, where there is a forecast.
        sheds: Newcomers are refused while prefill replicas hold all they may without a place.
        knows: The predictions are the truth.
    """

    placement: Placement
    rescheduler: Rescheduler | None
    settings: AresSettings
    foresees: bool
    knows: bool
    places_ahead: bool
    sheds: bool = False


def make_policy(
    name: str, settings: AresSettings | None = None, *, reservation: Reservation = "used"
) -> PolicySet:
    """Return a fresh policy of a name.

    round_robin     each replica in turn
    current_load    the least used KV memory; ARES's baseline ("vLLM")
    least_requests  the fewest sequences
    least_work      the least expected work; what a service does without forecasts
    shedding        the same, and who would wait for a decode replica is refused
    reschedule      current load, and moves by the present load alone ("vLLM + rescheduling")
    ares            what a service does by default: placement, moves by forecast, with predictions
                    as wrong as those of ARES's head
    ares-mixed      the same, shallow and deep sequences never apart
    oracle          as ares, with true lengths

    Args:
        reservation: How the replicas promise memory; see `MemoryRules.reservation`.

    Raises:
        ConfigError: Another name.
    """
    if name not in POLICY_NAMES:
        raise ConfigError(
            f"--policy: {name!r} is not known; use one of {', '.join(POLICY_NAMES)}", param="policy"
        )
    settings = settings_under(settings or AresSettings(), reservation)
    if name == "ares-mixed":
        settings = replace(settings, depth_pools=False)
    foresees = name in ("ares", "ares-mixed", "oracle")
    moves = foresees or name == "reschedule"
    return PolicySet(
        placement=PLAIN[PLACEMENTS[name]](),
        rescheduler=Rescheduler(settings, predicts=foresees) if moves else None,
        settings=settings,
        foresees=foresees,
        knows=name == "oracle",
        places_ahead=foresees,
        sheds=name == "shedding",
    )
