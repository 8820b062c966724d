"""How long a sequence may be is what the replicas say, and refusals say how it could be longer."""

from __future__ import annotations

from dataclasses import replace

from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from serve_app.cli.startup import describe
from serve_app.openai.models import ModelDirectory
from tests.unit.serve_app.conftest import MODEL, Stand


def said(model: str, most: int, name: str = "r") -> ReplicaSnapshot:
    info = ReplicaInfo(name, Role.DECODE, DepthClass(model, 8), "node", name, 8, 4096)
    return ReplicaSnapshot(replace(info, max_model_len=most), 0.0)


def limits(directory: ModelDirectory) -> tuple[int, ...]:
    return tuple(directory.find(name).max_model_len for name in ("a", "b", "quadriga-auto"))


def two_models(*, chooses: bool = False) -> ModelDirectory:
    served = [replace(MODEL, checkpoint=replace(MODEL.checkpoint, id=name)) for name in ("a", "b")]
    return ModelDirectory(served, chooses=chooses)


def test_the_least_that_any_replica_of_a_model_takes_counts() -> None:
    directory = two_models()
    directory.follow([said("a", 512), said("a", 768), said("b", 0), said("unknown", 4)])
    assert limits(directory) == (512, 2048, 512)
    assert directory.describe("a")["max_model_len"] == 512
    directory.follow([])
    assert limits(directory) == (512, 2048, 512), "no replica serves: the last that was known"
    directory.follow([said("a", 768), said("b", 256)])
    assert limits(directory) == (768, 256, 768)


def test_where_the_model_is_chosen_the_least_of_all_counts() -> None:
    directory = two_models(chooses=True)
    directory.follow([said("a", 768), said("b", 256)])
    assert limits(directory) == (768, 256, 256)


async def test_a_refusal_names_the_limit_and_how_it_could_be_higher(stand: Stand) -> None:
    stand.engine.models.follow([said("quadriga-s", 64)])
    for fields in ({"prompt": [7] * 65}, {"prompt": [7] * 64}, {"prompt": [7], "max_tokens": 64}):
        reply = await stand.complete(**({"max_tokens": 1} | fields))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "64" in error["message"] and "has 2048 positions" in error["message"]
        assert "engine.kv_memory_bytes" in error["message"]
    assert (await stand.complete(prompt=[7] * 40, max_tokens=24)).status_code == 200
    stand.engine.models.follow([said("quadriga-s", 2048)])
    reply = await stand.complete(prompt=[7] * 2049, max_tokens=1)
    assert "positions" not in reply.json()["error"]["message"]


def test_the_banner_shows_the_longest_sequence_and_why() -> None:
    why = "8192 of 131072 positions: half of 1.0 GiB of KV memory"
    text = describe({"models": ["m"], "contexts": {"m": why}}, http_url="http://h:1")
    assert f"m: prompt and answer together {why}" in text
