"""Sections about the ingress, its keys, and the life of the service."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from quadriga.config.fields import Count, Origin, Seconds, Section


class IngressConfig(Section):
    """The processes that clients talk to over HTTP and gRPC."""

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
        12_288,
        ge=1024,
        le=1 << 20,
        description="All names and values of one request. `make serve` and the chart give HAProxy "
        "buffers for them; elsewhere `RAY_SERVE_HAPROXY_TUNE_BUFSIZE` is to be 4,096 more, and 12 "
        "for each header above 100 that `max_headers` allows.",
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
    open_endpoint_metrics: bool = Field(
        False,
        description="`GET /metrics/endpoint`, by which a gateway's endpoint picker weighs this "
        "service, asks for no key: such pickers send none. It says how many sequences wait and "
        "run and how full the KV cache is.",
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
        30.0,
        description="While no replica is known to be ready, a request waits for one for this long "
        "(within its deadline) before it is refused with 503; at once where none is near.",
    )
    poll_timeout_s: Seconds = Field(2.0, description="A poll of a replica for output ends by then.")
    replica_silence_s: Seconds = Field(
        10.0,
        description="A replica that answers no poll for this long counts as lost, sooner where it "
        "does not report to the scheduler either; four times as long where half are silent.",
    )
    max_rebuilds: int = Field(
        3,
        ge=0,
        le=1000,
        description="A sequence whose replica was lost is begun anew so often in a row without a "
        "new token before it ends in an error.",
    )
    rebuild_patience_s: Seconds = Field(
        60.0, description="How long a lost sequence waits for a replica, within its deadline."
    )
    orphan_request_s: Seconds = Field(
        30.0,
        description="Requests whose ingress is silent for this long are cancelled; one that can be "
        "resumed is kept for this long without a reader, and after its end.",
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
    """How actors are started, watched, drained and ended."""

    replica_start_timeout_s: Seconds = Field(
        300.0, description="A replica that is placed and not ready by then is started anew."
    )
    heartbeat_interval_s: Seconds = Field(
        2.0,
        description="Between two heartbeats. A replica that is silent for ten of them, or 8 s if "
        "that is more, is taken for hung and replaced.",
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
