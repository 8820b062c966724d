"""What is simulated, besides the load."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

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
    """A decode replica dies and comes back empty; with scaling, when the scaler starts it."""

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
class SimExits:
    """An exit that tokens may leave at.

    A step reads the layers behind it where any token goes on; nobody waits for a fuller batch.

    Attributes:
        front_share: Of the layers, those before it.
        stays: How often a token of a request goes on, on average; each request has a rate of its
            own, drawn by the seed from a beta distribution.
        spread: Standard deviation of these rates.
        full_share: Of the requests, whose tokens may not leave early.
        quality_budget: Share of its tokens that a request allows to leave below its threshold while
            memory is nearly full; 0: none.
        budget_share: Of the requests whose tokens may leave early, those with that budget.
    """

    front_share: float
    stays: float = 0.07
    spread: float = 0.05
    full_share: float = 0.0
    quality_budget: float = 0.0
    budget_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("quality_budget", "budget_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(
                    f"exits.{name}: {getattr(self, name)} must be in 0..1", param=f"exits.{name}"
                )
        for name in ("front_share", "stays"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ConfigError(f"exits.{name}: must be between 0 and 1", param=f"exits.{name}")
        most = self.stays * (1.0 - self.stays)
        if not 0.0 < self.spread**2 < most or not 0.0 <= self.full_share <= 1.0:
            raise ConfigError(
                f"exits: spread {self.spread} must be above 0 and its square below {most:.3g}, "
                f"full_share {self.full_share} in 0..1",
                param="exits",
            )

    def drawn(self, count: int, seed: int) -> NDArray[np.float64]:
        """How often a token of each request goes on: [count]."""
        rng = np.random.default_rng([seed, 0xDE3])
        weight = self.stays * (1.0 - self.stays) / self.spread**2 - 1.0
        stays = rng.beta(self.stays * weight, (1.0 - self.stays) * weight, count)
        return np.where(rng.random(count) < self.full_share, 1.0, stays)

    def budgets(self, stays: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
        """The quality budget of each request, of those that are `drawn`: [count]."""
        has_one = np.random.default_rng([seed, 0xB0D]).random(len(stays)) < self.budget_share
        return np.where(has_one & (stays < 1.0), self.quality_budget, 0.0)


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
        lock_step: Decode replicas step together, as ranks of data-parallel attention do: each step
            takes as long as the slowest one's.
        exits: Tokens may leave early; None: all run all layers.
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
    failures: tuple[Failure, ...] = ()
    reference_step_s: float | None = None
    learns_link: bool = False
    delays: Delays = NO_DELAYS
    scaling: SimScaling | None = None
    depths: tuple[int, ...] = ()
    strict_share: float = 0.0
    lock_step: bool = False
    exits: SimExits | None = None
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
        if self.exits is not None and self.depths:
            raise ConfigError("exits: not with depths", param="exits")
        if self.exits and self.exits.quality_budget and self.memory.on_full != "pause":
            raise ConfigError(
                f"exits.quality_budget: not where a full memory does not pause sequences, but "
                f"{self.memory.on_full}",
                param="exits.quality_budget",
            )
        if not 0.0 <= self.strict_share <= 1.0:
            raise ConfigError(
                f"strict_share: {self.strict_share} must be in 0..1", param="strict_share"
            )
        if self.lock_step:
            self._check_lock_step()
        if any(not 0 <= f.replica < self.num_decode for f in self.failures):
            raise ConfigError(f"failures: replicas are 0..{self.num_decode - 1}", param="failures")
        if self.scaling is not None and not 1 <= self.scaling.start_replicas <= self.num_decode:
            raise ConfigError(
                f"scaling.start_replicas: {self.scaling.start_replicas} must lie in "
                f"1..{self.num_decode}",
                param="scaling.start_replicas",
            )

    def _check_lock_step(self) -> None:
        """Raises: ConfigError: With what ranks that live and step together cannot have."""
        if self.memory.on_full == "vllm":
            raise ConfigError(
                "lock_step: not with the memory rules of vLLM; use pause or recompute",
                param="lock_step",
            )
        if self.failures or self.scaling is not None:
            raise ConfigError(
                "lock_step: not with failures or scaling: ranks that step together come and go "
                "together",
                param="lock_step",
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
