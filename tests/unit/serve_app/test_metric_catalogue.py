"""The catalogue of metrics: the table in the docs, and what api.md promises to clients."""

from __future__ import annotations

import itertools
from pathlib import Path

from serve_app.ops.metric_catalogue import catalogue, markdown

DECLARED = list(itertools.chain(*catalogue().values()))


def test_the_table_in_the_docs_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run `python deploy/metrics_table.py`"


def test_names_are_unique_and_carry_units() -> None:
    names = [metric.name for metric in DECLARED]
    assert len(names) == len(set(names))
    for metric in DECLARED:
        assert metric.name.startswith(("quadriga_", "vllm:")), metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        if metric.kind == "histogram":
            assert metric.name.endswith(("_seconds", "_bytes", "_tokens", "_rounds")), metric.name
        assert metric.text.endswith(".") and "|" not in metric.text, metric.name


def test_the_names_that_routers_and_tools_read() -> None:
    found = {metric.name: metric for metric in DECLARED}
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "num_preemptions_total",
    ):
        assert "model_name" in found[f"vllm:{name}"].labels, name
    assert "finished_reason" in found["vllm:request_success_total"].labels
