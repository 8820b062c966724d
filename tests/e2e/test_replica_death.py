"""Every decode replica dies under its streams: they go on, token for token, when others are up."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
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
from tests.waiting import wait_until

NAMESPACE = "quadriga"
MAX_DEATHS = 4
TOLD_WITHIN_S = 20.0
TOLD = 3
"""Frames of every stream, before the replicas die."""
PROMPT = {"prompt": "Sort: 4 2\n"}


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


NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 10, "maximum": 99},
    "minItems": 90,
    "maxItems": 90,
}
PLAIN: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "with exits": PLAIN | {"exit_policy": "bounded"},
    "drafted": PLAIN | {"exit_policy": "lossless", "temperature": 0.8, "seed": 6},
    "of a given form": {
        "max_tokens": 1500,
        "temperature": 0.9,
        "seed": 3,
        "structured_outputs": {"json": NUMBERS},
    },
    "of an adapter": PLAIN | {"exit_policy": "bounded", "model": ADAPTER},
}


class Streams:
    """One of each kind at once; when each has told something, all decode replicas are killed."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._told = dict.fromkeys(BODIES, 0)
        self._lock = threading.Lock()
        self._have_died = False

    def run(self) -> dict[str, list[Any]]:
        with ThreadPoolExecutor(len(BODIES)) as threads:
            return dict(zip(BODIES, threads.map(self._frames, BODIES), strict=True))

    def _frames(self, kind: str) -> list[Any]:
        body = BODIES[kind] | {"stream": True, "stream_options": {"include_usage": True}}
        frames = []
        with self._http.stream("POST", "/v1/completions", json=PROMPT | body, timeout=120) as reply:
            for line in filter(None, reply.iter_lines()):
                frames.append(line.removeprefix("data: "))
                with self._lock:
                    self._told[kind] += 1
                    if min(self._told.values()) >= TOLD and not self._have_died:
                        self._have_died = True
                        kill(DECODE)
        assert frames.pop() == "[DONE]"
        return [json.loads(frame) for frame in frames]


@pytest.mark.skipif(
    "QUADRIGA_E2E_HTTP" in os.environ, reason="kills actors, so it needs the service it started"
)
def test_streams_of_every_kind_survive_all_decode_replicas(
    service: Service, http: httpx.Client
) -> None:
    def ask(kind: str) -> Any:
        return http.post("/v1/completions", json=PROMPT | BODIES[kind], timeout=120).json()

    with ThreadPoolExecutor(len(BODIES)) as threads:
        whole = dict(zip(BODIES, threads.map(ask, BODIES), strict=True))
    formed = whole["of a given form"]["choices"][0]["text"]
    assert len(json.loads(formed)) == NUMBERS["minItems"]
    never_rebuilt = {*BODIES}
    for _ in range(MAX_DEATHS):  # the last token may have been on its way when they died
        for name in replicas(DECODE):
            draft_at_random(name, 0)
        for kind, frames in Streams(http).run().items():
            text = "".join(choice["text"] for frame in frames for choice in frame["choices"])
            assert text == whole[kind]["choices"][0]["text"], kind
            usage = frames[-1]["usage"]
            assert usage["completion_tokens"] == whole[kind]["usage"]["completion_tokens"], kind
            if usage["quadriga"]["rebuilds"]:
                never_rebuilt.discard(kind)
        if not never_rebuilt:
            break
    assert not never_rebuilt
    wait_until(lambda: total(series(http), "quadriga_recoveries_total") >= 1, TOLD_WITHIN_S)
    wait_until_free(http, within_s=30.0)
