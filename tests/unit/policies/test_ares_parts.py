"""Forecast rows, placement, drift, and recordings."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quadriga.core.forecast import LengthPrediction
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import PlaceRequest
from quadriga.errors import ConfigError
from quadriga.policies.ares.cluster import with_deep_passes
from quadriga.policies.ares.forecast import (
    NUM_COLUMNS,
    ROW_BYTES,
    SHARE,
    TOKENS_AHEAD,
    Promised,
    StepCosts,
    load_rows,
    memory_rows,
    promised_to,
    tokens_ahead,
    with_promised,
)
from quadriga.policies.ares.governor import DriftMonitor
from quadriga.policies.ares.placement import AresPlacement, best_replica
from quadriga.policies.ares.recording import (
    RecordedTick,
    Recording,
    read_ticks,
    replay,
    write_tick,
)
from quadriga.policies.ares.rescheduler import Rescheduler
from quadriga.policies.ares.settings import AresSettings, TransferCosts, horizon_s
from quadriga.policies.inflight_tracker import InflightTracker, SentRequest
from quadriga.policies.least_work import expected_length
from quadriga.policies.slot_reservation import WINDOW, AnswerLengths
from tests.unit.policies.ares_twin import CLASS, Held, random_cluster, snapshot, unpacked

COSTS = TransferCosts(57_344, 25e9 / 8)


def held(name: str, tokens: float, remaining: float) -> Held:
    return Held(name, tokens, remaining, remaining, remaining)


def request(tokens: int, prediction: LengthPrediction | None) -> PlaceRequest:
    return PlaceRequest("new", CLASS, tokens, tokens + 1, prediction=prediction)


def sure(remaining: float) -> LengthPrediction:
    return LengthPrediction(remaining, remaining, remaining)


def test_the_grid_spans_twenty_to_thirty_three_thousand_tokens() -> None:
    ahead = tokens_ahead(horizon_s(0.02), 0.02)
    assert ahead[0] == 0.0
    assert ahead[1] == pytest.approx(20.0)
    assert ahead[-1] == pytest.approx(33_400, rel=0.01)
    assert np.all(np.diff(ahead) > 0)
    slow = tokens_ahead(horizon_s(0.02), np.array([0.02, 0.04]))
    np.testing.assert_allclose(slow[1], slow[0] / 2)  # the same instants, half the tokens
    with pytest.raises(ConfigError, match="reference_step_s"):
        horizon_s(0.0)


def test_points_weigh_the_tokens_before_them_and_far_ones_less() -> None:
    """A replica's weighted load is its work: seconds of steps still to come."""
    tokens, remaining = np.array([100.0]), np.array([TOKENS_AHEAD[-1]])
    plain = AresSettings(decay=1.0).weights
    load = load_rows(tokens, remaining, StepCosts(2.0, 0.0))[0]
    assert load @ plain * TOKENS_AHEAD[-1] == pytest.approx(2.0 * TOKENS_AHEAD[-1])
    for decay in (0.5, 0.8):
        weights = AresSettings(decay=decay).weights
        assert weights.sum() == pytest.approx(1.0)
        assert weights[0] == 0.0
        ratio = weights[1:] / plain[1:]
        np.testing.assert_allclose(ratio[1:] / ratio[:-1], decay)


def test_load_grows_until_the_sequence_ends() -> None:
    ahead = np.array([[0.0, 10.0, 20.0, 40.0]])
    rows = load_rows(np.array([100.0, 100.0]), np.array([20.0, 0.0]), StepCosts(1.0, 0.1), ahead)
    assert rows.tolist() == [[11.0, 12.0, 13.0, 0.0], [11.0, 0.0, 0.0, 0.0]]


def test_a_sequence_whose_tokens_leave_early_weighs_less_in_load_and_as_much_in_memory() -> None:
    whole = [Held("x", 500.0, 300.0, 300.0, 300.0), Held("y", 700.0, 90.0, 90.0, 90.0)]
    halved = [replace(h, share=0.5) for h in whole]
    cluster = unpacked([snapshot("a", whole), snapshot("b", halved)])
    np.testing.assert_allclose(cluster.load_s[1], cluster.load_s[0] / 2, rtol=1e-6)
    np.testing.assert_allclose(cluster.row_load_s[2:], cluster.row_load_s[:2] / 2, rtol=1e-6)
    np.testing.assert_array_equal(cluster.tokens[0], cluster.tokens[1])
    roomier = best_replica(
        cluster, request(100, sure(50.0)), sure(50.0), np.array([True, True]), AresSettings()
    )
    assert roomier == 1, "placement sees that it has less to do"


@pytest.mark.parametrize("num_each", [1, 2, 5])
@pytest.mark.parametrize("stays", [0.0, 0.1, 0.6, 1.0])
def test_a_sequence_that_may_go_deep_weighs_what_it_adds_to_how_often_a_step_does(
    stays: float, num_each: int
) -> None:
    share, usual = 0.25 + 0.75 * stays, StepCosts(2e-5, 1e-7)
    costs = with_deep_passes(usual, 0.06, 0.25, num_each, num_each * share)
    added_s = 0.045 * ((1.0 - stays) ** num_each - (1.0 - stays) ** (num_each + 1))
    assert share * (costs.per_sequence_s - 2e-5) == pytest.approx(added_s, abs=1e-12)
    assert costs.per_token_s == 1e-7
    alone, fewer = (with_deep_passes(usual, 0.06, 0.25, n, n * share) for n in (1.0, 0.5))
    assert alone.per_sequence_s == pytest.approx(fewer.per_sequence_s), "there are no half ones"
    assert with_deep_passes(usual, 0.06, 0.25, num_each, 0.0) is usual


def test_with_exits_a_newcomer_goes_where_fewer_sequences_make_steps_go_deep() -> None:
    """A step reads the deep layers where any token goes on; KV weighs little against them."""
    for front_share, chosen in ((0.25, "b"), (1.0, "a")):
        a, b = (
            snapshot(name, [replace(h, share=0.3) for h in those], front_share=front_share)
            for name, those in (
                ("a", [held(f"a{i}", 300.0, 2000.0) for i in range(4)]),
                ("b", [held("b0", 3000.0, 2000.0)]),
            )
        )
        assert AresPlacement().choose(request(100, sure(1000.0)), [a, b]) == chosen
    mixed = unpacked([a, b, replace(a, forecast=replace(a.forecast, front_share=0.25))])
    assert mixed.costs is mixed.measured, "most replicas test no exit now"


def test_newcomers_are_taken_to_run_as_many_layers_as_those_there() -> None:
    snap = snapshot("a", [replace(held("x", 500.0, 300.0), share=0.25)])
    assert snap.forecast is not None
    both = with_promised(snap.forecast, [Promised("y", 500, sure(300.0))], 0.02)
    rows = np.frombuffer(both.rows, dtype="<f4").reshape(-1, NUM_COLUMNS)
    assert rows[:, SHARE].tolist() == [0.25, 0.25]
    np.testing.assert_allclose(
        np.frombuffer(both.context, "<f4"), 2 * np.frombuffer(snap.forecast.context, "<f4")
    )
    half = snap.info.depth_class.depth / 2
    known = [
        promised_to(snap, replace(request(500, sure(300.0)), expected_layers=layers), sure(300.0))
        for layers in (half, np.inf)
    ]
    known = [replace(sent, sequence_id=str(n)) for n, sent in enumerate(known)]
    all_of_them = with_promised(snap.forecast, known, 0.02)
    rows = np.frombuffer(all_of_them.rows, dtype="<f4").reshape(-1, NUM_COLUMNS)
    assert rows[:, SHARE].tolist() == [0.25, 0.5, 1.0], "but those of which it is known"
    np.testing.assert_allclose(
        np.frombuffer(all_of_them.context, "<f4"), 7 * np.frombuffer(snap.forecast.context, "<f4")
    )


def test_memory_sees_the_peak_between_two_points() -> None:
    ahead = np.array([[0.0, 10.0, 20.0, 40.0]])
    rows = memory_rows(np.array([100.0, 100.0]), np.array([25.0, 5.0]), ahead)
    assert rows.tolist() == [[100.0, 110.0, 120.0, 125.0], [100.0, 105.0, 0.0, 0.0]]


def test_a_packed_forecast_is_small_and_adds_up() -> None:
    snap = snapshot("a", [held("x", 500.0, 3000.0), held("y", 900.0, 100.0)])
    assert snap.forecast is not None
    assert len(snap.forecast.rows) == 2 * ROW_BYTES == 88
    cluster = unpacked([snap, snapshot("b", [])])
    np.testing.assert_allclose(cluster.load_s[0], cluster.row_load_s.sum(axis=0), rtol=1e-5)
    assert cluster.rows.shape == (2, NUM_COLUMNS)
    assert cluster.tokens[0, 0] == 1400.0
    assert cluster.tokens[0].max() < 500 + 3000 + 1
    assert not cluster.load_s[1].any()


def test_placement_prefers_whoever_will_be_free() -> None:
    """Replica a holds more now, b will: present and forecast disagree."""
    a = snapshot("a", [held(f"a{i}", 3000.0, 30.0) for i in range(5)])
    b = snapshot("b", [held(f"b{i}", 2500.0, 20_000.0) for i in range(4)], capacity=500_000)
    a.usual_tokens = b.usual_tokens = 256
    placement = AresPlacement()
    assert placement.choose(request(100, sure(10_000.0)), [a, b]) == "a"
    unknown = replace(request(100, None), max_total_tokens=10_000)
    assert placement.choose(unknown, [a, b]) == "a", "as long as answers usually are"
    placement.load_only = True
    assert placement.choose(request(100, sure(10_000.0)), [a, b]) == "b"


@pytest.mark.parametrize("max_tokens", [1, 10, 19, 20, 300])
def test_newcomers_are_spread_however_short_they_are(max_tokens: int) -> None:
    """They have ended before the first point ahead; what is there now counts for them."""
    tracker, placement, chosen = InflightTracker(), AresPlacement(), Counter[str | None]()
    snapshots = [snapshot(name, [], slots=32, capacity=10**6) for name in "abc"]
    for number in range(30):
        seen = [tracker.adjust(s, now_s=0.0) for s in snapshots]
        asked = PlaceRequest(f"s{number}", CLASS, 100, 100 + max_tokens)
        chosen[name := placement.choose(asked, seen)] += 1
        promised = Promised(asked.sequence_id, 100, expected_length(asked, seen))
        tracker.sent(str(name), asked.sequence_id, SentRequest(0.0, 0, 100, promised, 100))
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_a_newcomer_is_expected_to_become_as_long_as_most_do() -> None:
    """Those that run are the long ones: one story says nothing of twenty short answers."""
    lengths = AnswerLengths()
    for _ in range(WINDOW):
        lengths.ended(9)
        lengths.ended(600)
        lengths.ended(30)
    story = snapshot("a", [held("a0", 500.0, 20_000.0)])
    story.generated_tokens, story.usual_tokens = 490, lengths.usual_tokens
    asked = replace(request(10, None), max_total_tokens=700)
    assert expected_length(asked, [story]).mean == 30.0
    assert expected_length(request(10, None), [story]).mean == 1.0, "its max_tokens"


def test_placement_looks_at_the_memory_peak() -> None:
    a = snapshot("a", [held("a0", 1000.0, 8000.0)], capacity=11_000)
    b = snapshot("b", [held(f"b{i}", 3000.0, 8000.0) for i in range(3)], capacity=200_000)
    placement = AresPlacement()
    assert placement.choose(request(100, sure(100.0)), [a, b]) == "a"
    assert placement.choose(request(100, sure(9000.0)), [a, b]) == "b"
    wary = LengthPrediction(100.0, 10.0, 9000.0)
    assert placement.choose(request(100, wary), [a, b]) == "b"


def test_where_no_peak_fits_the_roomiest_takes_it() -> None:
    a = snapshot("a", [held("a0", 1000.0, 8000.0)], capacity=9_000)
    b = snapshot("b", [held("b0", 5000.0, 8000.0)], capacity=12_000)
    assert AresPlacement().choose(request(100, sure(9000.0)), [a, b]) == "a"


def test_placement_needs_room_now() -> None:
    full = snapshot("a", [held("a0", 100.0, 10.0)], slots=1)
    placement = AresPlacement()
    assert placement.choose(request(100, sure(10.0)), [full, snapshot("b", [])]) == "b"
    others = [full, snapshot("b", [], slots=0)]
    assert placement.choose(request(100, sure(10.0)), others) is None


def test_placement_is_the_one_that_raises_the_variance_least() -> None:
    rng = np.random.default_rng(4)
    settings = AresSettings()
    for _ in range(200):
        snapshots = [
            replace(s, draining=False, info=replace(s.info, kv_capacity_tokens=10**7, num_slots=99))
            for s in random_cluster(rng)
        ]
        cluster = unpacked(snapshots)
        wanted = request(int(rng.integers(10, 5000)), sure(float(rng.integers(1, 30_000))))
        assert wanted.prediction is not None
        x = load_rows(
            np.array([float(wanted.num_tokens)]), np.array([wanted.prediction.mean]), cluster.costs
        )[0]
        after = []
        for i in range(len(cluster)):
            load = cluster.load_s.copy()
            load[i] += x
            after.append(float(load.var(axis=0)[:-1] @ settings.weights[1:]))
        chosen = AresPlacement(settings).choose(wanted, snapshots)
        assert chosen is not None
        assert after[cluster.names.index(chosen)] == pytest.approx(min(after), rel=1e-9)


def test_drift_is_entered_and_left() -> None:
    monitor = DriftMonitor()
    for _ in range(200):
        monitor.ended(LengthPrediction(100.0, 50.0, 200.0), 120.0)
    assert not monitor.is_drifting
    for _ in range(200):
        monitor.ended(LengthPrediction(100.0, 50.0, 200.0), 1000.0)
    assert monitor.is_drifting
    assert monitor.mean_error > 500
    for _ in range(200):
        monitor.ended(LengthPrediction(100.0, 50.0, 200.0), 120.0)
    assert not monitor.is_drifting


def test_a_calibrated_head_is_not_taken_for_drift() -> None:
    """80 % inside the range, by chance: never below the mark in ten thousand endings."""
    rng = np.random.default_rng(0)
    monitor = DriftMonitor()
    for inside in rng.random(10_000) < 0.8:
        monitor.ended(LengthPrediction(100.0, 50.0, 200.0), 120.0 if inside else 1000.0)
        assert not monitor.is_drifting


def test_few_endings_prove_nothing() -> None:
    monitor = DriftMonitor()
    for _ in range(49):
        monitor.ended(LengthPrediction(1.0, 0.0, 2.0), 1000.0)
    assert not monitor.is_drifting


def recorded(path: Path, snapshots: list[ReplicaSnapshot]) -> None:
    orders = Rescheduler().tick(snapshots, COSTS)
    tick = RecordedTick(1.0, snapshots, AresSettings(), COSTS, True, False, frozenset(), orders)
    with path.open("a", encoding="utf-8") as stream:
        write_tick(stream, tick)


def test_a_recording_gives_the_same_decisions(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    path = tmp_path / "ticks.jsonl"
    for _ in range(30):
        recorded(path, random_cluster(rng))
    ticks = list(read_ticks(path))
    assert sum(len(t.orders) for t in ticks) > 3
    assert not replay(ticks)


def test_a_recording_shows_where_another_policy_decides_otherwise(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    path = tmp_path / "ticks.jsonl"
    for _ in range(30):
        recorded(path, random_cluster(rng))
    ticks = [replace(t, settings=replace(t.settings, theta=0.9)) for t in read_ticks(path)]
    differences = replay(ticks)
    assert differences
    assert all(d.recorded != d.replayed for d in differences)


def test_half_a_last_line_is_read_as_none_and_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    recorded(path, random_cluster(np.random.default_rng(0)))
    with path.open("a") as stream:
        stream.write('{"version": 3, "at_')
    [tick] = read_ticks(path)
    Recording(path, max_bytes=10**9).add(tick)
    assert list(read_ticks(path)) == [tick, tick]


@pytest.mark.parametrize("text", ["", "{}", '{"version": 99}', "not json", "[1]"])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ticks.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        list(read_ticks(path))
    recorded(tmp_path / "own.jsonl", random_cluster(np.random.default_rng(0)))
    Recording(path, max_bytes=10**9).add(next(read_ticks(tmp_path / "own.jsonl")))
    assert path.read_text() == text + "\n", "nobody could read what is behind it"


def test_a_recording_with_a_malformed_forecast_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    recorded(path, random_cluster(np.random.default_rng(0)))
    path.write_text(path.read_text().replace('"front_share": 1.0', '"front_share": 2.0'))
    with pytest.raises(ConfigError, match=r"line 1: .*front_share"):
        list(read_ticks(path))


def test_ticks_are_one_line_each() -> None:
    stream = io.StringIO()
    tick = RecordedTick(
        0.0, [snapshot("a", [])], AresSettings(), COSTS, True, False, frozenset({"b"}), []
    )
    write_tick(stream, tick)
    write_tick(stream, tick)
    assert stream.getvalue().count("\n") == 2
