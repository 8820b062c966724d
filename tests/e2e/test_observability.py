"""What operators see of the running service: metrics, logs, the live page's data."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx

from quadriga.client import Client
from serve_app.ops.metric_catalogue import catalogue
from tests.e2e.conftest import Service
from tests.e2e.roles import DECODE, IS_MIXED, NUM_REPLICAS

CANARY = "zebra-canary-4711"
SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? \S+$")
LABEL = re.compile(r'([a-z_]+)="(?:[^"\\]|\\.)*"')


def test_the_scrape_is_what_the_catalogue_says(own: Service, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "copy: 1 2 3", "max_tokens": 20})
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})
    time.sleep(2.5)  # replicas push once a second
    page = httpx.get(f"{own.admin_url}/metrics").text
    known = {m.name: m for m in itertools.chain(*catalogue().values())}
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    assert len(kinds) > 40
    assert len(re.findall(r"^# TYPE ", page, re.MULTILINE)) == len(kinds), "a family appears twice"
    for name, kind in kinds.items():
        assert known[name].kind == kind, name
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        assert match is not None, line
        name = re.sub(r"_(bucket|sum|count)$", "", match[1])
        metric = known[match[1]] if match[1] in known else known[name]
        labels = set(LABEL.findall(match[2] or ""))
        assert labels - {"le"} == set(metric.labels), line


def test_logs_are_json_with_request_ids_and_no_text(own: Service, http: httpx.Client) -> None:
    body = {"prompt": CANARY, "max_tokens": 12, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    with Client(own.grpc_target, api_key=own.key, timeout_s=60) as sdk:
        sdk.generate(CANARY, max_tokens=12)
    http.post("/v1/completions", json={"prompt": CANARY, "temperature": -1})
    request_id = answer["id"].removeprefix("cmpl-")
    lines: list[dict[str, Any]] = []
    for path in Path(own.log_folder).rglob("*"):
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        assert CANARY not in text, path.name
        lines += [json.loads(x) for x in text.splitlines() if x.startswith('{"time"')]
    over = [x for x in lines if x.get("request_id") == request_id]
    assert [x["message"] for x in over] == ["request over"]
    assert over[0]["num_output_tokens"] == 12
    assert f":{DECODE}:" in over[0]["replicas"]
    processes = {x["process"].split(":")[1] for x in lines}
    assert "ingress" in processes


def test_the_live_page_has_its_data(own: Service, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "copy: 1 2 3", "max_tokens": 20})
    page = httpx.get(f"{own.admin_url}/dashboard")
    assert page.status_code == 200
    view: dict[str, Any] = {}
    for _ in range(50):
        view = httpx.get(f"{own.admin_url}/cluster").json()
        if len(view["replicas"]) == NUM_REPLICAS and view.get("exits"):
            break
        time.sleep(0.2)
    assert view["missing"] == {}
    assert view["helios"] is None
    assert view["fleet"]["num_ready"] == NUM_REPLICAS
    names = {r["name"] for r in view["replicas"]}
    assert {r["name"] for r in view["fleet"]["replicas"]} == names
    assert any(sum(e["tokens"].values()) > 0 for e in view["exits"].values())
    assert any(set(e["uses"]) == {"2", "4"} for e in view["exits"].values())


def test_the_history_goes_on_without_anybody_looking(own: Service, http: httpx.Client) -> None:
    shown: list[float | None] = []
    for _ in range(60):  # a sample that comes before the next request is compared with
        http.post("/v1/completions", json={"prompt": "copy: 1 2 3", "max_tokens": 20})
        history = httpx.get(f"{own.admin_url}/cluster").json()["load_history"]
        shown = [value for value in history["tokens_per_s"] if value]
        if shown:
            break
        time.sleep(0.5)
    assert shown, "tokens were counted for thirty seconds"
    assert len(history["ttft_p50_s"]) == len(history["tokens_per_s"]) == 120
    assert any(history["ttft_p99_s"])


def test_a_trace_goes_through_every_process(own: Service, http: httpx.Client) -> None:
    assert own.traces is not None
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace_id}-{parent}-01"}
    body = {"prompt": "copy: 1 2 3", "max_tokens": 24, "ignore_eos": True}
    assert http.post("/v1/completions", json=body, headers=headers).is_success
    parts = ("prefill", "decode") if IS_MIXED else ("prefill", "transfer", "decode")
    stages = {"request", *parts}
    spans = own.traces.of(trace_id, stages, within_s=20)  # exporters send every five seconds
    assert set(spans) == stages
    root = spans.pop("request")
    assert root.parent_span_id.hex() == parent
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    order = [spans[name].start_time_unix_nano for name in parts]
    assert order == sorted(order)
    for span in spans.values():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert CANARY not in str(span) and "copy" not in str(span)
    replicas = {
        attribute.value.string_value
        for span in spans.values()
        for attribute in span.attributes
        if attribute.key == "quadriga.replica"
    }
    assert len(replicas) == (1 if IS_MIXED else 2), "one prefills, another decodes"
