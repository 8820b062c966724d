"""A deterministic service in int8: KV and adapters move between replicas that compute alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import ray
from transformers import AutoModelForCausalLM

from actors.rpc.lookup import get_actor, scheduler_name
from loadgen.bench.adapters import write_adapter
from quadriga import LLM
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.core.replica import ReplicaInfo
from quadriga.core.request import SamplingParams
from quadriga.errors import Unavailable
from tests.ray.apps import App
from tests.ray.ingress import call
from tests.ray.moves import order
from tests.waiting import wait_until

ADAPTER = "an-adapter"
NUM_LONG = 1_500
"""Of a stream that ends only when it is let go."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the service and an engine alone have in common, with one LoRA adapter of the model."""
    folder = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(read_checkpoint("quadriga-s").path)
    write_adapter(folder / ADAPTER, model, strength=0.05)
    return {
        "deterministic": True,
        "adapters": str(folder),
        "engine.weights": "int8",
        "engine.compile": "wait",
    }


@pytest.fixture(scope="module")
def app(ray_cluster: None, settings: dict[str, Any]) -> Iterator[App]:
    """One prefill and two decode replicas, of which streams are slow enough to be moved."""
    made = App.start("alike", **settings, **{"decode.pace": "steady-15ms"})
    yield made
    made.stop()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(5, 500) for _ in range(length)] for length in (3, 40, 90, 200)]


def rename(replica: str, numerics: str) -> str:
    """Let a replica say that it computes otherwise; returns what it said before."""

    def change(actor: Any) -> str:
        before: str = actor.info_record.numerics
        actor.info_record = replace(actor.info_record, numerics=numerics)
        return before

    actor: Any = get_actor(replica)
    before: str = ray.get(actor.__ray_call__.remote(change), timeout=30)
    return before


def known(app: App) -> dict[str, ReplicaInfo]:
    """What the scheduler knows of the replicas, by their names."""
    view = call(scheduler_name(app.name), "directory")
    return {snapshot.info.name: snapshot.info for snapshot in view.snapshots}


def test_all_say_what_they_compute_with(app: App) -> None:
    names = {info.numerics for info in known(app).values()}
    assert len(names) == 1 and names.pop().startswith("int8 kernels ")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("adapter", ["", ADAPTER], ids=["the model", "an adapter"])
def test_handed_off_and_moved_tokens_are_the_engine_s_own(
    app: App, settings: dict[str, Any], prompts: list[list[int]], adapter: str
) -> None:
    ingress = app.ingress()
    streams = [ingress.submit(prompt, NUM_LONG, adapter=adapter) for prompt in prompts]
    ingress.until(lambda: all(len(s.tokens) > 2 for s in streams))
    decodes = app.replicas("decode")
    for stream in streams:
        source = stream.replica
        destination = next(name for name in decodes if name != source)
        report = call(source, "migrate", order(stream, source, destination))
        assert report.outcome == "moved", report
    ingress.until(lambda: all(s.moved_to[1:] for s in streams))
    seen = [len(s.tokens) for s in streams]
    ingress.until(lambda: all(len(s.tokens) > n + 20 for s, n in zip(streams, seen, strict=True)))
    ingress.cancel(*streams)
    app.until_idle(20.0)
    sampling = SamplingParams(max(len(s.tokens) for s in streams), temperature=0.0, ignore_eos=True)
    with closing(LLM("quadriga-s", **settings)) as llm:
        alone = llm.generate(prompts, sampling, progress=False, adapter=adapter)
        if adapter:
            others = llm.generate(prompts, sampling, progress=False)
            assert [o.token_ids for o in others] != [o.token_ids for o in alone]
    for stream, output in zip(streams, alone, strict=True):
        assert stream.token_ids == list(output.token_ids)[: len(stream.tokens)]


@pytest.mark.timeout(180)
def test_kv_stays_where_it_is_computed_alike(app: App, prompts: list[list[int]]) -> None:
    mine, other = app.replicas("decode")
    ours = rename(other, "int8 kernels of another machine")
    try:
        wait_until(lambda: known(app)[other].numerics != ours, 60.0)
        ingress = app.ingress()
        streams = [ingress.submit(prompt, NUM_LONG) for prompt in prompts]
        ingress.until(lambda: all(len(s.tokens) > 2 for s in streams))
        assert {s.replica for s in streams} == {mine}, "none was placed on the other"
        report = call(mine, "migrate", order(streams[0], mine, other))
        assert report.outcome == "refused"
        assert report.reason.startswith("wrong_numerics: "), report.reason
        ingress.cancel(*streams)
        app.until_idle(20.0)

        rename(mine, "int8 kernels of another machine")
        wait_until(lambda: known(app)[mine].numerics != ours, 60.0)
        with pytest.raises(Unavailable, match="a deterministic deployment does not mix"):
            ingress.submit(prompts[0], 8)
    finally:
        for name in (mine, other):
            rename(name, ours)
        wait_until(lambda: {i.numerics for i in known(app).values()} == {ours}, 60.0)
