"""A request that was paused and moved tells so; operators see why by the commands and on the page.

The scheduler decides the move by itself, of a sequence that is kept in its replica's host memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import ray

from actors.rpc.lookup import get_actor
from quadriga.client import Client, Usage
from quadriga.observability.load_history import OPEN_REQUESTS
from quadriga.observability.metrics import parse_exposition
from quadriga.observability.running_requests import MOST_SHOWN
from serve_app.openai.answers import QuadrigaUsage
from tests.e2e.conftest import Service
from tests.e2e.observe import series, total
from tests.e2e.roles import DECODE
from tests.ray.moves import free_memory, held, hold, pause
from tests.waiting import wait_until

Found = TypeVar("Found")
CANARY = "zebra-canary-4713"
PATIENCE_S = 120.0
NUM_TOKENS = 800
"""At ten a second while it is held: much longer than it takes to be paused and moved."""
PROMPT = "Count from 1 to 40.\n"
OPTIONS: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "exit_policy": "bounded",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the last piece of an answer said of it, and the decision that it was moved by."""

    request_id: str
    usage: QuadrigaUsage | Usage
    decision: dict[str, Any]


def get(service: Service, path: str, **query: str) -> Any:
    reply = httpx.get(f"{service.admin_url}{path}", params=query, timeout=60)
    return reply.raise_for_status().json()


def until(look: Callable[[], Found]) -> Found:
    """What a look finds, once it finds something."""
    found: list[Found] = []

    def is_there() -> bool:
        found[:] = [look()]
        return bool(found[0])

    wait_until(is_there, PATIENCE_S)
    return found[0]


def pause_where_it_runs(names: list[str], request_id: str) -> str:
    """Pause a request's sequence; the replica, or nothing where none runs it just now."""

    def running(replica: Any) -> list[str]:
        states = replica.engine.core.loop.running
        return [state.sequence_id for state in states if state.request_id == request_id]

    for name in names:
        for sequence_id in ray.get(get_actor(name).__ray_call__.remote(running), timeout=30):
            if pause(name, sequence_id):
                return name
            free_memory(name)
    return ""


def over_http(service: Service, begun: Callable[[str], None]) -> QuadrigaUsage:
    body = OPTIONS | {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    url = f"{service.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        begun(json.loads(next(lines).removeprefix("data: "))["id"])
        *_, last = lines
    usage = json.loads(last.removeprefix("data: "))["usage"]
    return QuadrigaUsage.model_validate(usage["quadriga"])


def over_grpc(service: Service, begun: Callable[[str], None]) -> Usage:
    with Client(service.grpc_target, api_key=service.key, timeout_s=PATIENCE_S) as sdk:
        request_id = uuid.uuid4().hex
        pieces = sdk.stream(PROMPT, request_id=request_id, **OPTIONS)
        next(pieces)
        begun(request_id)
        *_, last = pieces
    assert last.usage is not None
    return last.usage


@pytest.fixture(scope="module", params=[over_http, over_grpc], ids=["http", "grpc"])
def answer(own: Service, request: pytest.FixtureRequest) -> Answer:
    """Of a request that was paused while it decoded, and went on elsewhere."""
    names = [r["name"] for r in get(own, "/cluster")["replicas"] if r["role"] == DECODE]
    decisions: list[tuple[str, dict[str, Any]]] = []

    def pause_until_moved(answer_id: str) -> None:
        source = until(lambda: pause_where_it_runs(names, answer_id.removeprefix("cmpl-")))

        def moved() -> list[dict[str, Any]]:
            known = get(own, "/cluster/moves", request=answer_id)["moves"]
            return [d for d in known if d["source"] == source and is_moved(d)]

        try:
            decisions.append((answer_id, until(moved)[-1]))
        finally:
            free_memory(source)
        for name in names:
            hold(name, 0.0)

    with held(names):
        usage = request.param(own, pause_until_moved)
    [(request_id, decision)] = decisions
    return Answer(request_id, usage, decision)


def is_moved(decision: dict[str, Any]) -> bool:
    return decision["report"] is not None and decision["report"]["outcome"] == "moved"


def loadgen(*words: str) -> str:
    """What the command says, in one line."""
    command = [sys.executable, "-m", "loadgen", *words]
    ended = subprocess.run(
        command, env=os.environ | {"COLUMNS": "300"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return " ".join(ended.stdout.split())


@pytest.mark.timeout(300)
def test_its_usage_counts_them_and_says_what_depth_was_expected(answer: Answer) -> None:
    assert answer.usage.pauses >= 1
    assert answer.usage.migrations >= 1
    assert answer.usage.expected_layers is not None
    assert 1.0 <= answer.usage.expected_layers <= 8.0


@pytest.mark.timeout(300)
def test_the_command_and_the_page_say_why(own: Service, answer: Answer) -> None:
    decision, why = answer.decision, answer.decision["explanation"]
    assert decision["cause"] == "memory"
    said = loadgen("why", answer.request_id, "--url", own.admin_url)
    assert f"{decision['sequence_id']}: {decision['source']} → {decision['destination']}" in said
    assert why["text"] in said and "KV memory is nearly full" in said
    assert f"it held {why['sequence']['tokens']} tokens, " in said
    (place,) = why["destinations"]
    assert f"{place['name']} {place['gain']:.1%} {place['work']:.2f} " in said
    assert decision in get(own, "/cluster")["recent"]


@pytest.mark.timeout(300)
def test_requests_of_all_ingresses_are_seen_while_they_run(
    own: Service, http: httpx.Client
) -> None:
    """No text of them ever; a pause is seen before its ingress hears of it."""
    names = [r["name"] for r in get(own, "/cluster")["replicas"] if r["role"] == DECODE]
    body = OPTIONS | {"prompt": f"{CANARY} 1 2 3", "stream": True}
    streams: dict[str, Iterator[str]] = {}

    def rows() -> dict[str, dict[str, Any]]:
        return {r["request_id"]: r for r in get(own, "/cluster")["requests"]}

    def open_requests() -> list[float]:
        return [n for k, n in series(http).items() if k.startswith(f"{OPEN_REQUESTS}{{")]

    wait_until(lambda: len(open_requests()) == 2, PATIENCE_S)
    with held(names), ExitStack() as answers:
        while 0 in (found := open_requests()):
            assert len(streams) < MOST_SHOWN, f"one takes all: {found}"
            key = {"idempotency-key": uuid.uuid4().hex}  # by it the ingress is chosen
            post = http.stream("POST", "/v1/completions", json=body, headers=key)
            answer = answers.enter_context(post)
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            said = json.loads(next(lines).removeprefix("data: "))
            streams[said["id"].removeprefix("cmpl-")] = lines  # read no further, and kept open
        wait_until(lambda: streams.keys() <= rows().keys(), PATIENCE_S)
        wait_until(lambda: all("seconds" in (rows()[s]["eta"] or ()) for s in streams), PATIENCE_S)
        for found in (rows()[name] for name in streams):
            assert found["tokens"] + found["eta"]["tokens"] == NUM_TOKENS, "its end is ignored"
            assert found["status"] in ("running", "moving") and found["replica"] in names
        assert CANARY not in json.dumps(get(own, "/cluster"))
        paused = next(iter(streams))
        assert paused[-12:] in loadgen("watch", "--once", "--url", own.admin_url)
        source = until(lambda: pause_where_it_runs(names, paused))
        try:  # the scheduler may move it at once
            wait_until(lambda: rows()[paused]["pauses"] >= 1, PATIENCE_S)
        finally:
            free_memory(source)
    wait_until(lambda: not streams.keys() & rows().keys(), PATIENCE_S)


@pytest.mark.timeout(300)
def test_what_was_decided_is_decided_again_otherwise(
    own: Service, answer: Answer, tmp_path: Path
) -> None:
    kept = str(tmp_path / "ticks.jsonl")
    said = loadgen("replay", "--url", own.admin_url, "--set", "max_moves=0", "--save", kept)
    found = re.search(r"(\d+) ticks .* (\d+) moves were ordered, 0 would be now", said)
    assert found is not None and int(found[2]) >= 1, said
    assert answer.decision["sequence_id"] in Path(kept).read_text(encoding="utf-8")
    assert f"{found[1]} ticks" in (same := loadgen("replay", kept))
    assert f"0 are decided otherwise; {found[2]} moves were ordered, {found[2]} would be" in same
    exact = loadgen("replay", kept, "--exact")
    assert f"{found[1]} ticks" in exact and f"; {found[2]} moves were ordered, " in exact


@pytest.mark.timeout(300)
def test_expected_and_run_layers_are_compared(own: Service, answer: Answer) -> None:
    """By the tenth of the layers that was expected, on both pages."""
    names = [
        f"quadriga_depth_{name}_total"
        for name in ("forecast_tokens", "expected_layers", "run_layers")
    ]

    def compared() -> list[float]:
        page = parse_exposition(httpx.get(f"{own.admin_url}/metrics", timeout=60).text)
        assert all('tenth="' in key for key in page if key.split("{")[0] in names)
        counts = [total(page, name) for name in names]
        return counts if min(counts) > 0.0 else []

    tokens, expected, run = until(compared)
    assert tokens <= expected <= 8.0 * tokens and tokens <= run <= 8.0 * tokens
    shown = until(
        lambda: [e["depths"] for e in get(own, "/cluster")["exits"].values() if e["depths"]]
    )
    assert all(d.keys() == {"tokens", "expected", "run"} for one in shown for d in one.values())
