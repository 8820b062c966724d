"""Simulated loads, the commands over them, and the figures of `paper ares`."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from rich.console import Console

from loadgen.__main__ import main
from loadgen.bench.profile import fit
from loadgen.bench.scheduler import random_snapshots
from loadgen.load.lengths import ALPACA, SHAREGPT
from loadgen.load.traces import read_trace
from loadgen.paper.ares import experiment as ares
from loadgen.paper.ares import points as ares_points
from loadgen.paper.ares import report as ares_report
from loadgen.simulation import report as sim_report
from loadgen.simulation.capacity import (
    MAX_DOUBLINGS,
    PRECISION,
    Probe,
    SimCapacity,
    find_capacity,
    is_hopeless,
)
from loadgen.simulation.loads import make_simulation, summary_of, synthetic_load, trace_load
from quadriga.errors import ConfigError
from quadriga.policies.ares.cluster import classify, unpack, weights
from quadriga.policies.ares.recording import read_ticks, replay
from quadriga.policies.ares.rescheduler import Rescheduler
from quadriga.policies.ares.settings import AresSettings, TransferCosts
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import SimConfig
from quadriga.sim.profiles import RTX_4090D, find_profile
from quadriga.sim.results import Slo


def last_line(text: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return line


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv.gz"
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(2.0, 60)) - 0.5
    rows = [f"{t:.3f},{rng.integers(5, 900)},{rng.integers(1, 3000)}" for t in np.maximum(times, 0)]
    with gzip.open(path, "wt") as stream:
        stream.write("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    ("workload", "published"),
    [
        (
            SHAREGPT,
            {"input": (305, 1053, 36, 920, 1609), "output": (7542, 12008, 1536, 32670, 32679)},
        ),
        (ALPACA, {"input": (11, 4, 10, 15, 18), "output": (8596, 13354, 987, 32690, 32691)}),
    ],
)
def test_made_up_lengths_have_the_published_figures(workload: Any, published: Any) -> None:
    inputs, outputs = workload.draw(200_000, seed=1)
    for drawn, wanted in ((inputs, published["input"]), (outputs, published["output"])):
        mean, std, p50, p90, p95 = wanted
        assert drawn.mean() == pytest.approx(mean, rel=0.03)
        assert drawn.std() == pytest.approx(std, rel=0.05)
        for percent, value in ((50, p50), (90, p90), (95, p95)):
            assert np.percentile(drawn, percent) == pytest.approx(value, rel=0.03)
        assert drawn.min() >= 1


def test_a_trace_is_scaled_and_needs_open_arrivals(trace: Path) -> None:
    read = read_trace(trace)
    once = trace_load(read, arrivals="trace", scale=1.0, seed=0)
    twice = trace_load(read, arrivals="trace", scale=2.0, seed=0)
    np.testing.assert_allclose(2 * twice.arrivals_s, once.arrivals_s)
    assert twice.rate == pytest.approx(2 * once.rate)
    with pytest.raises(ConfigError, match="open loops"):
        trace_load(read, arrivals="closed:8", scale=1.0, seed=0)


def test_simulate_a_trace(trace: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    words = ["simulate", "--trace", str(trace), "--policy", "oracle", "--decode", "2"]
    words += ["--prefill", "1", "--profile", "cpu", "--scale", "3", "--seed", "1"]
    words += ["--fail", "20:1:5", "--out", str(out), "--record", str(tmp_path / "r.jsonl")]
    assert main(words) == 0
    line = last_line(capsys.readouterr().out)
    assert line["experiment"] == "simulate"
    assert set(line["headline"]) == {
        "wall_s",
        "goodput",
        "makespan_goodput",
        "good_share",
        "p99_tpot_s",
        "lowered_tokens",
    }
    assert line["summary"]["failures"] == {}
    assert line["commit"]
    [path] = out.glob("mine-oracle-2d-x3-s1-*.json")
    raw = json.loads(path.read_text())
    assert raw["ended"] == "complete"
    assert raw["config"] == line["config"]
    assert raw["summary"] == line["summary"]
    assert len(raw["finished_s"]) == 60
    assert None not in raw["finished_s"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    ticks = list(read_ticks(tmp_path / "r.jsonl"))
    assert ticks
    assert not replay(ticks)


def test_simulate_made_up_lengths_twice_the_same(tmp_path: Path, capsys: Any) -> None:
    words = ["simulate", "--lengths", "alpaca", "--duration-s", "200", "--arrivals", "poisson:0.1"]
    words += ["--out", str(tmp_path), "--no-plots", "--stop-and-copy", "--on-full", "pause"]
    lines = []
    for _ in range(2):
        assert main(words) == 0
        lines.append(last_line(capsys.readouterr().out)["summary"])
    assert lines[0] == lines[1]
    assert lines[0]["num_requests"] == 20
    assert len(list(tmp_path.iterdir())) == 1


def test_runs_with_other_options_do_not_overwrite_each_other(
    trace: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    words = ["simulate", "--trace", str(trace), "--no-plots", "--out", str(out)]
    options: list[list[str]] = [
        [],
        ["--scale", "2"],
        ["--seed", "1"],
        ["--limit", "30"],
        ["--prefill", "2"],
        ["--profile", "a100-7b"],
        ["--on-full", "recompute"],
        ["--slo-ttft-s", "1"],
        ["--arrivals", "poisson:1"],
        ["--warm-up-s", "5"],
        ["--fail", "5:0:1"],
        ["--bandwidth-gbit", "1"],
        ["--report-every-s", "1"],
        ["--stop-and-copy"],
        ["--policy", "reschedule"],
        ["--decode", "2"],
    ]
    for number, more in enumerate(options, 1):
        assert main([*words, *more]) == 0
        assert len(list(out.iterdir())) == number, more
    same_name = tmp_path / "other" / trace.name
    same_name.parent.mkdir()
    same_name.write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n1,5,5\n")
    assert main([*words[:2], str(same_name), *words[3:]]) == 0
    assert len(list(out.iterdir())) == len(options) + 1


def test_several_policies_stand_side_by_side(trace: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["simulate", "--trace", str(trace), "--no-plots", "--out", str(tmp_path / "out")]
    assert main([*words, "--policy", "current_load", "oracle"]) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [line["config"]["policy"] for line in lines] == ["current_load", "oracle"]
    assert "nan" not in printed
    rows = [line.split("│") for line in printed.splitlines() if "│" in line]
    assert all(len(row) == 5 for row in rows)


def test_one_row_has_no_rate_while_requests_arrive(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "one.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n7,100,50\n\n")
    assert main(["simulate", "--trace", str(path), "--out", str(tmp_path), "--no-plots"]) == 0
    printed = capsys.readouterr().out
    assert "1 requests at once" in printed
    assert "nan" not in printed
    line = last_line(printed)
    assert line["config"]["rate"] is None
    assert line["headline"]["goodput"] is None
    assert 0.1 < line["headline"]["makespan_goodput"] < 10


def test_failures_are_told_with_their_reasons(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "long.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,100,50\n1,300000,5\n2,400000,5\n")
    assert main(["simulate", "--trace", str(path), "--out", str(tmp_path), "--no-plots"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 3" in printed
    assert "failed, context_length_exceeded: prompt plus max_tokens is 332768 tokens" in printed
    assert last_line(printed)["summary"]["failures"] == {"context_length_exceeded": 2}


def test_a_fault_of_the_simulator_loses_neither_this_run_nor_the_others(
    trace: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Simulation._reschedule

    def fails(self: Simulation, now_s: float) -> None:
        if now_s > 60.0:
            raise KeyError("a fault")
        whole(self, now_s)

    monkeypatch.setattr(Simulation, "_reschedule", fails)
    words = ["simulate", "--trace", str(trace), "--no-plots", "--out", str(tmp_path / "out")]
    assert main([*words, "--policy", "current_load", "ares", "round_robin"]) == 1
    printed = capsys.readouterr()
    assert "ares: the run was broken off; what it had is in" in printed.err
    assert "KeyError: 'a fault'" in printed.err
    ended = {
        path.name: json.loads(path.read_text()) for path in sorted((tmp_path / "out").iterdir())
    }
    by_policy = {raw["config"]["policy"]: (name, raw) for name, raw in ended.items()}
    assert by_policy.keys() == {"current_load", "ares", "round_robin"}
    name, raw = by_policy["ares"]
    assert name.endswith(".partial.json")
    assert raw["ended"] == "KeyError: 'a fault'"
    assert 0 < sum(at is not None for at in raw["finished_s"]) < 60
    for policy in ("current_load", "round_robin"):
        assert by_policy[policy][1]["ended"] == "complete"


def test_an_interrupted_run_is_kept_as_far_as_it_came(
    trace: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupts(self: Simulation, now_s: float) -> None:
        if now_s > 60.0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "_reschedule", interrupts)
    words = ["simulate", "--trace", str(trace), "--no-plots", "--out", str(tmp_path / "out")]
    assert main([*words, "--policy", "current_load", "ares"]) == 130
    [path] = (tmp_path / "out").glob("*.partial.json")
    assert json.loads(path.read_text())["ended"] == "interrupted"
    told = last_line(capsys.readouterr().out)["config"]["policy"]
    assert told == "current_load", "the run that was over is told"
    monkeypatch.undo()
    assert main(words) == 0 and not path.exists(), "the same run, made again as a whole"


def test_what_a_search_found_is_told_though_the_next_one_is_broken_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    found = SimCapacity(Probe(1.0, 2.0, 1.0, is_kept=True), None, ())
    monkeypatch.setattr(
        "loadgen.simulate.find_capacity", Mock(side_effect=[found, KeyboardInterrupt])
    )
    words = ["simulate", "--lengths", "alpaca", "--policy", "ares", "oracle", "--out"]
    assert main([*words, str(tmp_path), "--find-capacity"]) == 130
    assert last_line(capsys.readouterr().out)["headline"]["largest_rate"] == 2.0


def test_the_largest_rate_that_keeps_the_slo_is_found(tmp_path: Path, capsys: Any) -> None:
    words = ["simulate", "--lengths", "alpaca", "--duration-s", "300", "--arrivals", "poisson:1"]
    words += ["--profile", "cpu", "--slo-ttft-s", "2", "--out", str(tmp_path), "--find-capacity"]
    assert main([*words, "0.9"]) == 0
    printed = capsys.readouterr().out
    line = last_line(printed)
    found = line["capacity"]
    kept, broken = found["kept"], found["broken"]
    assert kept["good_share"] >= 0.9
    assert 1.0 < broken["factor"] / kept["factor"] <= PRECISION
    assert line["headline"] == {
        "largest_rate": kept["rate"],
        "next_rate": broken["rate"],
        "good_share": 0.9,
    }
    assert "ares: 90 % of the requests are good up to" in printed
    [path] = tmp_path.glob("*.capacity.json")
    assert json.loads(path.read_text())["probes"] == found["probes"]
    assert main([*words, "0.8", "--slo-ttft-s", "1e-9"]) == 0
    assert len(list(tmp_path.glob("*.capacity.json"))) == 2, "another question, another file"


@pytest.mark.parametrize(
    ("words", "rate", "least"),
    [
        (["--trace", "week.csv"], 2 / 604_800, 2.0**-10),
        (["--lengths", "alpaca", "--arrivals", "poisson:0.05"], 0.05, 2.0**-3),
    ],
)
def test_the_search_ends_where_a_slower_load_cannot_be_simulated(
    words: list[str], rate: float, least: float, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("week.csv").write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n604800,5,5\n")
    assert main(["simulate", *words, "--slo-ttft-s", "1e-9", "--find-capacity"]) == 0
    printed = capsys.readouterr().out
    assert "to be simulated" in printed and "nan" not in printed
    probes = last_line(printed)["capacity"]["probes"]
    rates = [pytest.approx(rate * probe["factor"], rel=1e-5) for probe in probes]
    assert [probe["rate"] for probe in probes] == rates
    assert probes[-1]["factor"] == pytest.approx(least, rel=1e-5)


def probes_at(limit: float, most: float = math.inf) -> tuple[list[float], SimCapacity]:
    """Search for a limit that is known."""
    looked: list[float] = []

    def probe(factor: float) -> Probe:
        looked.append(factor)
        return Probe(factor, 3.0 * factor, None, factor <= limit)

    return looked, find_capacity(probe, most=most)


@pytest.mark.parametrize("limit", [0.001, 0.3, 0.99, 1.0, 1.5, 40.0])
def test_the_search_closes_in_on_the_limit(limit: float) -> None:
    looked, found = probes_at(limit)
    assert found.kept is not None and found.broken is not None
    assert found.kept.factor <= limit < found.broken.factor <= PRECISION * found.kept.factor
    assert len(looked) == len(set(looked)) <= 18
    assert [probe.factor for probe in found.probes] == looked


def test_the_search_ends_where_there_is_no_limit_to_find() -> None:
    looked, found = probes_at(0.0)
    assert found.kept is None and found.broken is not None and len(looked) == 1 + MAX_DOUBLINGS
    looked, found = probes_at(math.inf)
    assert found.broken is None and found.kept is not None and len(looked) == 1 + MAX_DOUBLINGS
    assert "even at" in sim_report.conclusion("ares", probes_at(0.0)[1], 0.99)
    assert "as far as was tried" in sim_report.conclusion("ares", found, 0.99)
    looked, found = probes_at(math.inf, most=5.0)
    assert looked == [1.0, 2.0, 4.0]
    assert "as far as can be simulated" in sim_report.conclusion("ares", found, 0.99)


def test_a_run_that_cannot_reach_the_share_any_more_is_ended_early(trace: Path) -> None:
    load = trace_load(read_trace(trace), arrivals="trace", scale=1e4, seed=0)
    config = SimConfig(find_profile("cpu"), num_decode=1, num_prefill=1)
    slo = Slo(1.0, 0.05)
    stop = is_hopeless(load, slo, 0.9, from_s=0.0)
    cut = make_simulation("current_load", load, config, stop=stop).run()
    whole = make_simulation("current_load", load, config).run()
    assert cut.end_s < 0.2 * whole.end_s
    assert summary_of(whole, load, slo).good_share < 0.9
    easy = is_hopeless(load, Slo(1e6, 1e6), 1.0, from_s=0.0)
    assert make_simulation("current_load", load, config, stop=easy).run().end_s == whole.end_s


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lengths", "alpaca", "--arrivals", "closed:3"], "poisson"),
        (["--lengths", "alpaca", "--arrivals", "poisson:x"], "'x' in 'poisson:x' must be above 0"),
        (["--trace", "no-such-file.csv"], "cannot be read"),
        (["--lengths", "alpaca", "--limit", "5"], "--limit: not for --lengths, but for --trace"),
        (["--trace", "TRACE", "--duration-s", "5"], "--duration-s: not for --trace, but for --l"),
        (["--trace", "TRACE", "--warm-up-s", "1e6"], "--warm-up-s: 1e+06 leaves no request"),
        (["--trace", "TRACE", "--scale", "1e-8"], "at most 1e+09 s are simulated"),
        (["--lengths", "alpaca", "--duration-s", "1e9", "--scale", "9"], "requests; at most"),
        (["--lengths", "alpaca", "--policy", "current_load", "--record", "x"], "moves nothing"),
        (["--lengths", "alpaca", "--policy", "ares", "oracle", "--record", "x"], "of one run"),
        (["--trace", "TRACE", "--arrivals", "at-once", "--find-capacity"], "arrive at once"),
        (["--trace", "TRACE", "--stays", "0.07"], "--stays: goes with --front"),
        (["--trace", "TRACE", "--full-depth-share", "1"], "--full-depth-share: goes with --front"),
        (["--trace", "TRACE", "--quality-budget", "1"], "--quality-budget: goes with --front"),
        (["--trace", "TRACE", "--strict-share", "1"], "--strict-share: goes with --depths"),
        (["--trace", "TRACE", "--depths", "2", "4", "4", "--record", "x"], "not with --depths"),
        (
            ["--trace", "TRACE", "--front", ".5", "--quality-budget", ".1", "--on-full", "vllm"],
            "quality_budget: not where a full memory does not pause sequences, but vllm",
        ),
    ],
)
def test_simulate_refuses(
    words: list[str], says: str, trace: Path, tmp_path: Path, capsys: Any
) -> None:
    words = [str(trace) if word == "TRACE" else word for word in words]
    assert main(["simulate", *words, "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_failures_are_parsed(capsys: Any) -> None:
    for text in ("5", "a:b:c", "-1:0:5", "1:0:0", "1:0:inf", "1:0:1e300", "1e300:0:1"):
        with pytest.raises(SystemExit):
            main(["simulate", "--lengths", "alpaca", "--fail", text])
    assert "AT_S:REPLICA:DOWN_S" in capsys.readouterr().err
    assert main(["simulate", "--lengths", "alpaca", "--fail", "1:9:5"]) == 2


def test_the_scheduler_is_timed_on_overloaded_clusters(capsys: Any) -> None:
    for n in (8, 100):
        cluster = unpack(random_snapshots(np.random.default_rng(n), n, 64))
        assert cluster is not None
        settings = AresSettings()
        roles = classify(cluster, settings, weights(settings, load_only=False), frozenset())
        assert len(roles.sources) >= 0.3 * n
        assert len(cluster.rows) == 64 * n
    words = ["bench", "scheduler", "--replicas", "8", "16", "--repeats", "2", "--clusters", "1"]
    assert main(words) == 0
    line = last_line(capsys.readouterr().out)
    assert line["headline"] == {"ms_256": None, "ms_1024": None}
    assert [s["num_moves"] for s in line["sizes"]] == [1.0, 1.0]
    costs = TransferCosts(57_344, 1e9)
    assert Rescheduler().tick(random_snapshots(np.random.default_rng(0), 8, 64), costs)


def test_a_fit_finds_what_was_put_in_and_nothing_negative() -> None:
    terms = np.array([(1.0, b, n) for b in (2, 4, 8, 32) for n in (100, 1000, 9000)])
    found = fit(terms, terms @ np.array([4e-3, 2e-4, 3e-7]))
    np.testing.assert_allclose(found.coefficients, (4e-3, 2e-4, 3e-7), rtol=1e-3)
    falling = fit(terms, 1e-2 - 1e-5 * terms[:, 1])
    assert min(falling.coefficients) >= 0.0


@pytest.fixture(scope="module")
def outcomes() -> list[ares_points.PointResult]:
    """Short runs of two rates under three policies, with the standard SLO and one more."""
    config = SimConfig(replace(RTX_4090D, kv_capacity_tokens=60_000), num_decode=3, num_prefill=1)
    grid = (ares_points.Slo(5.0, 1.1 * config.profile.half_memory_step_s),)
    points = [
        ares_points.SimPoint(
            "sharegpt", rate, "sharegpt", rate, policy, config, 400.0, 50.0, grid=grid
        )
        for rate in (0.1, 0.3)
        for policy in ("current_load", "ares", "oracle")
    ]
    return [ares_points.run_point(point) for point in points]


def test_a_point_that_fails_leaves_the_others_results(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the same call that ended before it: each is written as it ends."""
    good = tmp_path / "good.csv"
    rows = "".join(f"{i},{50 + i},{200 + i}\n" for i in range(40))
    good.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    bad = tmp_path / "bad.csv"
    bad.write_text("arrival_s,input_tokens,output_tokens\n5,10,10\n5,10,10\n")
    words = ["paper", "ares", "--part", "traces", "--duration-s", "30", "--warm-up-s", "0"]
    words += ["--workers", "1", "--policy", "current_load", "oracle", "--out", str(tmp_path)]
    assert main([*words, "--seeds", "2", "--trace", str(good), str(bad)]) == 1
    printed = capsys.readouterr()
    line = last_line(printed.out)
    assert (line["points"], line["failed_points"], line["left_out"]) == (8, 8, [])
    assert "bad" in printed.err and "all rows arrive at once" in printed.err
    assert "nan" not in printed.out
    lines = [json.loads(text) for text in (tmp_path / "ares.jsonl").read_text().splitlines()]
    assert sum("fault" in one for one in lines) == 8 and len(lines) == 16
    assert {one["seed"] for one in lines} == {0, 1}


def test_what_was_left_out_is_said(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ares, "_run_all", lambda *_: ([], []))
    assert main(["paper", "ares", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert last_line(printed.out)["left_out"] == ["traces"] and "left out: traces" in printed.err
    words = ["paper", "ares", "--quick", "--policy", "current_load", "--out", str(tmp_path)]
    assert main(words) == 0
    assert last_line(capsys.readouterr().out)["left_out"] == ["bandwidth", "settings", "traces"]
    (tmp_path / "ares.jsonl").write_text("of the last whole run")
    monkeypatch.setattr(ares, "_run_all", Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 130
    assert (tmp_path / "ares.jsonl").read_text() == "of the last whole run"


def test_lengths_without_arrivals_end_with_the_duration_as_traces_do(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "20,30\n" * 500)
    words = ["--part", "traces", "--trace", str(path), "--duration-s", "30", "--warm-up-s", "0"]
    point = replace(points_of(*words)[0], rate=1.0)
    load = ares_points._load(point)
    assert 10 < len(load) < 60 and load.arrivals_s[-1] <= 30.0


def test_as_many_loads_are_run_as_asked_for_whatever_the_size() -> None:
    points = points_of("--part", "sizes", "overload", "--seeds", "2", "--policy", "ares")
    runs = {(p.part, p.x, p.config.seed) for p in points}
    assert runs == {(part, x, seed) for part, x, _ in runs for seed in (0, 1)}


def test_a_point_without_a_request_to_count_has_none_of_the_figures(
    outcomes: list[ares_points.PointResult],
) -> None:
    with pytest.raises(ConfigError, match="no request arrives between"):
        ares_points.run_point(replace(outcomes[0].point, warm_up_s=399.99))
    found = ares_report.headline([made(outcomes[0], "overload", 3, "least_work", wait_s=9.0)])
    assert found["overload_longest_wait_s"] is None, "ARES was not run"


def test_the_headline_has_its_keys(outcomes: list[ares_points.PointResult]) -> None:
    headline = ares_report.headline(outcomes)
    assert headline["light_load_rate"] == headline["oom_rate"] == 0.1
    assert None not in (headline["oom_ares"], headline["p99_tpot_reduction"])
    assert headline["variance_vs_oracle"] > 0.0 < headline["light_load_ratio"]
    assert headline["best_goodput_ratio"] >= headline["goodput_ratio"]
    assert ares_report.headline([o for o in outcomes if o.point.policy != "ares"]) == {}


def test_tables_and_plots_are_made(outcomes: list[ares_points.PointResult], tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    ares_report.print_tables(outcomes, console)
    text = console.export_text()
    assert "current_load" in text
    assert "h800-7b" in text
    ares_report.print_tables([o for o in outcomes if o.point.policy != "oracle"], console)
    assert "nan" not in console.export_text()
    ares_report.write_plots(outcomes, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ares-sharegpt.png", "ares-variance.png"}


def test_a_point_that_failed_hides_no_other_ones_figures(
    outcomes: list[ares_points.PointResult], tmp_path: Path
) -> None:
    """ARES lacks one rate, of two, and one point of `below`."""
    one = outcomes[0]
    found = [o for o in outcomes if (o.point.x, o.point.policy) != (0.1, "ares")]
    found += [made(one, "below, 3", x, "least_work") for x in (0.5, 0.8)]
    found += [made(one, "below, 3", 0.8, "ares", good=0.75)]
    headline = ares_report.headline(found)
    assert headline["best_goodput_ratio_rate"] == headline["best_p99_tpot_reduction_rate"] == 0.3
    assert headline["best_goodput_ratio"] is not None
    assert headline["below_ratio"] == 0.75
    ares_report.write_plots(found, tmp_path)
    assert (tmp_path / "ares-variance.png").exists()


def test_transfers_weigh_more_on_faster_devices_and_slower_links() -> None:
    """ARES Figure 11: 95.5 % of the token's time on an H800 at 10 Gbit/s, without pre-copy."""
    share = ares_report.transfer_share
    assert share("h800-7b", 10.0, precopy=False) > share("a100-7b", 10.0, precopy=False) > 0.7
    assert share("h800-7b", 10.0, precopy=False) > share("h800-7b", 100.0, precopy=False)
    assert share("h800-7b", 10.0, precopy=True) < 0.5


def points_of(*words: str) -> list[ares_points.SimPoint]:
    """The points of every part under the command's words."""
    parser = argparse.ArgumentParser()
    ares.add_arguments(parser)
    args = parser.parse_args(list(words))
    return [p for part in args.part for p in ares_points.POINTS[part](args)]


def test_quick_compares_the_same_policies_sizes_loads_and_caches_in_shorter_runs() -> None:
    def compared(points: list[ares_points.SimPoint]) -> set[ares_points.SimPoint]:
        return {replace(p, duration_s=0.0, config=replace(p.config, seed=0)) for p in points}

    full, quick = points_of(), points_of("--quick")
    assert compared(full) == compared(quick)
    assert len(quick) == len(compared(quick)), "one run of each"
    assert sum(p.duration_s for p in quick) < 0.3 * sum(p.duration_s for p in full)
    parts = {p.part.split(",")[0] for p in quick}
    assert parts | {"rates", "hardware", "traces"} == {"sharegpt", "alpaca", *ares_points.PARTS}


def test_all_policies_of_a_point_are_run_for_equally_long() -> None:
    for points in (points_of(), points_of("--quick")):
        runs: dict[tuple[str, float | str, int], set[tuple[float, float, int]]] = {}
        for p in points:
            key = (p.part, p.x, p.config.num_decode)
            runs.setdefault(key, set()).add((p.duration_s, p.warm_up_s, p.config.num_decode))
        assert {len(found) for found in runs.values()} == {1}
        assert {p.config.num_decode for p in points if p.part == "overload"} == {3, 12, 64}


def made(
    one: ares_points.PointResult,
    part: str,
    x: float,
    policy: str,
    *,
    good: float = 1.0,
    good_per_s: float = 0.1,
    p99_s: float = 0.02,
    wait_s: float = math.nan,
) -> ares_points.PointResult:
    """A result of another point with these figures."""
    summary = replace(
        one.summary,
        good_share=good,
        num_requests=200,
        room_wait=replace(one.summary.room_wait, max_s=wait_s),
        tpot=replace(one.summary.tpot, p99_s=p99_s),
        window=replace(one.summary.window, good=good_per_s),
    )
    return replace(one, point=replace(one.point, part=part, x=x, policy=policy), summary=summary)


def test_overload_is_stated_over_the_best_static_placement_and_over_one_where_none_was_good(
    outcomes: list[ares_points.PointResult],
) -> None:
    one = outcomes[0]
    found = ares_report.headline(
        [
            made(one, "overload", 3, "least_work", good=0.25, wait_s=9.0),
            made(one, "overload", 3, "round_robin", good=0.1, wait_s=9.0),
            made(one, "overload", 3, "shedding", good=0.5, wait_s=9.0),
            made(one, "overload", 3, "ares", good=0.75, wait_s=40.0),
            made(one, "overload", 12, "current_load", good=0.4, wait_s=9.0),
            made(one, "overload", 12, "shedding", good=0.5, wait_s=9.0),
            made(one, "overload", 12, "ares", good=0.8, wait_s=9.0),
            made(one, "overload, reasoning", 3, "least_work", good=0.0, wait_s=9.0),
            made(one, "overload, reasoning", 3, "ares", good=0.5, wait_s=50.0),
            made(one, "below, 12", 0.95, "least_work"),
            made(one, "below, 12", 0.95, "ares", good=0.99),
            made(one, "below, 3", 0.8, "least_work", good=0.5),
            made(one, "below, 3", 0.8, "ares", good=0.75),
        ]
    )
    assert found == {
        "below_ratio": 0.99,
        "overload_3": 3.0,
        "overload_3_at_most": 4.0,
        "overload_3_vs_shedding": 1.5,
        "overload_12": 2.0,
        "overload_12_at_most": 2.5,
        "overload_12_vs_shedding": 1.6,
        "overload_reasoning_3": 100.0,
        "overload_reasoning_3_at_most": None,
        "overload_longest_wait_s": 50.0,
    }


def test_the_engines_are_stated_over_current_load_and_over_the_best_static_placement(
    outcomes: list[ares_points.PointResult],
) -> None:
    one, found = outcomes[0], []
    for part, scale in (("vllm", 1.0), ("vllm, prefix caching", 0.5), ("own", 2.0)):
        for rate in (0.1, 0.15, 0.19, 0.2):
            if part != "own" and rate < 0.19:
                continue
            for policy, good in (("current_load", 0.1), ("least_requests", 0.2), ("ares", 0.25)):
                if rate == 0.1 and policy == "ares":
                    good = 0.15
                per_s = scale * good if policy == "ares" else good
                found.append(made(one, part, rate, policy, good_per_s=per_s))
    assert ares_report.headline(found) == {
        "vllm_vs_current_load": 2.5,
        "vllm_vs_best_static": 1.25,
        "vllm_cached_vs_best_static": 0.625,
        "own_vs_best_static": 2.5,
        "own_light_load_ratio": 1.5,
    }


def test_the_largest_rate_is_the_last_before_the_first_at_which_too_few_are_good(
    outcomes: list[ares_points.PointResult],
) -> None:
    one = outcomes[0]
    shares = {
        "current_load": (1.0, 0.98, 1.0),
        "least_work": (1.0, 0.99, 0.5),
        "round_robin": (0.9, 1.0, 1.0),
        "ares": (1.0, 1.0, 0.99),
    }
    found = [
        made(one, "sharegpt", rate, policy, good=good, p99_s=0.01 if policy == "ares" else 0.04)
        for policy, of_rates in shares.items()
        for rate, good in zip((0.1, 0.15, 0.17), of_rates, strict=True)
    ]
    headline = ares_report.headline(found)
    assert headline["largest_good_rate_ares"] == 0.17
    assert headline["largest_good_rate_best_static"] == 0.15
    assert headline["p99_tpot_reduction"] == 0.75
    console = Console(record=True, width=240)
    ares_report.print_tables(found, console)
    text = console.export_text()
    assert "74.8 % with predictions" in text, "the paper's, beside"
    assert "75.0%" in text
    figures = ares_report.FigureData(found)
    assert math.isnan(figures.largest_rate("sharegpt", "round_robin"))


def test_a_trace_is_run_at_a_rate_that_fills_the_memory(trace: Path) -> None:
    words = ["--part", "traces", "--trace", str(trace), "--duration-s", "30", "--warm-up-s", "0"]
    points = points_of(*words, "--seeds", "1")
    parts: dict[str, list[ares_points.SimPoint]] = {}
    for point in points:
        parts.setdefault(point.part, []).append(point)
    name = points[0].workload
    usual, below, overload = parts.values()
    assert list(parts) == ["traces", f"below, 3, {name}", f"overload, {name}"]
    assert [p.policy for p in usual] == list(ares_points.COMPARED)
    assert {p.policy for p in overload} == {*ares_points.STATIC, "shedding", "ares"}
    assert {p.config.memory.on_full for p in (*below, *overload)} == {"pause"}
    assert overload[0].rate == pytest.approx(2.1 * usual[0].rate)
    assert below[0].rate == pytest.approx(0.95 / 1.4 * overload[0].rate)
    outcome = ares_points.run_point(points[1])
    assert outcome.summary.num_requests > 0
    assert math.isfinite(outcome.summary.window.good)
    load = synthetic_load("sharegpt", rate=1.0, duration_s=20.0, seed=0)
    config = SimConfig(RTX_4090D, 3, 1)
    rates = [
        ares_points.fitting_rate(config, load.input_tokens, load.output_tokens, s)
        for s in (0.3, 0.6)
    ]
    assert 0 < rates[0] < rates[1]
