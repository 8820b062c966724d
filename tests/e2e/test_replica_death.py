"""Every decode replica dies under its streams: they go on, token for token, when others are up."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest
import ray

from actors.lookup import get_actor
from quadriga.types import Role
from tests.e2e.conftest import Service
from tests.e2e.observe import series, total, wait_until_free

NAMESPACE = "quadriga"


def kill(role: Role) -> None:
    """End all replicas of a role, as if by SIGKILL."""
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE and f":{role}:" in named["name"]:
            ray.kill(get_actor(named["name"]))


@pytest.mark.skipif(
    "QUADRIGA_E2E_HTTP" in os.environ, reason="kills actors, so it needs the service it started"
)
def test_a_stream_survives_all_decode_replicas(service: Service, http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "Sort: 4 2\n", "max_tokens": 300, "ignore_eos": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    frames = []
    with http.stream("POST", "/v1/completions", json=streamed, timeout=120) as reply:
        for line in reply.iter_lines():
            if line:
                frames.append(line.removeprefix("data: "))
            if len(frames) == 20:
                kill(Role.DECODE)
    assert frames[-1] == "[DONE]"
    parsed = [json.loads(frame) for frame in frames[:-1]]
    text = "".join(choice["text"] for frame in parsed for choice in frame["choices"])
    assert text == whole
    usage = parsed[-1]["usage"]
    assert usage["completion_tokens"] == 300
    assert usage["quadriga"]["rebuilds"] >= 1
    assert total(series(http), "quadriga_recoveries_total") >= 1
    wait_until_free(http)
