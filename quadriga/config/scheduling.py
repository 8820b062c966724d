"""Sections about placement, rescheduling, scaling and HELIOS."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from quadriga.config.fields import Auto, Count, PositiveShare, Seconds, Section, Share


class AresConfig(Section):
    """Moving running sequences between decode replicas before they overload."""

    mode: Literal["off", "load", "ares"] = Field(
        "ares",
        description="ares: move by the forecast, and by the present load while predictions do not "
        "hold or a model has no length heads; load: by the present load alone; off: never. Of one "
        "replica in its class nothing is moved.",
    )
    interval_s: Seconds = Field(1.0, description="Between two decisions about moves.")
    theta: Share = Field(
        0.05,
        description="A replica above (1 + theta) times the mean load gives sequences away, one "
        "below (1 - theta) takes them.",
    )
    decay: Share = Field(
        0.8,
        description="Factor by which a token counts less at each further point of the forecast.",
    )
    min_gain: Share = Field(
        0.05,
        description="Least share of the variance between replicas that a move must remove, for 3 "
        "replicas; for n replicas 3/n times it.",
    )
    memory_limit: PositiveShare = Field(
        0.9, description="Share of its KV memory that a taker's forecast may reach."
    )
    memory_horizon_s: float = Field(
        100.0, ge=0, le=86_400, description="Memory peaks further ahead are left to later."
    )
    rescue_limit: PositiveShare = Field(
        0.9,
        description="Forecast share of KV memory above which a replica is relieved whatever the "
        "balance says.",
    )
    rescue_within_s: float = Field(
        100.0,
        ge=0,
        le=86_400,
        description="A replica whose forecast passes rescue_limit so soon is relieved, the soonest "
        "first.",
    )
    cooldown_s: float = Field(
        5.0, ge=0, le=3600, description="A sequence stays where it is for this long after a move."
    )
    max_moves: int = Field(2, ge=0, le=1000, description="Moves of one sequence in its life.")
    cost_factor: float = Field(
        1.0,
        ge=0,
        le=1000,
        description="A move must save at least this many times the seconds of its transfer.",
    )
    remaining_factor: float = Field(
        2.0,
        ge=0,
        le=1000,
        description="A sequence must be predicted to run for so many times the seconds of its "
        "transfer.",
    )
    hold_share: float = Field(
        0.0,
        ge=0,
        le=10,
        description="With placement ares: a sequence whose forecast fits no replica waits for "
        "room for this share of its predicted run.",
    )
    overload: bool = Field(
        True,
        description="Above 80 % of a class's KV memory, serve what is predicted to be short first: "
        "some replicas are kept for it, the rest waits. With placement ares.",
    )
    depth_pools: bool = Field(
        True,
        description="Keep some replicas of a class for sequences whose tokens leave early, where "
        "the model of a step says that it pays; looked at once a minute. With placement ares.",
    )
    max_concurrent_moves: Count = Field(4, description="Moves under way at once.")
    backoff_s: Seconds = Field(
        5.0,
        description="A sequence that could not be moved is left alone for this long, and for twice "
        "as long each time again.",
    )
    bandwidth_bytes_per_s: Auto | Annotated[float, Field(ge=1e4, le=1e13)] = Field(
        "auto", description="Of KV between decode replicas; auto: as measured by the moves."
    )
    predict_every_tokens: int = Field(
        20,
        ge=0,
        le=100_000,
        description="A running sequence's remaining length is predicted anew this often; 0 never "
        "predicts.",
    )
    reference_step_s: float = Field(
        0.02,
        gt=0,
        le=100,
        description="A typical decode step. The forecast's points lie 20 such steps ahead and "
        "further, up to 33,000; the same for all replicas.",
    )
    record_file: str | None = Field(
        None, description="Every decision with all it saw, as JSON lines, for replays."
    )
    record_max_bytes: int = Field(
        100_000_000, ge=1, le=1 << 40, description="The recording ends at this size."
    )


PlacementKind = Literal["least_work", "least_requests", "current_load", "round_robin", "ares"]


class SchedulerConfig(Section):
    """Admission, placement and rescheduling."""

    placement: PlacementKind = Field(
        "ares",
        description="Where a new sequence decodes. ares: where it hurts the forecast balance and "
        "memory least, and by least_work where there is no forecast; least_work: the fewest tokens "
        "to be expected: of each sequence there its prompt, and an answer of average length. The "
        "others are baselines: the fewest sequences, the fewest KV tokens (a fast replica looks "
        "full), each in turn.",
    )
    ares: AresConfig = AresConfig()
    prefix_weight: float = Field(
        2.0,
        ge=0,
        le=100,
        description="A prompt goes to the prefill replica with the least tokens waiting - "
        "prefix_weight x tokens of the prompt's beginning that went there before. 2: once for the "
        "first token, which is there sooner, and once for those behind it; 0: prompts are spread "
        "whatever they begin with.",
    )
    snapshot_interval_s: Seconds = Field(1.0, description="Between two load reports of a replica.")
    snapshot_max_age_s: Seconds = Field(
        5.0, description="A replica not heard of for this long gets nothing new."
    )
    max_wait_s: Seconds | None = Field(
        30.0,
        description="A request that is predicted to wait longer than this for a place on a decode "
        "replica is refused with 429 at once and told when to come back, so that those let in stay "
        "fast; null: requests wait until the prefill queues are full.",
    )
    max_retry_after_s: Seconds = Field(
        60.0, description="Longest wait that a 429 for lack of room asks for."
    )


class ScalingConfig(Section):
    """How many decode replicas a (model, depth) class has."""

    enabled: bool = Field(
        False, description="Let the number follow the load; needs helios.enabled."
    )
    min_replicas: int = Field(1, ge=1, le=1024, description="Of a class that serves.")
    max_replicas: int = Field(4, ge=1, le=1024, description="Of a class.")
    utilisation: PositiveShare = Field(
        0.75,
        description="Share of KV memory, of slots and of the step time allowed that a class's "
        "forecast may fill before it gets another replica.",
    )
    tpot_s: Seconds | None = Field(
        None, description="Time per output token to be kept; null: memory and slots alone count."
    )
    horizon_s: Seconds = Field(30.0, description="How far ahead the forecast load is looked at.")
    down_after_s: Seconds = Field(
        300.0, description="A class shrinks to the most it needed during this time."
    )
    down_margin: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="It shrinks only where the replicas that stay would be filled by this share "
        "less than utilisation allows, so that a load at the edge does not swing.",
    )
    cold_start_s: float = Field(
        15.0, ge=0, le=3600, description="Step times of a younger replica are not believed."
    )
    pending_timeout_s: Seconds = Field(
        120.0, description="A replica that is not there by then is no longer counted on."
    )

    @model_validator(mode="after")
    def _ordered(self) -> ScalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}"
            )
        return self


class HeliosConfig(Section):
    """Choosing model and depth by what the live requests need."""

    catalogue: str | None = Field(
        None,
        description="YAML file, or folder of checkpoints, with the first pool's model among them; "
        "null: the bundled family, where HELIOS is enabled.",
    )
    enabled: bool = Field(
        default_factory=lambda given: given.get("catalogue") is not None,
        description="Serve `quadriga-auto` by what is chosen. Left out: where there is a catalogue "
        "to choose from.",
    )
    models: tuple[str, ...] = Field(
        (), max_length=16, description="Ids that may be chosen; empty: all of the catalogue."
    )
    slo: Literal["throughput", "response", "accuracy", "energy"] = Field(
        "throughput", description="What the choice is made for."
    )
    max_candidates: int = Field(3, ge=1, le=16, description="Models that are profiled.")
    scout: bool = Field(
        True,
        description="Profile on a full-depth replica beside those that serve; false: on the one "
        "that serves, which then changes model for it.",
    )
    profile_requests: int = Field(5, ge=1, le=1000, description="Live requests a candidate gets.")
    min_coverage: PositiveShare = Field(
        0.7,
        description="A model is loaded up to the first exit that this share of tokens would pass.",
    )
    max_changed_share: Share = Field(
        0.02,
        description="Part of a model is loaded only where no more of its tokens than this are "
        "expected to be others than all of it would say; 1: breaches alone count, as in the paper.",
    )
    perplexity_slack: float = Field(
        0.02, ge=0, le=10, description="Share by which a choice may exceed the best perplexity."
    )
    breach_window_tokens: Count = Field(100, description="Tokens among which breaches count.")
    breach_window_per_sequence: int = Field(
        4, ge=1, le=1000, description="The window is at least this many tokens a running sequence."
    )
    breach_share: float = Field(
        0.5, gt=0, lt=1, description="Share of the window; more breaches call for a change."
    )
    reassess_requests: Count = Field(
        150, description="Served requests between two profiles, at least."
    )
    profile_share: PositiveShare = Field(
        0.05,
        description="Share of the time, at most, in which models are loaded for profiles; 1: no "
        "limit.",
    )
    margin: float = Field(
        0.1, ge=0, lt=1, description="A change must be better, and a switch cheaper, by this share."
    )
    dwell_loads: float = Field(
        2.0, ge=0, le=1000, description="Between two changes, in loading times of the new choice."
    )
    order_timeout_s: Seconds = Field(
        300.0, description="A resize or switch that takes longer is given up."
    )
    retry_s: Seconds = Field(30.0, description="Until a failed order is tried again; doubles.")
    history_path: str | None = Field(
        None, description="File of the performance history; null: kept with the application."
    )
    scaling: ScalingConfig = ScalingConfig()

    @model_validator(mode="after")
    def _scaling_has_a_choice(self) -> HeliosConfig:
        """Scaling without HELIOS would do nothing; who turns HELIOS off by name may keep it."""
        if self.scaling.enabled and not self.enabled and "enabled" not in self.model_fields_set:
            raise ValueError(
                "scaling.enabled is for what HELIOS chooses, which is off; set helios.enabled: true"
            )
        return self
