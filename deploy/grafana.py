"""Make deploy/dashboards/*.json: `python deploy/grafana.py`, then `make chart` for the copies.

A dashboard is a list of rows, a row a list of panels, a panel one or more PromQL expressions with
their legends. What Grafana wants besides is the same for all and added here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8
SELECTOR = re.compile(r"((?:quadriga_|vllm:)[a-z0-9_]+)(\{)?")


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph.

    Attributes:
        text: What to look for; Grafana shows it at the title.
        queries: (expression, legend).
        unit: Grafana's name of it.
    """

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    is_stacked: bool = False
    can_be_negative: bool = False


def quantiles(name: str, by: str = "", *, what: str = "", of: Sequence[float] = (0.5, 0.99)) -> Any:
    """Queries for quantiles of a histogram, over five minutes; `what` begins their legends."""
    labels = ", ".join(filter(None, ("le", by)))
    legend = "".join(f"{part} " for part in (what, by and f"{{{{{by}}}}}") if part)
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket[5m])))",
            f"{legend}p{100 * q:g}",
        )
        for q in of
    )


def rate(name: str, *by: str, what: str = "") -> tuple[tuple[str, str], ...]:
    """A query for a counter's rate over five minutes, by some labels; `what` begins its legend."""
    legend = " ".join(filter(None, (what, *(f"{{{{{label}}}}}" for label in by))))
    return ((f"sum by ({', '.join(by)}) (rate({name}[5m]))", legend),)


DECODE = 'role=~"decode|mixed"'
STEPS = (  # of each decode replica, with its class; two services may call their replicas alike
    f"(quadriga_slots{{{DECODE}}} > bool 0) * on (job, namespace, replica) group_left () "
    "max by (job, namespace, replica) (quadriga_step_seconds)"
)
CLASS = "job, namespace, model_name, depth"
# fmt: off
DASHBOARDS: dict[str, tuple[str, list[list[Panel]]]] = {
    "service": (
        "Quadriga: service",
        [
            [
                Panel("Requests", "By door and answer: 429 is refused, 503 nobody there.",
                      rate("quadriga_requests_total", "door", "code"), "reqps", True),
                Panel("Refused", "Why requests were turned away.",
                      rate("quadriga_requests_refused_total", "reason"), "reqps", True),
                Panel("Open requests", "Being answered now, by ingress.",
                      (("quadriga_ingress_open_requests", "{{replica}}"),), "short", True),
            ],
            [
                Panel("Time to first token", "End to end, as clients wait for it.",
                      quantiles("vllm:time_to_first_token_seconds", "model_name"), "s"),
                Panel("Between tokens", "End to end.",
                      quantiles("vllm:inter_token_latency_seconds", "model_name"), "s"),
                Panel("Request", "Arrival to end.",
                      quantiles("vllm:e2e_request_latency_seconds", "model_name"), "s"),
            ],
            [
                Panel("Where a request's time goes", "99th percentile of each part.",
                      tuple((f"histogram_quantile(0.99, sum by (le) (rate(vllm:request_{part}"
                             "_time_seconds_bucket[5m])))", part)
                            for part in ("queue", "prefill", "decode")), "s"),
                Panel("Tokens", "Generated and prompt tokens a second.",
                      (*rate("vllm:generation_tokens_total", "model_name"),
                       ("sum by (model_name) (rate(vllm:prompt_tokens_total[5m]))",
                        "{{model_name}} prompt")), "short"),
                Panel("Queued", "Waiting sequences by role.",
                      (("sum by (role) (vllm:num_requests_waiting)", "{{role}}"),)),
            ],
            [
                Panel("Lost and recovered", "Sequences begun anew after a loss, and what came.",
                      (*rate("quadriga_recoveries_total", "result"),
                       *rate("quadriga_rebuilds_total", "cause", what="begun anew:")), "short"),
                Panel("Recovery", "Loss of a replica noticed, to the next token.",
                      quantiles("quadriga_recovery_seconds"), "s"),
                Panel("Errors of sequences", "By code.",
                      rate("quadriga_sequence_errors_total", "code"), "short", True),
            ],
        ],
    ),
    "rescheduling": (
        "Quadriga: rescheduling",
        [
            [
                Panel("Until memory is full", "By forecast; nothing is shown where it never is.",
                      (("quadriga_seconds_to_out_of_memory < +Inf", "{{replica}}"),), "s"),
                Panel("KV in use", "Share of each decode replica's memory.",
                      ((f"vllm:kv_cache_usage_perc{{{DECODE}}}", "{{replica}}"),), "percentunit"),
                Panel("KV ahead", "Forecast tokens, each line so many seconds ahead.",
                      (("sum by (ahead_seconds) (quadriga_forecast_kv_tokens)",
                        "in {{ahead_seconds}} s"),)),
            ],
            [
                Panel("Migrations", "Orders that ended, by cause and outcome.",
                      rate("quadriga_migration_orders_ended_total", "cause", "outcome"),
                      "short", True),
                Panel("Stall", "How long a moving sequence was at rest.",
                      quantiles("quadriga_migration_stall_seconds"), "s"),
                Panel("Migration", "Order to acknowledged commit.",
                      quantiles("quadriga_migration_seconds"), "s"),
            ],
            [
                Panel("Spread of step times", "Slowest over mean decode replica of a class; 1 is "
                      "balanced.",
                      ((f"max by ({CLASS}) ({STEPS}) / avg by ({CLASS}) ({STEPS})",
                        "{{job}} {{model_name}}@{{depth}}"),)),
                Panel("Prediction error", "Predicted length against the real one, in tokens.",
                      quantiles("quadriga_length_prediction_error_tokens", "model_name")),
                Panel("Calibration", "Share of lengths inside their range; 0.8 is right.",
                      (("quadriga_length_prediction_coverage", "{{model_name}}"),
                       ("quadriga_length_predictions_distrusted", "{{model_name}} distrusted")),
                      "percentunit"),
            ],
            [
                Panel("Decision", "Time of one rescheduling decision.",
                      quantiles("quadriga_rescheduling_decision_seconds"), "s"),
                Panel("Pauses", "Sequences moved to host memory, and those that are there now.",
                      (*rate("quadriga_pauses_total", "replica"),
                       ("quadriga_paused_sequences", "{{replica}} paused now"))),
                Panel("Price of forecasts", "Share of a decode replica's time.",
                      rate("quadriga_forecast_seconds_total", "replica", "part"), "percentunit"),
            ],
        ],
    ),
    "exits": (
        "Quadriga: exits",
        [
            [
                Panel("Tokens by layers run", "Where tokens leave the model.",
                      rate("quadriga_exit_tokens_total", "layer"), "short", True),
                Panel("Share by layers run", "Of all tokens; early exits save what lies below.",
                      (("sum by (layer) (rate(quadriga_exit_tokens_total[5m])) / on () "
                        "group_left () sum(rate(quadriga_exit_tokens_total[5m]))",
                        "{{layer}} layers"),), "percentunit", True),
                Panel("Drafts", "Tokens that exits drafted, and those the whole model agreed with.",
                      tuple((f"sum(rate(quadriga_{what}_total[5m]))", what)
                            for what in ("drafted_tokens", "accepted_drafts"))),
            ],
            [
                Panel("Use of exits", "Replicas by what is true of each exit: used, or why not.",
                      (("sum by (layer, use) (quadriga_exit_use)", "{{layer}}: {{use}}"),)),
                Panel("Below their threshold", "Breaches at the deepest loaded exit; lowered under "
                      "pressure, within quality budgets; involuntary exits are 0 by promise.",
                      (*rate("quadriga_breaches_total", "replica", what="breaches"),
                       *rate("quadriga_lowered_tokens_total", "replica", what="lowered"),
                       *rate("quadriga_involuntary_exits_total", "replica", what="involuntary"))),
            ],
            [
                Panel("Waiting at exits", "Tokens in the buffers now.",
                      (("sum by (exit) (quadriga_waiting_at_exit)", "exit {{exit}}"),), "short",
                      True),
                Panel("Mean wait", "Of a token that waits at an exit.",
                      (("sum by (replica) (rate(quadriga_exit_wait_seconds_total[5m])) / "
                        "sum by (replica) (rate(quadriga_buffered_total[5m]))", "{{replica}}"),),
                      "s"),
                Panel("Decisions", "Split, stay together, flush, explore.",
                      tuple((f"sum(rate(quadriga_{what}_total[5m]))", what)
                            for what in ("splits", "stays", "flushes", "explored"))),
            ],
            [
                Panel("Profit of splits", "Time saved, as forecast and as measured; they should "
                      "rise alike.",
                      (("sum by (kind) (quadriga_rebatching_profit_seconds)", "{{kind}}"),), "s",
                      can_be_negative=True),
                Panel("Carried on with their batch", "Share of tokens that could have left.",
                      (("sum by (replica) (rate(quadriga_involuntary_stays_total[5m])) / "
                        "sum by (replica) (rate(quadriga_emitted_tokens_total[5m]))",
                        "{{replica}}"),), "percentunit"),
                Panel("KV filled in", "Positions whose skipped KV was filled in for a deeper pass.",
                      rate("quadriga_filled_total", "replica")),
            ],
        ],
    ),
    "depth_and_models": (
        "Quadriga: depth and models",
        [
            [
                Panel("Replicas", "Ready processes by role, against those wanted.",
                      (('sum by (role) (quadriga_replicas{phase="ready"})', "{{role}} ready"),
                       ("sum by (role) (quadriga_replicas_desired)", "{{role}} wanted"))),
                Panel("Replicas by depth", "Those that report, by model and layers loaded.",
                      (("count by (model_name, depth, role) (quadriga_slots)",
                        "{{model_name}}@{{depth}} {{role}}"),)),
                Panel("Started again", "Replica processes lost and replaced.",
                      (("sum(increase(quadriga_replica_respawns_total[5m]))", "in 5 min"),)),
            ],
            [
                Panel("Speed", "Tokens a second by model and depth.",
                      (("sum by (model_name, depth, role) (quadriga_tokens_per_s)",
                        "{{model_name}}@{{depth}} {{role}}"),)),
                Panel("KV room", "Tokens of KV a class can hold.",
                      ((f"sum by (model_name, depth) (quadriga_kv_capacity_tokens{{{DECODE}}})",
                        "{{model_name}}@{{depth}}"),)),
                Panel("Step", "Mean time of a step of each replica.",
                      (("quadriga_step_seconds", "{{replica}}"),), "s"),
            ],
            [
                Panel("Batch", "Tokens emitted a step.",
                      (("sum by (replica) (rate(quadriga_emitted_tokens_total[5m])) / "
                        "sum by (replica) (rate(quadriga_engine_steps_total[5m]))",
                        "{{replica}}"),)),
                Panel("Slots in use", "Share of each class's slots.",
                      ((f"sum by (model_name, depth) (vllm:num_requests_running{{{DECODE}}}) / "
                        f"sum by (model_name, depth) (quadriga_slots{{{DECODE}}})",
                        "{{model_name}}@{{depth}}"),), "percentunit"),
                Panel("Requests by model", "Sequences that ended well.",
                      rate("vllm:request_success_total", "model_name", "finished_reason"),
                      "reqps", True),
            ],
            [
                Panel("HELIOS", "Resizes, switches, failures, profiles, trips, in 5 minutes.",
                      (("sum by (kind) (increase(quadriga_helios_events_total[5m]))",
                        "{{kind}}"),)),
                Panel("Breach window (CBC)", "Tokens of the window, and breaches among them.",
                      (("sum by (kind) (quadriga_breach_window_tokens)", "{{kind}}"),)),
                Panel("Changes of depth", "Orders to load or drop layers that ended, by outcome.",
                      (*rate("quadriga_resizes_total", "outcome"),)),
            ],
        ],
    ),
    "kv_transport": (
        "Quadriga: KV transport",
        [
            [
                Panel("Sent", "Bytes a second by transport.",
                      rate("quadriga_kv_sent_bytes_total", "transport"), "Bps", True),
                Panel("Speed while sending", "Bytes over the time it took; the link's share.",
                      (("sum by (transport) (rate(quadriga_kv_sent_bytes_total[5m])) / "
                        "sum by (transport) (rate(quadriga_kv_send_seconds_total[5m]))",
                        "{{transport}}"),), "Bps"),
                Panel("Failures", "Parts that did not arrive.",
                      rate("quadriga_kv_send_failures_total", "transport", "code"), "short", True),
            ],
            [
                Panel("Hand-offs", "From prefill to decode, by result.",
                      rate("quadriga_handoffs_total", "result"), "short", True),
                Panel("Hand-off", "First token to acknowledged commit.",
                      quantiles("quadriga_handoff_seconds"), "s"),
                Panel("Size", "KV bytes of a hand-off, and of a migration.",
                      (*quantiles("quadriga_handoff_bytes", what="hand-off", of=(0.5,)),
                       *quantiles("quadriga_migration_bytes", what="migration", of=(0.5,))),
                      "bytes"),
            ],
            [
                Panel("Fallbacks", "Peers moved to the next transport so far.",
                      (("quadriga_kv_transport_fallbacks", "{{replica}}"),)),
                Panel("Rounds of a migration", "Copying while the sequence runs; the last at rest.",
                      quantiles("quadriga_migration_rounds")),
                Panel("Bandwidth as decisions reckon", "Measured by the moves themselves.",
                      (("quadriga_migration_bandwidth_bytes_per_second", "{{replica}}"),), "Bps"),
            ],
        ],
    ),
}
# fmt: on


def dashboard(name: str) -> dict[str, Any]:
    """Return one dashboard as Grafana imports it."""
    title, rows = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    for y, row in enumerate(rows):
        width = COLUMNS // len(row)
        for x, panel in enumerate(row):
            grid = {"x": x * width, "y": y * HEIGHT, "w": width, "h": HEIGHT}
            panels.append(_panel(len(panels) + 1, panel, grid))
    return {
        "uid": f"quadriga-{name.replace('_', '-')}",
        "title": title,
        "tags": ["quadriga"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["quadriga"], "title": "Quadriga", "asDropdown": True}
        ],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _releases(),
            ]
        },
        "panels": panels,
    }


def _releases() -> dict[str, Any]:
    """The variable that chooses releases by what Prometheus calls them."""
    query = "label_values(quadriga_replicas_desired, job)"
    return {
        "name": "job",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "job"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _of_releases(expression: str) -> str:
    """The expression with every selector confined to the chosen releases."""
    return SELECTOR.sub(lambda m: f'{m[1]}{{job=~"$job"' + (", " if m[2] else "}"), expression)


def _panel(number: int, panel: Panel, grid: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 30 if panel.is_stacked else 0, "showPoints": "never"}
    if panel.is_stacked:
        custom["stacking"] = {"mode": "normal"}  # type: ignore[assignment]
    lowest = {} if panel.can_be_negative else {"min": 0}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": grid,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **lowest, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "expr": _of_releases(expr),
                "legendFormat": legend,
                "datasource": SOURCE,
            }
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }


def files() -> dict[Path, str]:
    """Return every dashboard's file and what it should hold."""
    return {FOLDER / f"{n}.json": json.dumps(dashboard(n), indent=2) + "\n" for n in DASHBOARDS}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.name}")
