"""Without any ingress an application ends itself and leaves nothing."""

from __future__ import annotations

import pytest
import ray

from actors.rpc.lookup import controller_name, get_actor
from tests.ray.apps import App, living_groups, pids
from tests.waiting import wait_until


@pytest.mark.parametrize("with_controller", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nothing_is_left_when_no_ingress_is_heard_of(
    ray_cluster: None, with_controller: bool
) -> None:
    """Deleting the application leaks no process and no reservation, even without a controller."""
    app = App.start(
        f"orphan-{'a' if with_controller else 'b'}",
        **{"decode_replicas": 1, "lifecycle.orphan_timeout_s": 4.0},
    )
    assert len(pids(app.name)) == 4
    if not with_controller:
        # Nobody restarts it: the replicas and the scheduler are on their own.
        ray.kill(get_actor(controller_name(app.name)), no_restart=True)
    wait_until(lambda: not pids(app.name), 30.0, lambda: pids(app.name))
    wait_until(lambda: not living_groups(app.name), 30.0, lambda: living_groups(app.name))
