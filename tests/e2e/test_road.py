"""What one request executes in a running service, and what lives as long as it, do not grow."""

from __future__ import annotations

import sys

import pytest

from serve_app.http.haproxy import is_available
from tests.architecture.bounds import BOUNDS
from tests.architecture.report import traced_figures
from tests.architecture.road import Road, measure
from tests.architecture.tree import Tree

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Road:
    return measure(tmp_path_factory.mktemp("road"))


def test_the_road_of_a_request_is_within_its_bounds(road: Road) -> None:
    figures = traced_figures(Tree(), road)
    assert figures["road_files"] <= BOUNDS["road_files"].now, road.files
    assert figures["road_lines"] <= BOUNDS["road_lines"].now, road.files
    assert figures["service_lines"] <= BOUNDS["service_lines"].now


def test_the_road_leads_through_every_process(road: Road) -> None:
    """An ingress, the scheduler, a prefill and a decode replica; without HAProxy, Serve's proxy."""
    assert road.num_processes >= 4 + (not is_available())


def test_the_classes_that_live_as_long_as_a_request_are_within_their_bound(road: Road) -> None:
    assert road.classes, "streams were served without any state"
    assert len(road.classes) <= BOUNDS["request_classes"].now, road.classes
    assert not road.retained
