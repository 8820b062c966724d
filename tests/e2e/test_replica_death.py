"""A decode replica dies under its streams: an error frame at once, and service again soon."""

from __future__ import annotations

import json
import os
import time

import httpx
import pytest
import ray

from actors.lookup import get_actor
from quadriga.types import Role
from tests.e2e.conftest import Service
from tests.e2e.observe import wait_until_free

NAMESPACE = "quadriga"


@pytest.mark.skipif(
    "QUADRIGA_E2E_HTTP" in os.environ, reason="kills actors, so it needs the service it started"
)
def test_streams_of_a_dead_replica_end_in_an_error_frame(
    service: Service, http: httpx.Client
) -> None:
    body = {"prompt": "Sort: 4 2\n", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    frames = []
    with http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line:
                frames.append(line)
            if len(frames) == 20:
                for named in ray.util.list_named_actors(all_namespaces=True):
                    if named["namespace"] == NAMESPACE and f":{Role.DECODE}:" in named["name"]:
                        ray.kill(get_actor(named["name"]))
                killed_s = time.monotonic()
    assert time.monotonic() - killed_s < 10.0
    assert json.loads(frames[-1].removeprefix("data: "))["error"]["code"] == "replica_died"
    assert "data: [DONE]" not in frames
    give_up_s = time.monotonic() + 90
    short = {"prompt": "Sort: 4 2\n", "max_tokens": 3}
    while http.post("/v1/completions", json=short).status_code != 200:
        assert time.monotonic() < give_up_s, "the replicas did not come back"
    wait_until_free(http)
