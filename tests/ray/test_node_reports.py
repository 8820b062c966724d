"""What placement asks of Ray beside the groups themselves."""

from __future__ import annotations

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from actors.node_reports import have_nodes_report, living_nodes

TIMEOUT_S = 60.0


def test_all_nodes_report_what_they_have_free(ray_cluster: None) -> None:
    """A full one, too: nobody waits for room there."""
    (node,) = ray.nodes()
    assert living_nodes() == {node["NodeID"]}
    assert have_nodes_report(TIMEOUT_S) == [node["NodeManagerAddress"]]
    free = ray.available_resources().get("CPU", 0.0)
    group = placement_group([{"CPU": max(free, 0.001)}])
    try:
        assert group.wait(TIMEOUT_S)
        assert ray.available_resources().get("CPU", 0.0) < 0.001
        assert have_nodes_report(TIMEOUT_S) == [node["NodeManagerAddress"]]
    finally:
        remove_placement_group(group)


def test_a_report_that_does_not_come_is_not_waited_for(ray_cluster: None) -> None:
    assert have_nodes_report(0.0) == []
