"""A relay batch in the cluster: what it holds, and how much of its work was padding, is told."""

from __future__ import annotations

import random

import pytest

from tests.ray.apps import App, app_fixture
from tests.ray.moves import Mover
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_OUTPUT = 40


relay = app_fixture(
    "relay", runner="baton", decode_replicas=2, **{"lifecycle.orphan_timeout_s": 300.0}
)


@pytest.mark.timeout(300)
def test_the_relay_batch_tells_what_it_does(relay: App) -> None:
    ingress = relay.ingress()
    streams = [ingress.submit([7] * n, NUM_OUTPUT, deadline_s=200.0) for n in (5, 60, 20)]
    ingress.finish(*streams, timeout_s=200.0)
    assert [s.error for s in streams] == [None] * 3
    assert [len(s.token_ids) for s in streams] == [NUM_OUTPUT] * 3
    relay.until_idle()
    held = sum(n + i for n in (5, 60, 20) for i in range(1, NUM_OUTPUT))  # by rows, all steps

    def useful_cells() -> float:
        attended = relay.metric("quadriga_relay_attended_cells_total")
        return attended - relay.metric("quadriga_relay_idle_cells_total")

    wait_until(lambda: useful_cells() == held, 20.0, useful_cells)
    wait_until(lambda: relay.metric("quadriga_relay_rows") == 0.0, 20.0)
    assert relay.metric("quadriga_relay_kv_bytes") == 0.0, "an empty batch holds no memory"
    assert relay.metric("quadriga_pauses_total") == 0.0


@pytest.mark.timeout(300)
def test_sequences_of_unmodified_models_move(relay: App) -> None:
    """From relay batch to relay batch, as long as they run: no token changes."""
    prompts = [[7 + i] * (9 + 14 * i) for i in range(4)]
    ingress = relay.ingress()
    alone = [ingress.submit(p, 90, deadline_s=200.0) for p in prompts]
    ingress.finish(*alone, timeout_s=100.0)
    streams = [ingress.submit(p, 90, deadline_s=200.0) for p in prompts]
    mover = Mover(ingress, relay.replicas("decode"), random.Random(1))
    while not all(stream.is_over for stream in streams):
        ingress.poll(0.01)
        mover.start_some(streams, at_once=2)
        mover.collect()
    mover.wait()
    assert [s.error for s in streams] == [None] * 4
    assert [s.token_ids for s in streams] == [s.token_ids for s in alone]
    assert mover.outcomes["moved"] >= 4, mover.reasons
    assert set(mover.outcomes) <= {"moved", "finished", "refused"}, mover.reasons
    relay.until_idle()
    wait_until(lambda: relay.metric("quadriga_relay_kv_bytes") == 0.0, 20.0)
