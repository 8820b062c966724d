"""What placement asks of Ray beside the groups themselves."""

from __future__ import annotations

import time

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.controller.node_reports import have_nodes_report, living_nodes

TIMEOUT_S = 60.0


def test_all_nodes_report_what_they_have_free(ray_cluster: None) -> None:
    """A full one, too: nobody waits for room there."""
    (node,) = ray.nodes()
    assert living_nodes() == {node["NodeID"]}
    assert have_nodes_report(TIMEOUT_S) == [node["NodeManagerAddress"]]
    group = take_all()
    try:
        assert have_nodes_report(TIMEOUT_S) == [node["NodeManagerAddress"]]
    finally:
        remove_placement_group(group)


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def take_all() -> PlacementGroup:
    """Reserve all CPUs that are free: again where those of an earlier test came free only then."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while True:
        group = placement_group([{"CPU": max(free_cpus(), 0.001)}])
        look_until_s = time.monotonic() + 5.0
        while time.monotonic() < look_until_s:
            if group.wait(1.0) and free_cpus() < 0.001:
                return group
        remove_placement_group(group)
        assert time.monotonic() < give_up_s, f"{free_cpus()} CPUs stay free"


def test_a_report_that_does_not_come_is_not_waited_for(ray_cluster: None) -> None:
    """As all of the resource that is the node itself is taken, its task waits."""
    (node,) = ray.nodes()
    group = placement_group([{f"node:{node['NodeManagerAddress']}": 1.0}])
    try:
        assert group.wait(TIMEOUT_S)
        assert have_nodes_report(0.5) == []
    finally:
        remove_placement_group(group)
