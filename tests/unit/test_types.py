"""What travels between processes arrives as it was meant, whatever their clocks say."""

from __future__ import annotations

import copy
import math
import pickle
import time
from dataclasses import replace

import pytest

from quadriga.checkpoint.exits import ExitCounters
from quadriga.control.replica_record import ReplicaLoad, ReplicaStatus
from quadriga.core import forecast, kv, migration, output, replica, request, routing
from quadriga.core.relative_time import RelativeTimeMixin
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.core.routing import AdmitRequest, ClusterView

STATE = SequenceState(
    "s",
    "r",
    "m",
    [1, 2],
    SamplingParams(max_tokens=3),
    "i",
    arrival_unix_s=990.0,
    deadline_unix_s=1005.0,
    priority=4,
    output_ids=[7],
    exit_layers=[8],
    claim="c",
)
INFO = ReplicaInfo("p", Role.PREFILL, DepthClass("m", 8), "n", "i", 4, 1000)
SNAPSHOT = ReplicaSnapshot(INFO, taken_unix_s=997.0, num_running=2, loaded_s=77.0)
REQUEST = AdmitRequest("s", "m", 2, 3, 4, deadline_unix_s=1005.0, needs_depth=8, visitor="v")


@pytest.mark.parametrize("skew_s", [-3600.0, -6.0, 0.0, 6.0, 3600.0])
@pytest.mark.parametrize("sent", [STATE, REQUEST], ids=["state", "request"])
def test_a_deadline_arrives_as_what_is_left_of_it(
    monkeypatch: pytest.MonkeyPatch, sent: SequenceState | AdmitRequest, skew_s: float
) -> None:
    """Five seconds are five where the clock is six ahead, and no more where it is behind."""
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    said = pickle.dumps(sent, 5)
    monkeypatch.setattr(time, "time", lambda: 1000.0 + skew_s)
    arrived = pickle.loads(said)
    assert arrived.deadline_unix_s == pytest.approx(1005.0 + skew_s)
    assert replace(arrived, deadline_unix_s=1005.0) == sent, "all else is as it was"
    assert sent.deadline_unix_s == 1005.0


def test_the_last_move_was_as_long_ago_on_every_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    said = [pickle.dumps(replace(STATE, moved_unix_s=moved), 5) for moved in (998.0, 0.0)]
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    moved, never = (pickle.loads(one).moved_unix_s for one in said)
    assert moved == pytest.approx(4998.0)
    assert never == 0.0


def test_no_deadline_stays_none() -> None:
    assert pickle.loads(pickle.dumps(replace(STATE, deadline_unix_s=math.inf))).deadline_unix_s == (
        math.inf
    )


def test_a_copy_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    twin = copy.deepcopy(STATE)
    assert twin == STATE
    twin.output_ids.append(9)
    assert STATE.output_ids == [7]


@pytest.mark.parametrize("skew_s", [-3600.0, -6.0, 0.0, 6.0, 3600.0])
def test_a_report_is_as_old_on_every_clock(monkeypatch: pytest.MonkeyPatch, skew_s: float) -> None:
    """From the replica to the scheduler, and on from there to an ingress on a third machine."""
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    said = pickle.dumps(SNAPSHOT, 5)
    monkeypatch.setattr(time, "time", lambda: 1000.0 + skew_s)
    here = pickle.loads(said)
    assert here.taken_unix_s == pytest.approx(997.0 + skew_s)
    assert replace(here, taken_unix_s=997.0) == SNAPSHOT, "all else is as it was"
    said = pickle.dumps(ClusterView(1000.0 + skew_s, [here]), 5)
    monkeypatch.setattr(time, "time", lambda: 500.0)
    view = pickle.loads(said)
    assert view.taken_unix_s == pytest.approx(500.0)
    assert view.taken_unix_s - view.snapshots[0].taken_unix_s == pytest.approx(3.0)


@pytest.mark.parametrize(
    "sent",
    [
        STATE.sampling,
        ReplicaStatus(INFO, True, False, None, ReplicaLoad(2, exits=ExitCounters({8: 3})), "f"),
        kv.TransferOffer("t", "s", INFO.depth_class, "p", 1, 3, 9, 10.0),
    ],
)
def test_a_record_arrives_as_it_was_and_its_fields_are_not_named(sent: object) -> None:
    said = pickle.dumps(sent, 5)
    assert pickle.loads(said) == sent
    assert b"num_" not in said


def test_all_with_an_instant_that_others_judge_are_known() -> None:
    """Who has one and is sent as it is would be late, or early, by the difference of two clocks."""
    modules = (forecast, kv, migration, output, replica, request, routing)
    found = (kind for module in modules for kind in vars(module).values())
    kinds = {kind for kind in found if hasattr(kind, "__dataclass_fields__")}
    judged = {"deadline_unix_s", "taken_unix_s", "moved_unix_s"}
    with_one = [(k, judged & set(k.__dataclass_fields__)) for k in kinds]
    assert sum(bool(names) for _, names in with_one) >= 4
    for kind, names in with_one:
        assert not names or (issubclass(kind, RelativeTimeMixin) and set(kind.INSTANTS) == names), (
            kind
        )
