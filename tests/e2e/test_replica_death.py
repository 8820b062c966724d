"""Every decode replica dies under its streams: they go on, token for token, when others are up."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import httpx
import pytest
import ray

from actors.rpc.lookup import get_actor
from quadriga.core.replica import Role
from tests.e2e.conftest import ADAPTER, Service
from tests.e2e.observe import series, total, wait_until_free
from tests.e2e.roles import DECODE
from tests.random_drafter import draft_at_random

NAMESPACE = "quadriga"
MAX_DEATHS = 4
TOLD_WITHIN_S = 20.0


def replicas(role: Role) -> list[str]:
    """Names of the living replicas of a role."""
    return [
        named["name"]
        for named in ray.util.list_named_actors(all_namespaces=True)
        if named["namespace"] == NAMESPACE and f":{role}:" in named["name"]
    ]


def kill(role: Role) -> None:
    """End all replicas of a role, as if by SIGKILL."""
    for name in replicas(role):
        ray.kill(get_actor(name))


def stream_until_killed(http: httpx.Client, body: dict[str, Any]) -> list[Any]:
    """The frames of a stream during which all decode replicas die."""
    frames = []
    with http.stream("POST", "/v1/completions", json=body, timeout=120) as reply:
        for line in filter(None, reply.iter_lines()):
            frames.append(line.removeprefix("data: "))
            if len(frames) == 20:
                kill(DECODE)
    assert frames.pop() == "[DONE]"
    return [json.loads(frame) for frame in frames]


NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 10, "maximum": 99},
    "minItems": 90,
    "maxItems": 90,
}
PLAIN: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
EARLY: dict[str, Any] = PLAIN | {"exit_policy": "bounded"}
DRAFTED: dict[str, Any] = PLAIN | {"exit_policy": "lossless", "temperature": 0.8, "seed": 6}
FORMED: dict[str, Any] = {
    "max_tokens": 1500,
    "temperature": 0.9,
    "seed": 3,
    "structured_outputs": {"json": NUMBERS},
}
ADAPTED: dict[str, Any] = EARLY | {"model": ADAPTER, "max_tokens": 900}


@pytest.mark.parametrize(
    "fields",
    [PLAIN, EARLY, DRAFTED, FORMED, ADAPTED],
    ids=["plain", "with exits", "drafted", "of a given form", "of an adapter"],
)
@pytest.mark.skipif(
    "QUADRIGA_E2E_HTTP" in os.environ, reason="kills actors, so it needs the service it started"
)
def test_a_stream_survives_all_decode_replicas(
    service: Service, http: httpx.Client, fields: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"prompt": "Sort: 4 2\n"} | fields
    answer = http.post("/v1/completions", json=body).json()
    whole = answer["choices"][0]["text"]
    if "structured_outputs" in fields:
        assert len(json.loads(whole)) == NUMBERS["minItems"]
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    for _ in range(MAX_DEATHS):  # the last token may have been on its way when they died
        if fields is DRAFTED:
            for name in replicas(DECODE):
                draft_at_random(name, 0)
        parsed = stream_until_killed(http, streamed)
        text = "".join(choice["text"] for frame in parsed for choice in frame["choices"])
        assert text == whole
        usage = parsed[-1]["usage"]
        assert usage["completion_tokens"] == answer["usage"]["completion_tokens"]
        if usage["quadriga"]["rebuilds"]:
            break
    assert usage["quadriga"]["rebuilds"] >= 1
    give_up_s = time.monotonic() + TOLD_WITHIN_S
    while total(series(http), "quadriga_recoveries_total") < 1:
        assert time.monotonic() < give_up_s
    wait_until_free(http, within_s=30.0)
