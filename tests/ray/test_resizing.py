"""A replica's depth changes under load: no token of those whom it does not concern changes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray

from actors.lookup import controller_name, get_actor
from quadriga.exits import ExitParams
from quadriga.types import FinishReason, ResizeReport
from tests.ray.apps import App, wait_until
from tests.ray.ingress import Ingress, Stream, call

NUM_RESIZES = 42
"""Of the decode replica and of the prefill replica, together at least."""
TIME_LIMIT_S = 150.0
LIMITED = ExitParams(0.99, "bounded", 4)
"""Never deeper than the four layers that are always there: the same tokens whatever comes."""
FREE = ExitParams(0.99, "bounded", 0)
STRICT = ExitParams(0.99, "strict", 0)


@pytest.fixture(scope="module")
def resizing(ray_cluster: None) -> Iterator[App]:
    """One prefill and two decode replicas that hold few sequences at full depth; and scouts.

    The scouts wait for profiles that nobody asks for, so that no orders come but the test's own.
    """
    app = App.start(
        "resizing",
        **{
            "decode_replicas": 2,
            "decode.max_slots": 16,
            "decode.rebatching": "drex",
            "deterministic": True,
            "engine.max_model_len": 512,
            "engine.kv_memory_bytes": 2 << 20,
            "engine.compile": "wait",
            "helios.enabled": True,
            "helios.models": ["quadriga-s"],
            "lifecycle.orphan_timeout_s": 300.0,
        },
    )
    yield app
    app.stop()


def serving(app: App) -> tuple[list[str], str]:
    """Decode replicas and the prefill replica that are no scouts."""
    return sorted(app.replicas("decode"))[:2], min(app.replicas("prefill"))


def submit(ingress: Ingress, exits: ExitParams, seed: int, num_output: int) -> Stream:
    prompt = [20 + (seed * 7 + i * 3) % 300 for i in range(8 + seed % 20)]
    return ingress.submit(prompt, num_output, exits=exits, deadline_s=240.0)


def resize(replica: str, depth: int) -> ResizeReport:
    report: ResizeReport = call(replica, "resize", depth, 30.0)
    return report


@pytest.mark.timeout(400)
def test_up_and_down_under_load(resizing: App) -> None:
    app = resizing
    decodes, prefill = serving(app)
    capacity = {8: call(decodes[0], "info").kv_capacity_tokens}
    wanted: list[list[list[int]]] = [[] for _ in range(6)]
    for depth in (4, 8):  # the first token is the prefill replica's, which has no limit
        assert resize(prefill, depth).depth == depth
        alone = app.ingress()
        streams = [submit(alone, LIMITED, seed, 120) for seed in range(6)]
        alone.finish(*streams, timeout_s=100.0)
        for seed, stream in enumerate(streams):
            wanted[seed].append(stream.token_ids)

    ingress = app.ingress()
    reports: list[ResizeReport] = []
    pending: dict[object, str] = {}
    depths = dict.fromkeys([*decodes, prefill], 8)
    limited: list[Stream] = []
    free: list[Stream] = []
    give_up_s = time.monotonic() + TIME_LIMIT_S
    while len(reports) < NUM_RESIZES:
        assert time.monotonic() < give_up_s, f"only {len(reports)} in {TIME_LIMIT_S:.0f} s"
        if sum(not s.is_over for s in [*limited, *free]) < 6:
            limited.append(submit(ingress, LIMITED, len(limited) % 6, 120))
            free.append(submit(ingress, FREE, 50 + len(free), 100))
        for name in depths:
            if name not in pending.values():
                depths[name] = {8: 4, 4: 8}[depths[name]]
                ref = get_actor(name).resize.remote(depths[name], 30.0)
                pending[ref] = name
        ingress.poll(0.02)
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for ref in done:
            name, report = pending.pop(ref), ray.get(ref)
            reports.append(report)
            assert report.outcome == "resized", report
            if name != prefill:
                capacity[report.depth] = report.kv_capacity_tokens
    while pending:
        done, _ = ray.wait(list(pending), timeout=0)
        for ref in done:
            pending.pop(ref)
        ingress.poll(0.02)
    ingress.finish(*limited, *free, timeout_s=100.0)
    for i, stream in enumerate(limited):
        assert stream.error is None and stream.finish is FinishReason.LENGTH
        assert stream.token_ids in wanted[i % 6], f"tokens of {i} have changed"
    assert [s.error for s in free] == [None] * len(free)
    assert all(len(s.token_ids) == 100 for s in free)
    assert capacity[4] > 1.9 * capacity[8], "layers that go leave their memory to the KV"
    app.until_idle(5.0)


@pytest.mark.timeout(200)
def test_more_fit_where_layers_went(resizing: App) -> None:
    """The same memory holds more sequences at half the depth."""
    app = resizing
    (first, second), _ = serving(app)
    for name in (first, second):
        assert resize(name, 8).depth == 8
    held = {}
    for depth in (8, 4):
        for name in (first, second):
            assert resize(name, depth).outcome in ("resized", "unchanged")
        ingress = app.ingress()
        streams = [submit(ingress, LIMITED, seed, 380) for seed in range(16)]
        ingress.until(lambda s=streams: sum(len(x.tokens) > 2 for x in s) >= 3)  # type: ignore[misc]
        held[depth] = max(_held(app), _held(app))
        ingress.cancel(*streams)
        app.until_idle(10.0)
    assert held[4] > held[8], held


def _held(app: App) -> int:
    time.sleep(0.5)  # not to pass: to let all come in that can
    return sum(s.num_running for s in app.snapshots() if s.info.role == "decode")


@pytest.mark.timeout(200)
def test_strict_sequences_go_where_the_layers_are(resizing: App) -> None:
    """Layers are not dropped under them; where they lack, the controller moves the sequence."""
    app = resizing
    (first, second), prefill = serving(app)
    for name in (prefill, first, second):
        assert resize(name, 8).depth == 8
    ingress = app.ingress()
    strict = [submit(ingress, STRICT, seed, 300) for seed in range(4)]
    ingress.until(lambda: len(strict[0].tokens) > 2)
    report = call(strict[0].replica, "resize", 4, 0.02)
    assert report.outcome == "blocked" and report.depth == 8, report
    ingress.finish(*strict, timeout_s=100.0)
    assert [s.error for s in strict] == [None] * 4

    resize(first, 4)
    resize(second, 4)
    again = [submit(ingress, STRICT, seed, 300) for seed in range(4)]
    ingress.finish(*again, timeout_s=100.0)
    assert [s.error for s in again] == [None] * 4
    assert [s.token_ids for s in again] == [s.token_ids for s in strict]
    history = call(controller_name(app.name), "history")
    assert history["counters"]["escalated"] + history["counters"]["resizes"] > 0
    app.until_idle(5.0)


@pytest.mark.timeout(100)
def test_what_is_refused(resizing: App) -> None:
    (first, _), _ = serving(resizing)
    assert resize(first, 3).outcome == "refused"
    assert resize(first, 99).outcome == "refused"
    wait_until(lambda: resizing.metric("quadriga_resizes_total") >= 2, 10.0)
