"""The hand-off fails at each of its steps: the stream goes on elsewhere, nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.rpc.lookup import get_actor, scheduler_name
from quadriga.core.replica import DepthClass
from tests.ray.apps import App
from tests.ray.faulty_decode import FAULTS, HANG_S, advertise, start_faulty
from tests.ray.ingress import Ingress, call

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def expected(main_app: App) -> list[int]:
    """What an undisturbed run gives."""
    ingress = main_app.ingress()
    stream = ingress.submit(PROMPT, 12)
    ingress.finish(stream)
    return stream.token_ids


class Faulty:
    """The faulty replica of a module; made anew after it died."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.depth_class = DepthClass("quadriga-s", app.snapshots()[0].info.depth_class.depth)
        self.name, self.actor = start_faulty(app.name, self.depth_class)

    def arm(self, fault: str) -> None:
        ray.get(self.actor.set_fault.remote(fault), timeout=10)
        advertise(self.app.name, self.name, self.depth_class)

    def seen(self) -> dict[str, int]:
        calls: dict[str, int] = ray.get(self.actor.seen.remote(), timeout=10)
        return calls

    def until(self, method: str) -> None:
        ray.get(self.actor.until.remote(method), timeout=20)

    def disarm(self) -> None:
        call(scheduler_name(self.app.name), "replica_died", self.name)


@pytest.fixture(scope="module")
def faulty_replica(main_app: App) -> Iterator[Faulty]:
    faulty = Faulty(main_app)
    yield faulty
    ray.kill(faulty.actor)


@pytest.fixture
def faulty(app: App, faulty_replica: Faulty) -> Iterator[Faulty]:
    yield faulty_replica
    faulty_replica.disarm()
    ray.get(faulty_replica.actor.set_fault.remote(""), timeout=10)


def survivors() -> list[Any]:
    """Every fault after which the source still owns the sequence."""
    return [f for f in FAULTS if f != "commit_lost"]


@pytest.mark.parametrize("fault", survivors())
def test_the_sequence_goes_on_elsewhere(
    app: App, faulty: Faulty, expected: list[int], fault: str
) -> None:
    faulty.arm(fault)
    ingress = Ingress(app.name)
    stream = ingress.submit(PROMPT, 12)
    ingress.until(lambda: stream.first_token_s is not None, 20.0)
    ingress.until(lambda: stream.moved_to[-1:] not in ([], [faulty.name]), 20.0)
    if fault == "dies_at_commit":
        faulty.name, faulty.actor = start_faulty(app.name, faulty.depth_class)
    else:
        assert faulty.seen()["reserve"] >= 1, "it was never tried"
        faulty.disarm()
    # The stream was told of the faulty replica's death in one case: that is not its end.
    stream.error = None
    ingress.finish(stream)
    assert stream.error is None
    assert stream.token_ids == expected
    assert stream.replica in app.replicas("decode")
    app.until_idle()


def test_a_lost_acknowledgement_does_not_double_the_sequence(app: App, faulty: Faulty) -> None:
    """The commit took effect and the answer never came: the abort is told that it is too late."""
    faulty.arm("commit_lost")
    ingress = Ingress(app.name)
    stream = ingress.submit(PROMPT, 12)
    faulty.until("joined")
    faulty.until("abort")
    app.until_idle()
    seen = faulty.seen()
    assert seen["joined"] == 1
    assert "released" not in seen
    assert stream.moved_to in ([], [faulty.name])


@pytest.fixture
def patient(app: App) -> Iterator[None]:
    """The prefill replica waits for its peers as long as anything hangs."""
    (prefill,) = app.replicas("prefill")
    before = be_patient(prefill, HANG_S, HANG_S)
    yield
    be_patient(prefill, *before)


def be_patient(replica: str, deadline_s: float, max_call_timeout_s: float) -> tuple[float, float]:
    """Change how long a replica's hand-offs, and each call of them, may take. Returns the old."""

    def change(actor: Any) -> tuple[float, float]:
        from actors.kv_transfer import handoff_sender

        transport = actor.config.transport
        before = (transport.deadline_s, handoff_sender.MAX_CALL_TIMEOUT_S)
        transport = transport.model_copy(update={"deadline_s": deadline_s})
        actor.config = actor.config.model_copy(update={"transport": transport})
        actor.sender._config = transport
        handoff_sender.MAX_CALL_TIMEOUT_S = max_call_timeout_s
        return before

    actor: Any = get_actor(replica)
    found: tuple[float, float] = ray.get(actor.__ray_call__.remote(change), timeout=10)
    return found


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fault", ["reserve_hangs", "part_hangs", "commit_hangs"])
def test_cancelling_does_not_wait_for_a_hung_peer(app: App, faulty: Faulty, fault: str) -> None:
    """Nor does the first token."""
    faulty.arm(fault)
    ingress = Ingress(app.name)
    stream = ingress.submit(PROMPT, 12)
    faulty.until(fault.split("_")[0])
    ingress.until(lambda: stream.first_token_s is not None, 10.0)
    stream.replica = app.replicas("prefill")[0]
    ingress.cancel(stream)
    app.until_idle()
