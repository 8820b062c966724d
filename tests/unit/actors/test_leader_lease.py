"""Of two controllers, one behind a link that was broken, only the newer one acts."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ray.exceptions import RayError

from actors.controller import leader_lease as leader_lease
from actors.controller.leader_lease import LeaderLease

PATIENCE_S = 20.0


class Store:
    """Ray's, for one value.

    Attributes:
        gate: While it is closed, nobody is answered.
        failure: What the next who ask get.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.value: bytes | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.num_asked = 0
        monkeypatch.setattr("actors.controller.controller_store.load", self.load)
        monkeypatch.setattr("actors.controller.controller_store.save", self.save)

    def load(self, app: str, what: str) -> bytes | None:
        self.num_asked += 1
        self._answer()
        return self.value

    def save(self, app: str, what: str, value: bytes) -> None:
        self._answer()
        self.value = value

    def _answer(self) -> None:
        assert self.gate.wait(20.0)
        if self.failure is not None:
            raise self.failure


class Watched(LeaderLease):
    """Notes that it would end its process."""

    def __init__(self) -> None:
        super().__init__("app")
        self.num_ends = 0

    def _end(self) -> None:
        self.num_ends += 1


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(leader_lease, "STORE_TIMEOUT_S", PATIENCE_S)
    return Store(monkeypatch)


async def test_the_newer_controller_holds_the_lease_and_the_older_one_ends(store: Store) -> None:
    old, new = Watched(), Watched()
    assert await old.is_held()
    assert await old.is_held()
    assert await new.is_held()
    assert not await old.is_held()
    assert (old.num_ends, new.num_ends) == (1, 0)
    assert await new.is_held()


async def test_a_partitioned_controller_holds_no_lease_until_the_store_answers(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One question is under way at most, however often it is asked."""
    mine = Watched()
    assert await mine.is_held()
    store.gate.clear()
    monkeypatch.setattr(leader_lease, "STORE_TIMEOUT_S", 0.02)
    asked = store.num_asked
    assert await asyncio.gather(*(mine.is_held() for _ in range(20))) == [False] * 20
    assert not await mine.is_held()
    monkeypatch.setattr(leader_lease, "STORE_TIMEOUT_S", PATIENCE_S)
    store.gate.set()
    assert await mine.is_held()
    assert store.num_asked == asked + 1
    assert mine.num_ends == 0


async def test_a_lease_taken_meanwhile_is_seen_when_the_link_is_mended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Watched()
    assert await old.is_held()
    store.gate.clear()
    monkeypatch.setattr(leader_lease, "STORE_TIMEOUT_S", 0.02)
    assert not await old.is_held()
    store.value = b"another"
    monkeypatch.setattr(leader_lease, "STORE_TIMEOUT_S", PATIENCE_S)
    store.gate.set()
    assert not await old.is_held()
    assert old.num_ends == 1


@pytest.mark.parametrize("failure", [RayError("away"), RuntimeError("down"), OSError("reset")])
async def test_a_store_that_fails_takes_no_lease_away(store: Store, failure: Exception) -> None:
    mine = Watched()
    store.failure = failure
    assert not await mine.is_held()
    assert mine.num_ends == 0
    store.failure = None
    assert await mine.is_held()


async def test_a_controller_that_ends_the_application_needs_no_lease(store: Store) -> None:
    mine = Watched()
    assert await mine.is_held()
    mine.keep()
    store.value = None
    assert await mine.is_held()
    assert mine.num_ends == 0
