"""The load history: points from the metrics hub, gaps, and what a successor takes over."""

from __future__ import annotations

import json

import pytest

from quadriga.observability.load_history import (
    INTERVAL_S,
    NUM_POINTS,
    VALUES,
    LoadHistory,
    quantile,
)
from quadriga.observability.metrics import FINE_LATENCY_BUCKETS_S, MetricsHub, Registry
from serve_app.ops.metrics import IngressMetrics

START_S = 1000 * INTERVAL_S


class Service:
    """A hub, its history, and ingresses that push into it at a steady rate."""

    def __init__(self, *names: str) -> None:
        self.hub = MetricsHub()
        self.history = LoadHistory()
        self.now_s = self.pushed_s = START_S
        self.ingresses = {name: IngressMetrics(name) for name in names}

    def push(self, name: str) -> None:
        self.hub.push(name, self.ingresses[name].registry.snapshot(), now_s=self.now_s)

    def interval(self, *, tokens_per_s: float = 0.0, push_every_s: float = 1.0) -> None:
        """Let one interval pass; every ingress counts as many tokens and pushes in its own step."""
        end_s = self.now_s + INTERVAL_S
        while self.pushed_s + push_every_s <= end_s + 1e-9:
            self.now_s = self.pushed_s = self.pushed_s + push_every_s
            for name, metrics in self.ingresses.items():
                metrics.of("m").generation_tokens.inc(tokens_per_s * push_every_s)
                self.push(name)
        self.now_s = end_s
        self.sample()

    def sample(self) -> None:
        self.history.sample(self.hub, now_s=self.now_s, now_unix_s=self.now_s)

    def last(self, name: str) -> float | None:
        value: float | None = self.history.columns(now_unix_s=self.now_s)[name][-1]
        return value


def test_rates_of_all_ingresses_are_added() -> None:
    service = Service("a", "b")
    service.interval(tokens_per_s=100)
    assert service.last("tokens_per_s") is None, "there is nothing to compare the first sample with"
    service.interval(tokens_per_s=100)
    assert service.last("tokens_per_s") == pytest.approx(200)


def test_pushes_out_of_step_with_the_samples_leave_the_rate_level() -> None:
    service = Service("a")
    rates = []
    for _ in range(20):
        service.interval(tokens_per_s=100, push_every_s=1.9)
        rates.append(service.last("tokens_per_s"))
    assert rates[1:] == pytest.approx([100] * 19)


def test_percentiles_are_those_of_the_interval_alone() -> None:
    service = Service("a", "b")
    for name, seconds in (("a", 9.0), ("b", 9.0)):
        service.ingresses[name].of("m").ttft.observe(seconds)
    service.interval()
    for k in range(99):
        service.ingresses["ab"[k % 2]].of("m").ttft.observe(0.2)
    service.ingresses["a"].of("n").ttft.observe(3.0)
    service.interval()
    assert service.last("ttft_p50_s") == pytest.approx(0.2, rel=0.12)
    assert service.last("ttft_p99_s") == pytest.approx(0.2, rel=0.12)
    for _ in range(10):
        service.ingresses["b"].of("n").ttft.observe(3.0)
    service.interval()
    assert service.last("ttft_p50_s") == pytest.approx(3.0, rel=0.12)
    service.interval()
    assert service.last("ttft_p50_s") is None, "nobody had a first token"
    assert service.last("tokens_per_s") == 0


def test_gauges_are_those_of_who_is_heard_of() -> None:
    service = Service("a")
    service.ingresses["a"].open_requests.set(7)
    for name, running in (("q:decode:0:x", 3), ("q:decode:1:x", 4), ("q:prefill:0:x", 9)):
        registry = Registry(name)
        registry.gauge("quadriga_running_sequences", "r").set(running)
        service.hub.push(name, registry.snapshot(), now_s=service.now_s)
    service.interval()
    assert (service.last("open_requests"), service.last("decoding")) == (7, 7)
    service.interval()
    service.interval()
    assert (service.last("open_requests"), service.last("decoding")) == (7, None)


def test_an_ingress_that_the_hub_did_not_know_brings_no_peak() -> None:
    service = Service("a")
    service.interval(tokens_per_s=10)
    service.interval(tokens_per_s=10)
    service.ingresses["old"] = IngressMetrics("old")
    service.ingresses["old"].of("m").generation_tokens.inc(1e6)
    service.interval(tokens_per_s=10)
    assert service.last("tokens_per_s") == pytest.approx(10)
    service.interval(tokens_per_s=10)
    assert service.last("tokens_per_s") == pytest.approx(20)


def test_times_without_samples_are_gaps() -> None:
    service = Service("a")
    for _ in range(3):
        service.interval(tokens_per_s=50)
    service.now_s += 4 * INTERVAL_S
    service.interval(tokens_per_s=50)
    tokens = service.history.columns(now_unix_s=service.now_s)["tokens_per_s"]
    assert tokens[-8:-4] == [None, 50, 50, None]
    assert tokens[-4:-1] == [None] * 3
    assert tokens[-1] is not None
    late = service.history.columns(now_unix_s=service.now_s + 3 * INTERVAL_S)
    assert late["tokens_per_s"][-2:] == [None, None], "nobody samples any more"
    assert late["ended_unix_s"] == service.now_s + 2 * INTERVAL_S


def test_it_holds_ten_minutes_and_no_more() -> None:
    service = Service("a")
    for _ in range(NUM_POINTS + 20):
        service.interval(tokens_per_s=5, push_every_s=INTERVAL_S)
    columns = service.history.columns(now_unix_s=service.now_s)
    assert NUM_POINTS * columns["interval_s"] == 600
    for name in VALUES:
        assert len(columns[name]) == NUM_POINTS
    assert None not in columns["tokens_per_s"]
    assert len(json.loads(service.history.dump())) == NUM_POINTS
    assert len(json.dumps(columns)) < 8_000


def test_a_successor_goes_on_where_it_ended() -> None:
    service = Service("a")
    for _ in range(4):
        service.interval(tokens_per_s=50)
    successor = LoadHistory()
    successor.restore(service.history.dump())
    now_s = service.now_s
    assert successor.columns(now_unix_s=now_s) == service.history.columns(now_unix_s=now_s)


@pytest.mark.parametrize("data", [b"", b"{}x", b"[1]", b'[{"number": 1, "other": 2}]', b"7"])
def test_what_is_no_dump_is_refused_and_changes_nothing(data: bytes) -> None:
    history = LoadHistory()
    with pytest.raises(ValueError, match="not a dump"):
        history.restore(data)
    assert history.dump() == b"[]"


def test_two_samples_of_one_interval_are_one_and_a_clock_set_back_does_not_stop_it() -> None:
    service = Service("a")
    service.interval(tokens_per_s=50)
    service.interval(tokens_per_s=50)
    service.sample()
    service.now_s += 0.4 * INTERVAL_S
    service.sample()
    assert len(json.loads(service.history.dump())) == 2
    service.history.sample(service.hub, now_s=service.now_s, now_unix_s=START_S - 100 * INTERVAL_S)
    assert [p["number"] for p in json.loads(service.history.dump())] == [900]


@pytest.mark.parametrize("value", [0.0011, 0.0083, 0.031, 0.19, 0.77, 4.4, 9.9])
def test_a_percentile_is_known_to_an_eighth(value: float) -> None:
    bound = min(b for b in FINE_LATENCY_BUCKETS_S if b >= value)
    for share in (0.5, 0.99):
        assert quantile({bound: 10.0, float("inf"): 0.0}, share) is not None
    buckets = dict.fromkeys(FINE_LATENCY_BUCKETS_S, 0.0) | {bound: 10.0, float("inf"): 0.0}
    assert quantile(buckets, 0.5) == pytest.approx(value, rel=0.28)
    before = max((b for b in FINE_LATENCY_BUCKETS_S if b < bound), default=bound)
    assert bound / before < 1.3


def test_quantiles_at_the_ends() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({1.0: 0.0}, 0.5) is None
    assert quantile({1.0: 4.0}, 0.5) == 0.5
    assert quantile({1.0: 0.0, 2.0: 0.0, float("inf"): 3.0}, 0.99) == 2.0
