"""The constants of rescheduling, each with its source, and what a transfer costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quadriga.core.replica import ReplicaSnapshot, Reservation
from quadriga.errors import ConfigError
from quadriga.policies.slot_reservation import RETURN_SHARE

NUM_POINTS = 16
FIRST_POINT_TOKENS = 20.0
POINT_RATIO = 1.64
TOKENS_AHEAD: NDArray[np.float64] = np.concatenate(
    ([0.0], FIRST_POINT_TOKENS * POINT_RATIO ** np.arange(NUM_POINTS))
)
"""Points of the horizon, the first is now: tokens that each sequence gains until then, 20 … 33,000.
Those of the memory are in seconds, at the class's reference step."""
TOKENS_BETWEEN: NDArray[np.float64] = np.diff(TOKENS_AHEAD, prepend=0.0)
"""Tokens between each point and the one before it."""
OVERSHOOT = 0.5
"""A move may turn the difference of a pair's work round, but to no more than this share of it."""

PAPER_REPLICAS = 3
"""Decode replicas of the cluster that the acceptance share is stated for."""


def horizon_s(reference_step_s: float) -> tuple[float, ...]:
    """Return the grid of a depth class: now, then 16 points ahead, in seconds.

    All replicas of a class must use one grid, or their forecasts cannot be compared; a slow
    replica is fewer tokens ahead at the same point.

    Args:
        reference_step_s: A typical decode step of the class; the same on every replica.
    """
    if not 0.0 < reference_step_s < 1e3:
        raise ConfigError(
            f"reference_step_s: {reference_step_s} must lie in 0..1000 s", param="reference_step_s"
        )
    return tuple((TOKENS_AHEAD * reference_step_s).tolist())


_MOST = {
    "memory_horizon_s": 1e6,
    "rescue_within_s": 1e6,
    "cooldown_s": 3600.0,
    "max_moves": 1000,
    "cost_factor": 1e3,
    "remaining_factor": 1e3,
    "hold_share": 10.0,
}
"""The most that a setting may be, where that is not 1; the least is 0."""


@dataclass(frozen=True, slots=True)
class AresSettings:
    """How rescheduling decides.

    Attributes:
        theta: A replica is overloaded above (1 + θ) times the mean, underloaded below (1 − θ).
        decay: By so much less does a token count for each point it lies further ahead.
        min_gain: Least share of the variance that a move must remove, for 3 replicas; of n it is
            asked 3/n of it, as one move among many can remove no more.
        memory_limit: Share of a destination's KV memory that its forecast peak may reach.
        memory_horizon_s: Peaks further ahead than this are left to later ticks.
        rescue_limit: A source that is forecast to be above this share of its own memory
        rescue_within_s: this soon is relieved whatever the balance says; the soonest first.
        cooldown_s: A sequence is left where it is for this long after a move.
        max_moves: Moves of one sequence in its life.
        moves_share: Moves in one tick, as a share of the replicas; at least one.
        cost_factor: The lower-bound gain must be this many times the cost of the move.
        hold_share: A prefilled sequence whose forecast fits no replica waits for room, at most for
            this share of the time it is predicted to decode.
        remaining_factor: Remaining time must exceed this many times the cost of the move.
        overload: A class that is nearly full serves short sequences first; see `overload`.
        depth_pools: Shallow and deep sequences of a class run apart where that pays; see
            `depth_pools`.
    """

    theta: float = 0.05
    decay: float = 0.8
    min_gain: float = 0.05
    memory_limit: float = 0.9
    memory_horizon_s: float = 100.0
    rescue_limit: float = 0.9
    rescue_within_s: float = 100.0
    cooldown_s: float = 5.0
    max_moves: int = 2
    moves_share: float = 1 / 32
    cost_factor: float = 1.0
    remaining_factor: float = 2.0
    hold_share: float = 0.0
    overload: bool = True
    depth_pools: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            most, value = _MOST.get(field.name, 1.0), getattr(self, field.name)
            if not 0.0 <= value <= most:
                raise ConfigError(
                    f"{field.name}: {value} must lie in 0..{most:g}", param=field.name
                )

    @property
    def weights(self) -> NDArray[np.float64]:
        """Weights of the points, together 1: [NUM_POINTS + 1].

        A point weighs the tokens between it and the one before it, so that the weighted load is the
        work still to come; far ones less, by `decay`. Now weighs nothing in moves. The present
        alone would take a replica whose sequences are far along for a full one: its steps are long,
        and soon over. Placement has a point weigh the tokens behind it, and so now as well.

        Source: ARES §5.2, Eq. 4; differs: there points weigh alike but for the decay, and now as
        much as all others.
        """
        return _weights(self.decay)


@cache
def _weights(decay: float) -> NDArray[np.float64]:
    """The weights of a decay; every placement asks for them."""
    raw = TOKENS_BETWEEN.copy()
    raw[1:] *= np.power(decay, np.arange(NUM_POINTS, dtype=np.float64))
    raw /= raw.sum()
    raw.setflags(write=False)
    return raw


def settings_under(settings: AresSettings, reservation: Reservation) -> AresSettings:
    """Return the settings for replicas that promise memory in a way.

    Where it is promised as it is used, no placement and no move fills a replica beyond
    `RETURN_SHARE`: neither shall be the reason why a sequence is paused.
    """
    if reservation == "longest":
        return settings
    return replace(settings, memory_limit=min(settings.memory_limit, RETURN_SHARE))


def settings_for(settings: AresSettings, members: Sequence[ReplicaSnapshot]) -> AresSettings:
    """The same for a class's replicas."""
    is_longest = all(s.info.reservation == "longest" for s in members)
    return settings_under(settings, "longest" if is_longest else "used")


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """What moving a sequence costs in one depth class.

    Attributes:
        bytes_per_token: KV of one token, all loaded layers.
        bandwidth_bytes_per_s: Between two decode replicas.
        round_trip_s: Reserve, commit and acknowledge.
    """

    bytes_per_token: float
    bandwidth_bytes_per_s: float
    round_trip_s: float = 0.01

    @overload
    def seconds(self, num_tokens: float) -> float: ...
    @overload
    def seconds(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]: ...
    def seconds(self, num_tokens: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """C_mig: bytes over bandwidth, and the round trip. Source: ARES §5.2."""
        return num_tokens * self.bytes_per_token / self.bandwidth_bytes_per_s + self.round_trip_s


def num_memory_points(settings: AresSettings, grid_s: ArrayLike) -> int:
    """Points of the grid at which memory is looked at: now, and those inside the horizon."""
    return int(np.asarray(grid_s).searchsorted(settings.memory_horizon_s, side="right"))


FIRST_BANDWIDTH_BYTES_PER_S = 100e6
"""Until a move was measured."""
ROUND_TRIP_S = 0.01
MIN_MEASURED_BYTES = 65_536
_RATE = 0.2


class LinkMeter:
    """Learns from the moves that are made how fast bytes go, and what a move takes beside that.

    Attributes:
        bytes_per_s, round_trip_s: As far as is known.
    """

    def __init__(self) -> None:
        self.bytes_per_s = FIRST_BANDWIDTH_BYTES_PER_S
        self.round_trip_s = ROUND_TRIP_S

    def moved(self, num_bytes: float, took_s: float, sending_s: float) -> None:
        """A sequence has moved; one that was small says nothing of the bandwidth."""
        more_s = took_s - sending_s - self.round_trip_s
        self.round_trip_s += _RATE * min(more_s, self.round_trip_s)  # one may have waited for long
        if num_bytes >= MIN_MEASURED_BYTES:
            measured = num_bytes / max(sending_s, 1e-4)
            self.bytes_per_s += _RATE * (measured - self.bytes_per_s)

    def costs(self, bytes_per_token: float) -> TransferCosts:
        """What a move is thought to cost."""
        return TransferCosts(bytes_per_token, self.bytes_per_s, self.round_trip_s)
