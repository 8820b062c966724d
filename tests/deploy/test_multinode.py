"""The service on Ray nodes that share nothing but a network, called from outside of it."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deploy.multinode import COMMANDS, MultiNode, why_not_here
from deploy.multinode_inside import nodes, serve_config
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.config.loader import load_config
from tests.deploy.charts import CHART

MODEL = "quadriga-s"
NUM_REQUESTS = 12
MAX_SLOTS = 8  # fewer than the requests, so that one decode node cannot hold them all
NUM_OUTPUT = 100
FLOAT32_BYTES = 4


def test_each_replica_gets_a_node_and_its_label() -> None:
    cluster = nodes("10.0.0", num_prefill=1, num_decode=2)
    assert [n.name for n in cluster] == ["head", "prefill-0", "decode-0", "decode-1"]
    assert len({n.address for n in cluster}) == 4
    assert [n.num_cpus for n in cluster] == [0, 1, 1, 1]
    told = serve_config(cluster, {"engine.compile": "off", "decode.max_slots": "4"})
    config = load_config(told["applications"][0]["args"])
    assert config.pools[0].prefill_labels == {"quadriga/role": "prefill"}
    assert config.pools[0].decode_replicas == 2
    assert (config.engine.compile, config.engine.resources_cpus) == ("off", 1)
    assert config.decode.max_slots == 4


def test_it_says_why_it_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    if all(shutil.which(name) for name in COMMANDS):
        assert why_not_here() == "making network namespaces needs root"
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_not_here() == "these commands are missing: ip, unshare, nsenter"


@pytest.fixture(scope="module")
def cluster() -> Iterator[MultiNode]:
    reason = why_not_here()
    if reason is not None:
        pytest.skip(f"no network namespaces: {reason}")
    config = {"engine.compile": "off", "transport.kind": "gloo", "decode.max_slots": str(MAX_SLOTS)}
    with MultiNode(config=config) as running:
        yield running


@pytest.mark.timeout(400)
def test_replicas_are_on_the_nodes_of_their_role(cluster: MultiNode) -> None:
    replicas = cluster.status()["replicas"]
    assert sorted(r["node"] for r in replicas) == ["decode-0", "decode-1", "prefill-0"]
    for replica in replicas:
        assert replica["node"].startswith(replica["role"])


@pytest.mark.timeout(400)
def test_kv_crosses_the_network_and_answers_come_out_of_it(cluster: MultiNode) -> None:
    decodes = [n.name for n in cluster.nodes if n.role == "decode"]
    before = {name: cluster.received_bytes(name) for name in decodes}
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda i: _complete(cluster, i), range(NUM_REQUESTS)))
    received = {name: cluster.received_bytes(name) - before[name] for name in decodes}
    prompt_tokens = sum(a["usage"]["prompt_tokens"] for a in answers)
    checkpoint = read_checkpoint(MODEL)
    per_token = checkpoint.kv_bytes_per_token(checkpoint.num_layers, FLOAT32_BYTES)
    assert all(a["usage"]["completion_tokens"] == NUM_OUTPUT for a in answers)
    # Each prompt's KV is computed on one node and decoded on another.
    assert sum(received.values()) >= prompt_tokens * per_token
    assert min(received.values()) >= prompt_tokens / NUM_REQUESTS * per_token, "all on one node"
    page = _call(cluster, "/metrics").decode()
    fallbacks = re.findall(r"^quadriga_kv_transport_fallbacks(?:_total)?\S* (\S+)$", page, re.M)
    assert fallbacks and not any(float(value) for value in fallbacks)


@pytest.mark.timeout(400)
def test_the_charts_own_test_passes(cluster: MultiNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("URL", cluster.url)
    monkeypatch.setenv("TIMEOUT_S", "30")
    main = runpy.run_path(str(CHART / "files" / "one_completion.py"))["main"]
    monkeypatch.setenv("API_KEY", cluster.api_key)
    assert main() == 0
    monkeypatch.setenv("API_KEY", "another")
    assert main() == 1


def _complete(cluster: MultiNode, index: int) -> dict[str, Any]:
    numbers = " ".join(str((index + i * 37) % 100) for i in range(60))
    body = {
        "model": MODEL,
        "prompt": f"Sort: {numbers}\n",
        "max_tokens": NUM_OUTPUT,
        "ignore_eos": True,
    }
    answer: dict[str, Any] = json.loads(_call(cluster, "/v1/completions", body))
    return answer


def _call(cluster: MultiNode, path: str, body: dict[str, Any] | None = None) -> bytes:
    headers = {"content-type": "application/json", "authorization": f"Bearer {cluster.api_key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(cluster.url + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        page: bytes = reply.read()
    return page
