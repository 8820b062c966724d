"""Every metric of replicas, scheduler and controller; docs/metrics.md is made of it.

`actors.metrics` fills these tables. Each table names what its rows are read from.
"""

from __future__ import annotations

import math
from typing import Any

from quadriga.observability.metric_table import counter, gauge, histogram
from quadriga.observability.metrics import SIZE_BUCKETS_BYTES

ROUND_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0)
TOKEN_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 3e4)
DECISION_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3)


def _uses(load: Any) -> dict[tuple[str, str], int]:
    return {(str(layer), use): 1 for layer, use in load.exit_uses.items()}


EVENTS = (
    counter("quadriga_emitted_tokens_total", "Tokens emitted."),
    counter(
        "quadriga_sequence_errors_total", "Sequences that ended in an error.", labels=("code",)
    ),
    counter(
        "quadriga_handoffs_total",
        "Hand-offs of prefill replicas to decode replicas, by result.",
        labels=("result",),
    ),
    histogram("quadriga_handoff_seconds", "From the first token to the acknowledged commit."),
    histogram("quadriga_handoff_bytes", "KV bytes of one hand-off.", buckets=SIZE_BUCKETS_BYTES),
    gauge("quadriga_kv_transport_fallbacks", "Times a peer was moved to a slower transport."),
    counter(
        "quadriga_integrity_violations_total",
        "Engines given up because their records disagreed; must be 0.",
    ),
)
"""Of a replica, counted as they happen."""

LOAD = (
    counter(
        "quadriga_engine_steps_total",
        "Steps of the engine; tokens per step is the batch.",
        "steps.steps",
    ),
    counter(
        "quadriga_engine_busy_seconds_total",
        "Engine time of its steps, and between two while there is work; idle time is not in.",
        "steps.busy_s",
    ),
    counter(
        "quadriga_engine_batched_sequences_total",
        "Sequences in a step's batch, summed.",
        "steps.sequences",
    ),
    counter(
        "quadriga_engine_batched_tokens_total",
        "Tokens of a step, summed. Decode: KV attended to. Prefill: prompt tokens computed.",
        "steps.tokens",
    ),
    gauge("quadriga_running_sequences", "Sequences holding a slot.", "num_running"),
    gauge(
        "quadriga_waiting_sequences",
        "Sequences queued, paused, or with a place and not yet running.",
        "num_waiting",
    ),
    gauge("quadriga_kv_used_tokens", "Tokens whose KV is held.", "used_tokens"),
    gauge(
        "quadriga_kv_reserved_tokens", "Tokens promised to the sequences held.", "reserved_tokens"
    ),
    gauge("quadriga_step_seconds", "Mean time of a step, recent first.", "step_time_s"),
    gauge("quadriga_paused_sequences", "Sequences paused in host memory.", "num_paused"),
    gauge("quadriga_paused_kv_bytes", "KV of paused sequences.", "paused_bytes"),
    counter("quadriga_pauses_total", "Times that a sequence was paused.", "num_pauses"),
    counter("quadriga_resumes_total", "Times that a paused one ran again.", "num_resumes"),
    counter(
        "quadriga_exit_tokens_total",
        "Tokens by the number of layers run.",
        "exits.tokens",
        ("layer",),
    ),
    counter(
        "quadriga_involuntary_exits_total",
        "Tokens that left a non-final exit below their threshold; 0 but with eager and majority.",
        "exits.involuntary_exits",
    ),
    counter(
        "quadriga_breaches_total",
        "Tokens that left the deepest exit open to them below their threshold.",
        "exits.breaches",
    ),
    counter(
        "quadriga_lowered_tokens_total",
        "Tokens that left below their threshold under pressure, within `quality_budget`.",
        "exits.lowered",
    ),
    counter(
        "quadriga_involuntary_stays_total",
        "Tokens that could have left at an exit and ran on with their batch.",
        "exits.involuntary_stays",
    ),
    counter(
        "quadriga_splits_total",
        "Decisions to let tokens leave at an exit while the others wait there.",
        "exits.splits",
    ),
    counter("quadriga_stays_total", "Decisions to run a whole batch deeper.", "exits.stays"),
    counter(
        "quadriga_flushes_total", "Passes over tokens that waited at an exit.", "exits.flushes"
    ),
    counter(
        "quadriga_exit_surveys_total",
        "Groups tested at every exit, for HELIOS to see where their tokens could leave.",
        "exits.surveys",
    ),
    counter(
        "quadriga_explored_total",
        "Splits decided against the forecast, so that its times stay known.",
        "exits.explored",
    ),
    counter("quadriga_buffered_total", "Tokens that waited at an exit.", "exits.buffered"),
    counter(
        "quadriga_filled_total",
        "Positions whose skipped KV was filled in for a deeper pass.",
        "exits.filled_tokens",
    ),
    counter(
        "quadriga_exit_wait_seconds_total",
        "Time that tokens waited at exits, together.",
        "exits.buffer_age_s",
    ),
    counter(
        "quadriga_exit_copied_bytes_total",
        "Hidden states kept for later fills.",
        "exits.copied_bytes",
    ),
    counter(
        "quadriga_drafted_tokens_total",
        "Tokens that an exit drafted and the model verified.",
        "exits.drafted",
    ),
    counter("quadriga_accepted_drafts_total", "Drafted tokens that agreed.", "exits.accepted"),
    counter("quadriga_draft_rounds_total", "Passes that verified drafts.", "exits.verified"),
    gauge(
        "quadriga_rebatching_profit_seconds",
        "Time saved by splits since the start, as forecast and as measured.",
        lambda load: (
            load.exits
            and {
                "predicted": load.exits.predicted_profit_s,
                "realised": load.exits.realised_profit_s,
            }
        ),
        ("kind",),
    ),
    gauge(
        "quadriga_exit_use",
        "1 for what is true of an exit now: tested, drafts, or why not (drafts_not_worth_it, "
        "not_worth_it, full_depth_asked, not_loaded, off, idle).",
        _uses,
        ("layer", "use"),
    ),
    gauge(
        "quadriga_prefix_cache_tokens",
        "Prompt tokens whose KV is kept, in memory that no sequence was promised.",
        "prefixes.kept",
    ),
    counter(
        "quadriga_prefix_cache_evicted_tokens_total",
        "Tokens whose KV was let go, for sequences or newer prompts.",
        "prefixes.evicted",
    ),
    gauge(
        "quadriga_waiting_at_exit", "Tokens that wait at an exit now.", "num_at_exits", ("exit",)
    ),
)
"""Of a replica's `ReplicaLoad`."""

PREFIX_QUERIES = counter(
    "vllm:prefix_cache_queries_total", "Prompt tokens looked for.", labels=("model_name",)
)
PREFIX_HITS = counter(
    "vllm:prefix_cache_hits_total",
    "Prompt tokens whose KV was there: they were not computed.",
    labels=("model_name",),
)
PREEMPTIONS = counter("vllm:num_preemptions_total", "Pauses of sequences.", labels=("model_name",))
TRANSPORTS = (
    counter(
        "quadriga_kv_sent_parts_total",
        "Parts of KV caches that reached a peer.",
        lambda counts: {k: sent.parts for k, sent in counts.sent.items()},
        ("transport",),
    ),
    counter(
        "quadriga_kv_sent_bytes_total",
        "Bytes of KV caches that reached a peer.",
        lambda counts: {k: sent.num_bytes for k, sent in counts.sent.items()},
        ("transport",),
    ),
    counter(
        "quadriga_kv_send_seconds_total",
        "Time from handing a part over to its arrival.",
        lambda counts: {k: sent.seconds for k, sent in counts.sent.items()},
        ("transport",),
    ),
    counter(
        "quadriga_kv_send_failures_total",
        "Parts that did not reach a peer, by error code.",
        "failures",
        ("transport", "code"),
    ),
)
"""Of a replica's `TransportCounts`."""

RELAY = (
    gauge(
        "quadriga_relay_kv_bytes",
        "KV memory of the relay batch, and of its rows outside.",
        lambda memory: {"batch": memory.batch_bytes, "outside": memory.row_bytes},
        ("place",),
    ),
    gauge("quadriga_relay_rows", "Rows of the relay batch.", "num_batch_rows"),
    gauge("quadriga_relay_width_tokens", "Columns of the relay batch.", "width"),
    gauge("quadriga_relay_padding_cells", "Relay batch cells with padding.", "padding_cells"),
    counter(
        "quadriga_relay_attended_cells_total",
        "Cells (row, column) that steps worked on.",
        "attended_cells",
    ),
    counter("quadriga_relay_idle_cells_total", "Cells worked on that were padding.", "idle_cells"),
)
"""Of a replica's `RelayMemory`."""

FORECAST = (
    gauge(
        "quadriga_forecast_step_seconds",
        "Predicted time of a decode step, so many seconds ahead.",
        "step_s",
        ("ahead_seconds",),
    ),
    gauge(
        "quadriga_forecast_kv_tokens",
        "Predicted KV tokens held, so many seconds ahead.",
        "kv_tokens",
        ("ahead_seconds",),
    ),
    gauge(
        "quadriga_seconds_to_out_of_memory",
        "Until the forecast exceeds the KV memory; +Inf where it does not.",
        lambda figures: math.inf if figures is None else figures.seconds_to_full,
    ),
    counter(
        "quadriga_length_predictions_total",
        "Predictions of running sequences' lengths.",
        "num_predictions",
    ),
    counter(
        "quadriga_depth_forecast_tokens_total",
        "Tokens whose depth was forecast, by tenths of the layers that were expected.",
        "depth_tokens",
        ("tenth",),
    ),
    counter(
        "quadriga_depth_expected_layers_total", "Layers forecast.", "depth_expected", ("tenth",)
    ),
    counter(
        "quadriga_depth_run_layers_total", "Layers run by forecast tokens.", "depth_run", ("tenth",)
    ),
    counter(
        "quadriga_forecast_seconds_total",
        "Engine time spent on predicting lengths, and on reporting the sequences held.",
        "engine_s",
        ("part",),
    ),
)
"""Of a replica's `ForecastFigures`; of None once it does not forecast any more."""

MIGRATIONS = (
    counter(
        "quadriga_migrations_total",
        "Orders to move a running sequence, by cause and outcome.",
        labels=("cause", "outcome"),
    ),
    histogram("quadriga_migration_bytes", "KV bytes of one migration.", buckets=SIZE_BUCKETS_BYTES),
    histogram("quadriga_migration_seconds", "From the order to the acknowledged commit."),
    histogram(
        "quadriga_migration_stall_seconds",
        "How long the sequence was at rest at the source, moved or not.",
    ),
    histogram("quadriga_migration_rounds", "Rounds of copying.", buckets=ROUND_BUCKETS),
)
RESIZES = (
    counter(
        "quadriga_resizes_total", "Orders to load or drop layers, by outcome.", labels=("outcome",)
    ),
    histogram("quadriga_resize_load_seconds", "Reading layers in the background."),
    histogram("quadriga_resize_seconds", "From the order to the new depth."),
    gauge("quadriga_loaded_layers", "Layers that are loaded."),
    gauge("quadriga_weight_bytes", "Memory of the weights loaded."),
)
ON_FIRST_USE = {"forecast": FORECAST, "migrations": MIGRATIONS, "relay": RELAY, "resizes": RESIZES}
"""A replica that never does such a thing has none of its metrics."""

SCHEDULER = (
    counter("quadriga_migrations_ordered_total", "Moves the scheduler ordered.", labels=("cause",)),
    counter(
        "quadriga_migration_orders_ended_total",
        "Orders that came to an end, by cause and outcome.",
        labels=("cause", "outcome"),
    ),
    gauge(
        "quadriga_migrations_under_way",
        "Moves ordered and not ended.",
        lambda governor: len(governor.moves.under_way),
    ),
    histogram(
        "quadriga_rescheduling_decision_seconds",
        "Time of one rescheduling decision.",
        buckets=DECISION_BUCKETS_S,
    ),
    histogram(
        "quadriga_length_prediction_error_tokens",
        "Of sequences that ended by themselves: their length, against what was predicted of "
        "it when they began.",
        labels=("model_name",),
        buckets=TOKEN_BUCKETS,
    ),
    counter(
        "quadriga_length_predictions_inside_total",
        "Ended sequences whose length was inside the predicted range (10 % to 90 %).",
        labels=("model_name",),
    ),
    gauge(
        "quadriga_length_prediction_coverage",
        "Share of lengths inside the predicted range, recent first; 0.8 is calibrated.",
        lambda governor: {k: m.coverage for k, m in governor.drift.items()},
        ("model_name",),
    ),
    gauge(
        "quadriga_length_predictions_distrusted",
        "1 while a model's predictions do not hold and the present load decides.",
        lambda governor: {k: m.is_drifting for k, m in governor.drift.items()},
        ("model_name",),
    ),
    gauge(
        "quadriga_overload_protected_replicas",
        "Decode replicas kept for short sequences while their class is overloaded.",
        lambda governor: sum(len(p.protected) for p in governor.overload.values()),
    ),
    gauge(
        "quadriga_overload_held_sequences",
        "Sequences without a decode replica, of models that are overloaded.",
        lambda governor: sum(governor.num_held.values()),
    ),
    gauge(
        "quadriga_depth_pool_gain",
        "Share of a token's time that replicas for shallow and for deep sequences apart save, or "
        "would, by the model of a step.",
        lambda governor: {str(c): p.gain for c, p in governor.pools.items()},
        ("depth_class",),
    ),
    gauge(
        "quadriga_depth_pool_shallow_replicas",
        "Decode replicas kept for shallow sequences; 0 while all run together.",
        lambda governor: {str(c): len(p.shallow) for c, p in governor.pools.items()},
        ("depth_class",),
    ),
    gauge(
        "quadriga_migration_bandwidth_bytes_per_second",
        "Bandwidth between decode replicas, as decisions reckon with it.",
        "bandwidth_bytes_per_s",
    ),
)
"""Of the scheduler's `Governor`."""

CONTROLLER = (
    gauge(
        "quadriga_replicas_desired",
        "Replica processes the configuration asks for.",
        "desired",
        ("role",),
    ),
    gauge(
        "quadriga_replicas", "Replica processes there are, by phase.", "there", ("role", "phase")
    ),
    counter(
        "quadriga_replica_respawns_total",
        "Replica processes started again after a loss.",
        "num_respawns",
    ),
    gauge(
        "quadriga_configuration_failing",
        "1 while the configuration cannot be brought about; /cluster has the reason.",
        "is_failing",
    ),
    counter(
        "quadriga_helios_events_total",
        "HELIOS: resizes, switches of model, scaling, failed orders, profiles, broken windows.",
        "helios_events",
        ("kind",),
    ),
    gauge(
        "quadriga_breach_window_tokens",
        "HELIOS: tokens of the window in which breaches count, and breaches among them.",
        "breach_window",
        ("kind",),
    ),
)
"""Of the controller's `ControllerFigures`."""
