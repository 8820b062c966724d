"""Metrics of one ingress: what its clients experience, and the replicas' load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from quadriga.core.replica import Role
from quadriga.core.routing import ClusterView
from quadriga.errors import IngressFull, QuadrigaError
from quadriga.observability.metrics import (
    FINE_LATENCY_BUCKETS_S,
    GAUGE_MAX_AGE_S,
    LATENCY_BUCKETS_S,
    Family,
    Registry,
    render,
)
from serve_app.request.request import Request
from serve_app.request.sequence_request import SequenceRequest

RECOVERY_RESULTS = ("recovered", "adopted", "failed")


class IngressMetrics:
    """Counters of one ingress, end to end as its clients see it."""

    def __init__(self, source: str) -> None:
        r = self.registry = Registry(source)
        self.requests = r.counter(
            "quadriga_requests_total", "By door (http, grpc, admin) and status.", ("door", "code")
        )
        self.refused = r.counter(
            "quadriga_requests_refused_total", "Requests refused, by reason.", ("reason",)
        )
        self.open_requests = r.gauge("quadriga_ingress_open_requests", "Requests being answered.")
        self.resumed = r.counter("quadriga_requests_resumed_total", "Streams taken up again.")
        self.pushes = r.counter("quadriga_metrics_pushes_total", "Metrics sent to the controller.")
        self.connections = r.gauge(
            "quadriga_ingress_connections",
            "Actors that this ingress calls over connections; it calls all others through Ray.",
        )
        self.poll_replies = r.counter("quadriga_polls_total", "Polls answered by replicas.")
        self.poll_failures = r.counter(
            "quadriga_poll_failures_total", "Polls without an answer, by cause.", ("cause",)
        )
        self.rebuilds = r.counter(
            "quadriga_rebuilds_total", "Sequences begun anew after a loss, by cause.", ("cause",)
        )
        self.recoveries = r.counter(
            "quadriga_recoveries_total",
            "Lost sequences: recovered with their next token, adopted from an ingress that is "
            "gone, or failed.",
            ("result",),
        )
        for result in RECOVERY_RESULTS:  # at 0: `increase` does not see a series begin at 1
            self.recoveries.labels(result)
        self.recovery_time = r.histogram(
            "quadriga_recovery_seconds", "Loss of a replica noticed to the sequence's next token."
        )
        self.success = r.counter(
            "vllm:request_success_total", "Sequences ended well.", ("model_name", "finished_reason")
        )
        label = ("model_name",)
        self._by_model: dict[str, Counter | Histogram] = {}
        for field, (name, text) in _MODEL_FAMILIES.items():
            if name.endswith("_total"):
                self._by_model[field] = r.counter(name, text, label)
            else:
                buckets = FINE_LATENCY_BUCKETS_S if field in _FINE else LATENCY_BUCKETS_S
                self._by_model[field] = r.histogram(name, text, label, buckets)
        self._series: dict[str, ModelSeries] = {}

    def of(self, model: str) -> ModelSeries:
        """The series of one model; looked up once, as labels cost more than counting."""
        series = self._series.get(model)
        if series is None:
            children = {k: family.labels(model) for k, family in self._by_model.items()}
            series = self._series[model] = ModelSeries(**children)  # type: ignore[arg-type]
        return series

    def count_refusal(self, error: QuadrigaError) -> None:
        """Record what a limit of this ingress refused; keys' limits and the cluster's are apart."""
        if isinstance(error, IngressFull):
            self.refused.labels(error.code).inc()

    def count_tokens(
        self, request: Request, sequence: SequenceRequest, num_new: int, now_s: float
    ) -> None:
        """Record new tokens of a sequence as the client experiences them; notes their times."""
        series = self.of(request.shown_model)
        is_first = sequence.first_token_s is None
        is_adopted = sequence.was_adopted and is_first and sequence.num_rebuilds == 0
        if sequence.lost_s is not None:
            self.recoveries.labels("adopted" if is_adopted else "recovered").inc()
            self.recovery_time.observe(now_s - sequence.lost_s)
            sequence.lost_s, sequence.num_stalled = None, 0
        if is_adopted:  # it had these tokens before; another ingress has counted them
            sequence.first_token_s = sequence.last_token_s = now_s
            sequence.num_at_first = len(sequence.state.output_ids)
            return
        series.generation_tokens.inc(num_new)
        if is_first:
            sequence.first_token_s = sequence.last_token_s = now_s
            series.ttft.observe(now_s - request.arrived_s)
            if sequence.accepted_s is not None:
                series.prefill_time.observe(now_s - sequence.accepted_s)
            num_new -= 1
        if num_new:
            mean_gap_s = (now_s - sequence.last_token_s) / num_new
            for _ in range(num_new):
                series.inter_token.observe(mean_gap_s)
        sequence.last_token_s = now_s

    def count_end(self, request: Request, sequence: SequenceRequest, now_s: float) -> None:
        """Record a sequence that ended without an error."""
        if sequence.finish is not None:
            self.success.labels(request.shown_model, sequence.finish.value).inc()
        num_after_first = len(sequence.state.output_ids) - sequence.num_at_first
        if sequence.first_token_s is not None and num_after_first > 0:
            series = self.of(request.shown_model)
            decode_s = now_s - sequence.first_token_s
            series.decode_time.observe(decode_s)
            series.per_output_token.observe(decode_s / num_after_first)


@dataclass(frozen=True, slots=True)
class ModelSeries:
    """An ingress's series of one model; `_MODEL_FAMILIES` names and describes them."""

    prompt_tokens: Counter
    generation_tokens: Counter
    cancelled: Counter
    ttft: Histogram
    inter_token: Histogram
    per_output_token: Histogram
    e2e: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    decode_time: Histogram


_MODEL_FAMILIES = {
    "prompt_tokens": ("vllm:prompt_tokens_total", "Prompt tokens served."),
    "generation_tokens": ("vllm:generation_tokens_total", "Tokens generated and received."),
    "cancelled": ("quadriga_requests_cancelled_total", "Sequences cancelled by their client."),
    "ttft": ("vllm:time_to_first_token_seconds", "Request's arrival to first token."),
    "inter_token": ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence."),
    "per_output_token": (
        "vllm:request_time_per_output_token_seconds",
        "Time per token after the first, a sequence's mean.",
    ),
    "e2e": ("vllm:e2e_request_latency_seconds", "Request's arrival to its end."),
    "queue_time": (
        "vllm:request_queue_time_seconds",
        "Arrival to acceptance by a prefill replica.",
    ),
    "prefill_time": ("vllm:request_prefill_time_seconds", "Acceptance to first token."),
    "decode_time": ("vllm:request_decode_time_seconds", "First token to last."),
}


_FINE = frozenset({"ttft", "inter_token", "per_output_token"})
"""What objectives are about, and the live page draws."""

VIEW_LABELS = ("depth", "model_name", "replica", "role")
VIEW_GAUGES = {
    "vllm:num_requests_running": "Sequences in the batch.",
    "vllm:num_requests_waiting": "Sequences queued, paused, or with a place and not yet running.",
    "vllm:kv_cache_usage_perc": "Share of the KV cache in use, 0 to 1.",
    "quadriga_slots": "Sequences a replica can hold.",
    "quadriga_kv_capacity_tokens": "Tokens of KV cache a replica can hold.",
    "quadriga_tokens_per_s": "Recent rate: prefilled or emitted.",
    "quadriga_replica_draining": "1 while the replica takes nothing new.",
}

ADAPTERS_INFO = "vllm:lora_requests_info"
"""Of the page for endpoint pickers alone, where adapters are loaded."""


def endpoint_gauges(
    view: ClusterView, model: str, adapters: Sequence[str] = (), now_unix_s: float = 0.0
) -> bytes:
    """Return the whole service's load as that of one model server: one series a name.

    A sequence counts once: on a prefill replica until it is handed on, then where it decodes.
    Source: the model server protocol of Kubernetes' Gateway API Inference Extension (proposal
    003), with vLLM's names.

    Args:
        model: For the label of vLLM's series; the numbers are those of all models.
        adapters: LoRA adapters, each of which every replica of its model has loaded.
        now_unix_s: When; the value of the adapters' series.
    """
    waiting = running = used = capacity = 0
    for snapshot in view.snapshots:
        running += snapshot.num_running
        role = snapshot.info.role
        waiting += snapshot.num_waiting if role.does(Role.PREFILL) else snapshot.num_paused
        if role.does(Role.DECODE):
            used += snapshot.used_tokens
            capacity += snapshot.info.kv_capacity_tokens
    values = (running, waiting, used / max(1, capacity))
    labels = (("model_name", model),)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    texts = ("Sequences being computed.", "Sequences queued or paused.", VIEW_GAUGES[names[2]])
    families = {
        name: Family("gauge", text, {(name, labels): float(value)})
        for name, text, value in zip(names, texts, values, strict=True)
    }
    if adapters:
        loaded = (
            ("max_lora", str(len(adapters))),
            ("running_lora_adapters", ",".join(adapters)),
            ("waiting_lora_adapters", ""),
        )
        text = "The adapters that are loaded; when this was so, Unix seconds."
        families[ADAPTERS_INFO] = Family("gauge", text, {(ADAPTERS_INFO, loaded): now_unix_s})
    return render(families)


def view_gauges(view: ClusterView, now_unix_s: float) -> bytes:
    """Return the gauges of each replica that routers read, under the names they know.

    The ingress that answers a scrape renders them from its view, so each series exists once; of a
    replica that was not heard of lately there is none.
    """
    families = {name: Family("gauge", text, {}) for name, text in VIEW_GAUGES.items()}
    oldest_unix_s = now_unix_s - GAUGE_MAX_AGE_S
    for snapshot in [s for s in view.snapshots if s.taken_unix_s >= oldest_unix_s]:
        info = snapshot.info
        depth_class = info.depth_class
        given = (str(depth_class.depth), depth_class.model, info.name, info.role.value)
        labels = tuple(zip(VIEW_LABELS, given, strict=True))
        values = (
            snapshot.num_running,
            snapshot.num_waiting,
            snapshot.used_tokens / max(1, info.kv_capacity_tokens),
            info.num_slots,
            info.kv_capacity_tokens,
            snapshot.tokens_per_s,
            snapshot.draining,
        )
        for name, value in zip(VIEW_GAUGES, values, strict=True):
            families[name].samples[name, labels] = float(value)
    return render(families)
