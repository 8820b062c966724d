"""LoRA adapters at the ingress: models of their own to clients, rows of one model to replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.bench.adapters import write_adapter
from quadriga.config.loader import load_config
from quadriga.errors import ConfigError
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.grpc.server import GrpcServer
from serve_app.openai.models import ModelDirectory
from tests.equivalence.models import build
from tests.unit.serve_app.conftest import MakeStand
from tests.unit.serve_app.test_grpc_server import KEYS, Context
from tests.waiting import until


async def test_an_adapter_is_chosen_by_model(make_stand: MakeStand) -> None:
    stand = await make_stand(adapter="mine")
    for model in ("mine", "quadriga-s", "quadriga-auto"):
        reply = await stand.complete(model=model)
        assert reply.status_code == 200
        assert reply.json()["model"] == ("mine" if model == "mine" else "quadriga-s")
    found = [(s.model, s.adapter) for s in stand.cluster.submitted]
    assert found == [("quadriga-s", "mine"), ("quadriga-s", ""), ("quadriga-s", "")]
    assert len({s.prefix_salt for s in stand.cluster.submitted}) == 2
    unknown = await stand.complete(model="other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "quadriga-s, mine" in unknown.json()["error"]["message"]
    vectors = await stand.http.post("/v1/embeddings", json={"model": "mine", "input": "a"})
    assert vectors.json()["model"] == "mine"
    assert stand.cluster.submitted[-1].adapter == "mine"


async def test_it_is_listed_with_its_parent(make_stand: MakeStand) -> None:
    stand = await make_stand(adapter="mine", keys=KEYS)
    rows = (await stand.http.get("/v1/models")).json()["data"]
    assert [(row["id"], row["root"], row["parent"]) for row in rows] == [
        ("quadriga-s", "quadriga-s", None),
        ("mine", "mine", "quadriga-s"),
        ("quadriga-auto", "quadriga-s", None),
    ]
    message = pb.ListModelsRequest().SerializeToString()
    listed = await GrpcServer(stand.engine).list_models(message, Context())
    assert [m.parent for m in listed.models] == ["", "quadriga-s", ""]
    await until(lambda: bool(stand.engine._cluster_state.view.snapshots))
    page = (await stand.http.get("/metrics/endpoint")).text
    labels = 'max_lora="1",running_lora_adapters="mine",waiting_lora_adapters=""'
    assert f"vllm:lora_requests_info{{{labels}}} 1" in page, "a time of our days"


def test_the_directory_reads_the_folder(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapters" / "mine", build("llama")).parent
    known = ModelDirectory.load(load_config({"model": "quadriga-s", "adapters": str(folder)}))
    assert known.ids() == ["quadriga-s", "mine"]
    assert known.find("mine").max_model_len == known.find("quadriga-s").max_model_len
    (folder / "mine").rename(folder / "quadriga-s")
    with pytest.raises(ConfigError, match="two models are called 'quadriga-s'"):
        ModelDirectory.load(load_config({"model": "quadriga-s", "adapters": str(folder)}))
