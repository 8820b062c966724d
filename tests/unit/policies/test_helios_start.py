"""From configuration to a machine."""

from __future__ import annotations

import pytest

from quadriga.config.scheduling import HeliosConfig
from quadriga.core.replica import DepthClass, Role
from quadriga.errors import ConfigError
from quadriga.policies.helios.candidates import start_helios
from quadriga.policies.helios.messages import ChosenDevice, ControllerTick, ReplicaReport


def test_the_defaults_serve_the_bundled_family() -> None:
    started = start_helios(HeliosConfig(), ChosenDevice(1 << 30), context_tokens=2048)
    assert [m.id for m in started.picked.candidates] == ["quadriga-s", "quadriga-l"]
    assert started.picked.refusals == ()
    start = DepthClass("quadriga-s", 8)
    replicas = {
        "decode-0": ReplicaReport(Role.DECODE, start),
        "scout-0": ReplicaReport(Role.DECODE, start),
    }
    started.machine.handle(ControllerTick(replicas, frozenset({"scout-0"})), 0.0)
    assert started.machine.routing.profile == start
    assert started.machine.routing.serve == (start,)


def test_the_objective_ranks_by_the_measured_record() -> None:
    started = start_helios(HeliosConfig(slo="accuracy"), ChosenDevice(), context_tokens=100)
    full = [m.record(m.num_layers) for m in started.catalogue.models]
    best = max((r for r in full if r is not None), key=lambda r: r.accuracy or 0.0)
    assert started.picked.candidates[0].record(best.depth) is best


def test_a_bad_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="nobody"):
        start_helios(HeliosConfig(models=("nobody",)), ChosenDevice(), context_tokens=100)
    with pytest.raises(ConfigError, match="exceed the device's"):
        start_helios(HeliosConfig(), ChosenDevice(1 << 20), context_tokens=100)
    with pytest.raises(ConfigError, match="2048 positions, 4096 are wanted"):
        start_helios(HeliosConfig(), ChosenDevice(), context_tokens=4096)
