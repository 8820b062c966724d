from __future__ import annotations

from pathlib import Path

import pytest

from tests.order_of_tests import common_last
from tests.ray.apps import App, app_fixture
from tests.ray_cluster import ray_cluster

__all__ = ["ray_cluster"]


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    common_last(items, Path(__file__).parent, ("small_app", "main_app"))


main_app = app_fixture(
    "main", scope="session", **{"transport.deadline_s": 4.0, "lifecycle.orphan_timeout_s": 300.0}
)
"""One prefill and two decode replicas; tests that harm it wait until it is whole again."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording") / "ticks.jsonl"


@pytest.fixture
def app(main_app: App) -> App:
    main_app.until_ready()
    main_app.until_idle(20.0)
    return main_app


small_app = app_fixture(
    "small",
    scope="session",
    **{
        "decode_replicas": 1,
        "decode.max_slots": 2,
        "decode.pace": "steady-15ms",
        "prefill.max_rows": 3,
        "prefill.max_queued_sequences": 4,
        "ingress.orphan_request_s": 8.0,
        "lifecycle.orphan_timeout_s": 20.0,
    },
)
"""One replica of each kind, two slots, short queues, slow steps: soon full."""


@pytest.fixture
def full(small_app: App) -> App:
    small_app.until_ready()
    small_app.until_idle(20.0)
    return small_app
