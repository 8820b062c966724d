"""The page is shown whatever becomes of the copy that outlives the process."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayError

from actors.calls import RAY_FAILED
from actors.metrics_page import MetricsPage
from quadriga.clock import SystemClock
from quadriga.metrics import Registry

FAILURES = [RayError("away"), RuntimeError("down"), ValueError("no such key"), OSError("reset")]


def test_these_are_all_that_ray_raises() -> None:
    assert {type(f) for f in FAILURES} == set(RAY_FAILED)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: type(f).__name__)
async def test_a_store_that_fails_costs_no_page(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr("actors.kept.load", fail)
    monkeypatch.setattr("actors.kept.save", fail)
    page = MetricsPage("app", SystemClock())
    await page.restore()
    assert page.is_restored.is_set()
    registry = Registry("one")
    registry.counter("quadriga_seen", "Things seen.").inc(3)
    page.push("one", registry.snapshot())
    assert b'quadriga_seen_total{replica="one"} 3' in await page.show()
