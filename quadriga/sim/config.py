"""What is simulated, besides the load."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from quadriga.config.engine import PrefillConfig
from quadriga.config.scheduling import ScalingConfig
from quadriga.core.replica import DepthClass
from quadriga.errors import ConfigError
from quadriga.policies.ares.settings import TransferCosts
from quadriga.sim.profiles import NO_DELAYS, CostProfile, Delays
from quadriga.sim.records import PAUSE, MemoryRules

MODEL = "simulated"
DEPTH_CLASS = DepthClass(MODEL, 0)


@dataclass(frozen=True, slots=True)
class Failure:
    """A decode replica dies and comes back empty."""

    at_s: float
    replica: int
    down_s: float


def _deep_queue() -> PrefillConfig:
    """Queues that an overload fills late: what is refused is refused under every policy."""
    return PrefillConfig(max_queued_sequences=100_000, max_queued_tokens=1_000_000)


@dataclass(frozen=True, slots=True)
class SimScaling:
    """How a simulated cluster scales; `SimConfig.num_decode` is the most there are.

    Attributes:
        start_replicas: Serve from the beginning.
        start_s: From the order to the first sequence.
        stuck: Numbers of replicas that never start.
    """

    config: ScalingConfig
    start_replicas: int = 1
    start_s: float = 10.0
    stuck: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One simulated cluster.

    Attributes:
        bandwidth_bytes_per_s: Between replicas; None is the profile's.
        precopy: The source decodes on while the KV moves (ours); False: the sequence stands still
            until all of it is there (the paper's).
        learns_link: What a move costs is learned from the moves, as on the cluster; False: known.
        delays: Of the ways between clients and replicas.
        reference_step_s: Spaces the horizon of forecasts; None: a step at half of the memory.
        tick_s: Between two looks of the rescheduler, and between two samples.
        report_every_s: Between two reports of a replica, by which new sequences are placed where no
            forecast is looked at; 0: by what it holds at that moment.
        scaling: Replicas come and go, `num_decode` at most; None keeps all.
        depths: Layers that each decode replica has loaded; empty: all have the same. A step takes
            its share of the profile's, which is the deepest's; KV memory is as many tokens.
        strict_share: Of the requests, that need the deepest there are; drawn by the seed.
        limit_s: The run is cut at this simulated time; what is unfinished then counts as failed.
    """

    profile: CostProfile
    num_decode: int
    num_prefill: int
    seed: int = 0
    bandwidth_bytes_per_s: float | None = None
    memory: MemoryRules = PAUSE
    precopy: bool = True
    tick_s: float = 1.0
    report_every_s: float = 0.0
    limit_s: float = math.inf
    failures: tuple[Failure, ...] = ()
    reference_step_s: float | None = None
    learns_link: bool = False
    delays: Delays = NO_DELAYS
    scaling: SimScaling | None = None
    depths: tuple[int, ...] = ()
    strict_share: float = 0.0
    prefill: PrefillConfig = field(default_factory=_deep_queue)

    def __post_init__(self) -> None:
        if not 0.0 <= self.report_every_s < math.inf:
            raise ConfigError(
                f"report_every_s: {self.report_every_s} must be 0 or more", param="report_every_s"
            )
        if self.num_decode < 1 or self.num_prefill < 1:
            raise ConfigError("at least one prefill and one decode replica are needed")
        if self.depths and (len(self.depths) != self.num_decode or min(self.depths) < 1):
            raise ConfigError(
                f"depths: {self.depths} must name the layers of each of {self.num_decode} replicas",
                param="depths",
            )
        if self.depths and self.scaling is not None:
            raise ConfigError("depths: not with scaling, whose replicas are alike", param="depths")
        if not 0.0 <= self.strict_share <= 1.0:
            raise ConfigError(
                f"strict_share: {self.strict_share} must be in 0..1", param="strict_share"
            )
        if any(not 0 <= f.replica < self.num_decode for f in self.failures):
            raise ConfigError(f"failures: replicas are 0..{self.num_decode - 1}", param="failures")
        if self.scaling is not None and not 1 <= self.scaling.start_replicas <= self.num_decode:
            raise ConfigError(
                f"scaling.start_replicas: {self.scaling.start_replicas} must lie in "
                f"1..{self.num_decode}",
                param="scaling.start_replicas",
            )

    def profile_of(self, replica: int) -> CostProfile:
        """What a decode replica costs: its share of the layers."""
        if not self.depths:
            return self.profile
        step, share = self.profile.step, self.depths[replica] / max(self.depths)
        return replace(
            self.profile,
            step=replace(
                step,
                base_s=share * step.base_s,
                per_sequence_s=share * step.per_sequence_s,
                per_token_s=share * step.per_token_s,
            ),
        )

    @property
    def admitted_tokens(self) -> int:
        """KV tokens of one decode replica up to which new sequences are let in."""
        return math.floor(self.memory.admits * self.profile.kv_capacity_tokens)

    @property
    def link(self) -> TransferCosts:
        """What moving a sequence between two replicas costs."""
        return TransferCosts(
            self.profile.kv_bytes_per_token,
            self.bandwidth_bytes_per_s or self.profile.bandwidth_bytes_per_s,
            self.profile.round_trip_s,
        )
