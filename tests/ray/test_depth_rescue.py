"""ARES on live replicas of one model that differ in depth: who may go where to be saved."""

from __future__ import annotations

from typing import Any

import pytest

from actors.rpc.lookup import scheduler_name
from quadriga.checkpoint.exits import ExitParams
from tests.ray.apps import App, app_fixture, wait_until
from tests.ray.ingress import Ingress, Stream, call
from tests.ray.moves import free_memory, pause, set_pace

SHALLOW, DEEP = 4, 8
BOUNDED = ExitParams(0.99, "bounded", SHALLOW)
"""Never deeper than the layers that both have, so that a move changes no token."""
WHOLE = ExitParams(1.0, "lossless")
NUM_OUTPUT = 300
PACE = "steady-60ms"


POOL: dict[str, Any] = {"model": "quadriga-s", "prefill_replicas": 1, "decode_replicas": 1}

uneven = app_fixture(
    "uneven",
    **{
        "pools": [POOL, POOL | {"depth": SHALLOW}],
        "deterministic": True,
        "decode.pace": PACE,
        "engine.max_model_len": 512,
        "lifecycle.orphan_timeout_s": 300.0,
        "scheduler.ares.interval_s": 0.5,
        "scheduler.ares.depth_pools": False,  # they may move a sequence first
    },
)
"""Two pools of quadriga-s: one decode replica has four of its eight layers, the other all."""


def decode_at(app: App, depth: int) -> str:
    """The decode replica with so many layers."""
    (found,) = [n for n in app.replicas("decode") if call(n, "info").depth_class.depth == depth]
    return found


def running_at(ingress: Ingress, replica: str, exits: ExitParams) -> tuple[Stream, list[Stream]]:
    """A stream that decodes at a replica, and all that were submitted to get it.

    Several are admitted at once, so that they are spread over the prefill replicas of both depths.
    """
    streams: list[Stream] = []
    for number in range(8):
        prompts = [[7 + number + i] * 10 for i in range(4)]
        some = ingress.submit_together(prompts, NUM_OUTPUT, exits=exits, deadline_s=250.0)
        streams += some
        ingress.until(lambda s=some: all(len(one.tokens) > 1 for one in s), 60.0)  # type: ignore[misc]
        for stream in some:
            if stream.replica == replica:
                return stream, streams
    raise AssertionError(f"none of {len(streams)} came to {replica}")


def decisions(app: App, stream: Stream) -> list[dict[str, Any]]:
    """Moves of a stream's sequence that the scheduler ordered."""
    view: dict[str, Any] = call(scheduler_name(app.name), "operators_view", timeout_s=10.0)
    return [d for d in view["recent"] if d["sequence_id"] == stream.state.sequence_id]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("here", "there"), [(DEEP, SHALLOW), (SHALLOW, DEEP)])
def test_who_stands_in_host_memory_is_moved_to_the_other_depth(
    uneven: App, here: int, there: int
) -> None:
    """Nobody comes back where it stood; it goes on where the layers it uses are."""
    source, destination = decode_at(uneven, here), decode_at(uneven, there)
    ingress = uneven.ingress()
    standing, streams = running_at(ingress, source, BOUNDED)
    assert pause(source, standing.state.sequence_id)
    ingress.until(lambda: standing.replica == destination, 60.0)
    free_memory(source)
    for name in (source, destination):
        set_pace(name, None)
    ingress.finish(*streams, timeout_s=150.0)
    assert [s.error for s in streams] == [None] * len(streams)
    assert all(len(s.token_ids) == NUM_OUTPUT for s in streams)
    wait_until(lambda: all(d["report"] for d in decisions(uneven, standing)), 30.0)
    first, *_ = decisions(uneven, standing)
    assert (first["cause"], first["report"]["outcome"]) == ("memory", "moved")
    assert standing.token_ids in alone(ingress, standing.state.prompt_ids)
    for name in (source, destination):
        set_pace(name, PACE)
    uneven.until_idle()


@pytest.mark.timeout(300)
def test_balance_goes_on_while_a_replica_has_fewer_layers(uneven: App) -> None:
    """What the deeper replica ran is cancelled, and so it takes some of what the other runs."""
    shallow, deep = decode_at(uneven, SHALLOW), decode_at(uneven, DEEP)
    assert call(shallow, "resize", DEEP, 30.0).depth == DEEP
    ingress = uneven.ingress()
    streams = [
        ingress.submit([i] * 9, NUM_OUTPUT, exits=BOUNDED, deadline_s=250.0) for i in range(7, 19)
    ]
    ingress.until(lambda: all(len(s.tokens) > 1 for s in streams), 60.0)
    assert call(shallow, "resize", SHALLOW, 30.0).depth == SHALLOW
    kept = [s for s in streams if s.replica == shallow]
    ingress.cancel(*(s for s in streams if s.replica == deep))
    ingress.until(lambda: any(s.replica == deep for s in kept), 60.0)
    ingress.finish(*kept, timeout_s=150.0)
    assert all(s.error is None and len(s.token_ids) == NUM_OUTPUT for s in kept)
    moved = next(d for s in kept for d in decisions(uneven, s) if d["destination"] == deep)
    assert (moved["cause"], moved["source"]) == ("balance", shallow)
    uneven.until_idle()


def alone(ingress: Ingress, prompt: list[int]) -> list[list[int]]:
    """What is answered undisturbed: the first token is of either prefill replica's last layer."""
    streams = [
        ingress.submit(prompt, NUM_OUTPUT, exits=BOUNDED, deadline_s=200.0) for _ in range(8)
    ]
    ingress.finish(*streams, timeout_s=150.0)
    return [s.token_ids for s in streams]


@pytest.mark.timeout(300)
def test_who_needs_all_layers_waits_where_they_are(uneven: App) -> None:
    """A paused sequence that runs every layer has nowhere to go, until its replica has room."""
    deep = decode_at(uneven, DEEP)
    ingress = uneven.ingress()
    standing, streams = running_at(ingress, deep, WHOLE)
    other, more = running_at(ingress, deep, BOUNDED)
    assert pause(deep, standing.state.sequence_id)
    assert pause(deep, other.state.sequence_id)
    # The scheduler had time enough to move both, and moved the one that may go.
    ingress.until(lambda: other.replica != deep, 60.0)
    assert standing.replica == deep and not decisions(uneven, standing)
    free_memory(deep)
    streams += more
    ingress.finish(*streams, timeout_s=150.0)
    assert [s.error for s in streams] == [None] * len(streams)
    assert len(standing.token_ids) == NUM_OUTPUT and standing.replica == deep
    uneven.until_idle()
