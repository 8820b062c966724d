"""Simulated loads, the commands over them, and the figures of `paper ares`."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from loadgen.__main__ import main
from loadgen.bench.profile import fit
from loadgen.bench.scheduler import random_snapshots
from loadgen.load.lengths import ALPACA, SHAREGPT, find_workload
from loadgen.load.traces import read_trace
from loadgen.paper import ares, ares_report
from loadgen.simulated import synthetic_load, trace_load
from quadriga.errors import ConfigError
from quadriga.policies.ares import AresSettings, Rescheduler, TransferCosts
from quadriga.policies.ares.cluster import unpack
from quadriga.policies.ares.recording import read_ticks, replay
from quadriga.policies.ares.roles import classify, weights
from quadriga.sim.config import SimConfig
from quadriga.sim.profiles import RTX_4090D


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
            {
                "input": (305, 1053, 36, 920, 1609),
                "output": (7542, 12008, 1536, 32670, 32679),
            },
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


def test_unknown_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="sharegpt"):
        find_workload("tweets")


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
    assert set(line["headline"]) == {"wall_s", "goodput", "p99_tpot_s"}
    assert line["summary"]["num_failed"] == 0
    assert line["commit"]
    raw = json.loads((out / "mine-oracle-2d.json").read_text())
    assert len(raw["finished_s"]) == 60
    assert None not in raw["finished_s"]
    assert (out / "mine-oracle-2d.png").read_bytes().startswith(b"\x89PNG")
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lengths", "alpaca", "--arrivals", "closed:3"], "poisson"),
        (["--lengths", "alpaca", "--arrivals", "poisson:x"], "not a rate"),
        (["--trace", "no-such-file.csv"], "cannot be read"),
    ],
)
def test_simulate_refuses(words: list[str], says: str, capsys: Any) -> None:
    assert main(["simulate", *words]) == 2
    assert says in capsys.readouterr().err


def test_failures_are_parsed(capsys: Any) -> None:
    for text in ("5", "a:b:c", "-1:0:5", "1:0:0", "1:0:inf"):
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
def outcomes() -> list[ares.Outcome]:
    """Short runs of two rates under three policies, with the standard SLO and one more."""
    config = SimConfig(replace(RTX_4090D, kv_capacity_tokens=60_000), num_decode=3, num_prefill=1)
    grid = (ares.Slo(5.0, 1.1 * config.profile.half_memory_step_s),)
    points = [
        ares.Point("sharegpt", rate, "sharegpt", rate, policy, config, 400.0, 50.0, grid=grid)
        for rate in (0.1, 0.3)
        for policy in ("current_load", "ares", "oracle")
    ]
    return [ares.run_point(point) for point in points]


def test_the_headline_has_its_keys(outcomes: list[ares.Outcome]) -> None:
    headline = ares_report.headline(outcomes)
    assert {
        "goodput_ratio", "p99_tpot_reduction", "oom_ares", "oom_baseline", "variance_vs_oracle",
        "light_load_ratio", "goodput_ratio_rate", "light_load_rate", "oom_rate",
    } <= set(headline)  # fmt: skip
    assert headline["light_load_rate"] == 0.1
    assert headline["best_goodput_ratio"] >= headline["goodput_ratio"]
    assert ares_report.headline([o for o in outcomes if o.point.policy != "ares"]) == {}


def test_tables_and_plots_are_made(outcomes: list[ares.Outcome], tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    ares_report.print_tables(outcomes, console)
    text = console.export_text()
    assert "current_load" in text
    assert "h800-7b" in text
    names = {path.name for path in ares_report.write_plots(outcomes, tmp_path)}
    assert names == {"ares-sharegpt.png", "ares-variance.png"}


def test_transfers_weigh_more_on_faster_devices_and_slower_links() -> None:
    """ARES Figure 11: 95.5 % of the token's time on an H800 at 10 Gbit/s, without pre-copy."""
    share = ares_report.transfer_share
    assert share("h800-7b", 10.0, precopy=False) > share("a100-7b", 10.0, precopy=False) > 0.7
    assert share("h800-7b", 10.0, precopy=False) > share("h800-7b", 100.0, precopy=False)
    assert share("h800-7b", 10.0, precopy=True) < 0.5


def test_every_part_has_points_and_quick_has_fewer() -> None:
    parser = argparse.ArgumentParser()
    ares.add_arguments(parser)
    full, quick = parser.parse_args([]), parser.parse_args(["--quick"])
    for part in ("rates", "bandwidth", "sizes", "settings"):
        points = ares._POINTS[part]
        assert 0 < len(points(quick)) < len(points(full))
        assert len({p.policy for p in points(full)}) >= 1


def test_a_trace_is_run_at_a_rate_that_fills_the_memory(trace: Path) -> None:
    parser = argparse.ArgumentParser()
    ares.add_arguments(parser)
    args = parser.parse_args(["--trace", str(trace), "--duration-s", "30", "--warm-up-s", "0"])
    points = ares._POINTS["traces"](args)
    assert [p.policy for p in points] == list(ares.POLICY_NAMES)
    outcome = ares.run_point(points[1])
    assert outcome.summary.num_requests > 0
    assert math.isfinite(outcome.summary.goodput)
    load = synthetic_load("sharegpt", rate=1.0, duration_s=20.0, seed=0)
    config = SimConfig(RTX_4090D, 3, 1)
    rates = [
        ares.fitting_rate(config, load.input_tokens, load.output_tokens, s) for s in (0.3, 0.6)
    ]
    assert 0 < rates[0] < rates[1]
