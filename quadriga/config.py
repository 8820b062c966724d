"""The one configuration tree: YAML, command line and environment all end here.

Everything is frozen, unknown keys are refused, and every field states its unit and bounds.
`"auto"` is filled in once, by `resolve`; nothing reads an unresolved configuration afterwards.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quadriga.errors import ConfigError

Auto = Literal["auto"]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


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


class PoolConfig(Section):
    """Replicas of one model at one depth."""

    model: str = Field("quadriga-s", description="Bundled id, checkpoint directory, or hub id.")
    depth: int | None = Field(None, ge=1, description="Layers to load; null loads all.")
    runner: Literal["auto", "native", "baton"] = Field(
        "auto",
        description="native: own layers, early exits; baton: the unmodified Hugging Face model in "
        "a relay batch, at full depth; auto: native where the family is.",
    )
    exits: ExitsConfig = ExitsConfig()
    prefill_replicas: int = Field(1, ge=1, le=1024)
    decode_replicas: int = Field(2, ge=1, le=1024)


class EngineConfig(Section):
    """How one replica computes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
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
        None, description="Where compiled steps are kept; null: ~/.cache/quadriga."
    )
    max_model_len: int | Auto = Field(
        "auto", description="Most tokens of one sequence; auto: what the checkpoint allows."
    )
    kv_memory_bytes: int | Auto = Field(
        "auto",
        description="KV cache per replica; auto: 1 GiB on CPUs, on GPUs what gpu_memory_share "
        "leaves beside the weights.",
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
    resources_cpus: float | Auto = Field("auto", description="Ray CPUs a replica reserves.")
    resources_gpus: float | Auto = Field("auto", description="Ray GPUs a replica reserves.")


class PrefillConfig(Section):
    """The prefill replicas' queue and chunking."""

    chunk_tokens: Count = Field(256, description="Most prompt tokens in one forward pass.")
    max_rows: Count = Field(16, description="Sequences in prefill or hand-off at once.")
    max_queued_sequences: Count = 512
    max_queued_tokens: Count = 200_000
    max_age_s: Seconds = Field(
        0.5, description="Similar lengths are grouped, but nobody waits longer than this for it."
    )
    layer_groups: Count = Field(4, description="KV is sent in this many layer groups.")


class DecodeConfig(Section):
    """The decode replicas' batch."""

    max_slots: Count = Field(32, description="Sequences in the batch at once.")
    rebatching: Literal["drex", "eager", "lazy", "majority", "off"] = Field(
        "off",
        description="drex: every token leaves at its own exit; eager, lazy, majority: the batch "
        "leaves together (baselines; eager and majority ignore thresholds); off: no early exits.",
    )
    reservation: Literal["longest", "used"] = Field(
        "longest",
        description="longest: a sequence reserves all it can grow to, nobody is ever paused; used: "
        "it reserves what it has and grows, more fit, and where memory fills the least important "
        "are paused to host memory.",
    )
    pace: str | None = Field(
        None, description="Pad each step to a modelled device time: a profile's name."
    )


class SchedulerConfig(Section):
    """Admission and placement."""

    placement: Literal["current_load", "round_robin"] = "current_load"
    snapshot_interval_s: Seconds = 1.0
    snapshot_max_age_s: Seconds = Field(
        5.0, description="A replica not heard of for this long gets nothing new."
    )
    max_retry_after_s: Seconds = 60.0


class TransportConfig(Section):
    """How KV caches move between replicas."""

    kind: Literal["auto", "gloo", "object_store"] = Field(
        "auto", description="auto: gloo, and object_store where gloo fails."
    )
    deadline_s: Seconds = Field(20.0, description="For one hand-off, from reserve to commit.")
    lease_s: Seconds = Field(10.0, description="A silent transfer's reservation lapses.")


class IngressConfig(Section):
    """The front door."""

    replicas: int = Field(1, ge=1, le=256)
    max_ongoing_requests: Count = Field(2048, description="Per ingress replica.")
    default_deadline_s: Seconds = Field(600.0, description="For requests that state none.")
    max_deadline_s: Seconds = 3600.0
    max_body_bytes: int = Field(4_000_000, ge=1024, le=1 << 30)
    body_timeout_s: Seconds = Field(30.0, description="A request's body must be here by then.")
    max_choices: Count = Field(16, description="Largest `n`, and most prompts in one request.")
    max_logprobs: int = Field(20, ge=0, le=100)
    max_stop_strings: int = Field(16, ge=0, le=64)
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
    orphan_request_s: Seconds = Field(
        30.0, description="Requests whose ingress is silent for this long are cancelled."
    )


class AuthConfig(Section):
    """API keys. Without keys only HTTP is served, for loopback use."""

    api_keys: tuple[str, ...] = Field((), description="Accepted keys; prefer the file.")
    api_keys_file: str | None = Field(None, description="One key per line.")


class LifecycleConfig(Section):
    """Birth and death of the actors."""

    replica_start_timeout_s: Seconds = 300.0
    heartbeat_interval_s: Seconds = 2.0
    orphan_timeout_s: Seconds = Field(
        60.0, description="Actors end themselves when no ingress was heard for this long."
    )
    drain_timeout_s: Seconds = 60.0


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
    name: str = Field("quadriga", pattern=r"^[a-z]([a-z0-9-]{0,45}[a-z0-9])?$")
    pools: tuple[PoolConfig, ...] = Field((PoolConfig(),), min_length=1)
    engine: EngineConfig = EngineConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transport: TransportConfig = TransportConfig()
    ingress: IngressConfig = IngressConfig()
    auth: AuthConfig = AuthConfig()
    lifecycle: LifecycleConfig = LifecycleConfig()

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
    """Validate a plain dict, as YAML or `serve run key=value` gives it.

    Raises:
        ConfigError: Naming every field at fault, its value and the limit it broke.
    """
    try:
        return QuadrigaConfig.model_validate(expand_dotted(data))
    except ValidationError as exc:
        lines = []
        for error in exc.errors():
            field = ".".join(str(part) for part in error["loc"]) or "(top level)"
            shown = repr(error["input"])[:80]
            lines.append(f"{field}: {error['msg']} (got {shown})")
        raise ConfigError("; ".join(lines), param=lines[0].split(":", 1)[0]) from exc


def expand_dotted(data: dict[str, Any]) -> dict[str, Any]:
    """Turn `{"engine.threads": 2}` into `{"engine": {"threads": 2}}`, for the command line.

    Raises:
        ConfigError: A key is given both as a value and as a section.
    """
    tree: dict[str, Any] = {}
    for key, value in data.items():
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
