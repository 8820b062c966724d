"""`bench simulator` on a cluster that is itself simulated: what was put in must be found again."""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadgen.bench.cluster import simulator, simulator_fit, simulator_report
from loadgen.bench.cluster.paced_cluster import KV_CAPACITY_TOKENS, Page, Played
from loadgen.checker import Outcome
from loadgen.checker.verdict import AnswerChoice, Verdict, Write
from loadgen.load.workload import RequestSpec
from loadgen.runner import Record, RunResult
from quadriga.config.pacing import PaceProfile
from quadriga.errors import ConfigError
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import SimConfig
from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.policies import make_policy
from quadriga.sim.profiles import CPU, Delays
from quadriga.sim.records import PAUSE
from quadriga.sim.results import Moved

TRUTH = replace(
    CPU,
    step=PaceProfile("truth", 62e-3, 0.4e-3, 6e-5, "made up"),
    prefill_base_s=8e-3,
    prefill_per_token_s=2e-4,
    prefill_per_pair_s=0.0,
    prefill_budget_tokens=256,
    kv_capacity_tokens=KV_CAPACITY_TOKENS,
    round_trip_s=9e-3,
)
DELAYS = Delays(ingress_s=(0.02, 0.03, 0.05), handoff_s=(0.01, 0.02, 0.04))
EDGES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)


@dataclass
class Timeline:
    """A replica's counters and what it held, whenever something happened."""

    at_s: list[float] = field(default_factory=lambda: [0.0])
    totals: list[tuple[float, ...]] = field(default_factory=lambda: [(0.0, 0.0, 0.0, 0.0)])
    held: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def index(self, at_s: float) -> int:
        return bisect_right(self.at_s, at_s) - 1


class Counting(SimulatedDecodeReplica):
    """A simulated replica that counts as a real one does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.timeline = Timeline()

    def _advance(self, steps: int) -> None:
        num, tokens, began_s = len(self.running), self.tokens, self.anchor_s
        super()._advance(steps)
        if steps <= 0 or not num:
            return
        before = self.timeline.totals[-1]
        attended = steps * tokens + num * steps * (steps - 1) / 2
        done = (float(steps), self.anchor_s - began_s, float(steps * num), attended)
        self.timeline.at_s.append(self.anchor_s)
        self.timeline.totals.append(tuple(a + b for a, b in zip(before, done, strict=True)))
        self.timeline.held.append((num, self.tokens))


def cluster(rate: float, seed: int, *, policy: str = "current_load", slower: float = 1.0) -> Played:
    """What a real cluster with the costs above would have shown."""
    trace = simulator.heavy_tailed(round(rate * 40), seed=seed)
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(trace))
    arrivals = np.cumsum(gaps) - gaps[0]
    step = TRUTH.step
    pace = PaceProfile("t", slower * step.base_s, step.per_sequence_s, step.per_token_s, "")
    config = SimConfig(
        replace(TRUTH, step=pace), 3, 1, seed=seed, memory=PAUSE, tick_s=0.5, delays=DELAYS
    )
    replicas: list[Counting] = []

    def make(*arguments: Any) -> Counting:
        replicas.append(Counting(*arguments))
        return replicas[-1]

    run = Simulation(
        config,
        replace(make_policy(policy, reservation="used"), places_ahead=False),
        arrivals,
        trace.input_tokens,
        trace.output_tokens,
        make_replica=make,
    ).run()
    result = RunResult(0.0, 0.0)
    specs = []
    for i in range(len(trace)):
        tokens = int(trace.output_tokens[i])
        spec = RequestSpec(i, float(arrivals[i]), [1], tokens, ignore_eos=True)
        first_s, last_s = float(run.first_token_s[i]), float(run.finished_s[i])
        choice = AnswerChoice(
            writes=[Write(first_s, 1), Write(last_s, tokens - 1)], num_tokens=tokens
        )
        verdict = Verdict(choices=[choice], prompt_tokens=int(trace.input_tokens[i]))
        sent_s = float(arrivals[i])
        result.records.append(Record(spec, "", sent_s, sent_s, last_s, 1, 0, verdict))
        specs.append(spec)
    times = np.arange(0.0, run.end_s + 1.0, 0.5)
    moves = [_moved(m) for m in run.migrations]
    views = [_view(replicas, float(t), moves) for t in times]
    rng = np.random.default_rng(seed)
    passes = rng.integers(3, 9, len(times)).cumsum()
    prompt_tokens = rng.integers(100, 900, len(times)).cumsum()
    pages = [
        _page(replicas, float(t), float(passes[i]), float(prompt_tokens[i]), config)
        for i, t in enumerate(times)
    ][::2]
    return Played(result, specs, views, pages)


def _moved(m: Moved) -> dict[str, Any]:
    num_bytes = m.num_tokens * TRUTH.kv_bytes_per_token
    took_s = m.stall_s + num_bytes / TRUTH.bandwidth_bytes_per_s
    report = {"outcome": "moved", "stall_s": m.stall_s, "took_s": took_s, "bytes_sent": num_bytes}
    return {"report": report}


def _view(replicas: list[Counting], at_s: float, moves: list[dict[str, Any]]) -> dict[str, Any]:
    shown = []
    for r in replicas:
        num, tokens = r.timeline.held[r.timeline.index(at_s)]
        shown.append(
            {
                "name": r.name,
                "role": "decode",
                "num_running": num,
                "used_tokens": tokens,
                "step_s": r.profile.step.step_s(num, tokens),
                "num_slots": 32,
                "num_paused": 0,
                "kv_capacity_tokens": KV_CAPACITY_TOKENS,
            }
        )
    shown.append({"name": "p", "role": "prefill"})
    told = {"bandwidth_bytes_per_s": 1e9, "outcomes": {"moved": len(moves)}}
    return told | {"replicas": shown, "recent": moves[-2:]}  # the scheduler shows the newest


def _page(
    replicas: list[Counting], at_s: float, passes: float, prompt_tokens: float, config: SimConfig
) -> Page:
    profile = config.profile
    busy_s = profile.prefill_base_s * passes + profile.prefill_per_token_s * prompt_tokens
    counted: dict[str, tuple[float, ...]] = {"p": (passes, busy_s, passes, prompt_tokens)}
    counted |= {r.name: r.timeline.totals[r.timeline.index(at_s)] for r in replicas}
    series = {
        f'{name}{{replica="{replica}"}}': value
        for replica, values in counted.items()
        for name, value in zip(simulator_fit.COUNTERS, values, strict=True)
    }
    # So many hand-offs a second; the wait for the boundary, up to a step of 68 ms, is in them.
    rng = np.random.default_rng(0)
    waits = np.interp(np.linspace(0, 1, 1001), [0, 0.5, 1], DELAYS.handoff_s or ())
    waits += 0.068 * rng.random(1001)
    for edge in (*EDGES, float("inf")):
        label = "+Inf" if edge == float("inf") else f"{edge}"
        series[f'quadriga_handoff_seconds_bucket{{le="{label}",replica="p"}}'] = (
            float((waits <= edge).sum()) * at_s
        )
    series['quadriga_handoff_seconds_sum{replica="p"}'] = float(waits.sum()) * at_s
    return Page(at_s, series)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    simulator.add_arguments(parser)
    return parser.parse_args(words)


def test_the_fit_finds_the_costs_that_were_put_in() -> None:
    played = cluster(4.0, 0, policy="oracle")
    costs = simulator_fit.fit_costs(
        played, kv_bytes_per_token=4096, prefill_budget_tokens=256, max_tokens=600
    )
    step = costs.profile.step
    assert step.base_s == pytest.approx(TRUTH.step.base_s, rel=0.02)
    assert step.step_s(4, 800) == pytest.approx(TRUTH.step.step_s(4, 800), rel=0.01)
    assert costs.step.mean_error < 0.01
    assert costs.profile.prefill_s([100]) == pytest.approx(TRUTH.prefill_s([100]), rel=0.02)
    assert costs.num_moves > 0
    quarter_s = TRUTH.step.base_s / 4  # boundaries are waited for, and there are few moves
    assert costs.profile.round_trip_s == pytest.approx(TRUTH.round_trip_s, abs=quarter_s)
    assert costs.delays.handoff_s is not None
    assert np.median(costs.delays.handoff_s) == pytest.approx(0.02, abs=4e-3)
    assert abs(costs.measured_ms2) < 0.5, "its replicas report what the fit says"
    assert costs.delays.step_factor[0] == pytest.approx(1.0, abs=0.03)
    assert costs.delays.step_factor[-1] == pytest.approx(1.0, abs=0.03)


def test_the_ingress_is_what_remains_of_the_ttft() -> None:
    costs = simulator_fit.fit_costs(
        cluster(3.0, 1), kv_bytes_per_token=1, prefill_budget_tokens=256, max_tokens=600
    )
    bare = np.full(50, 0.01)
    told = simulator_fit.with_ingress(costs, bare + np.linspace(0.0, 0.1, 50), bare)
    assert told.delays.ingress_s[0] == 0.0
    assert told.delays.ingress_s[-1] == pytest.approx(0.1)
    assert told.delays.handoff_s == costs.delays.handoff_s


def test_hand_offs_between_two_pages_have_their_exact_mean() -> None:
    name = "quadriga_handoff_seconds"

    def page(at_s: float, small: float, all_of_them: float, total_s: float) -> Page:
        return Page(
            at_s,
            {
                f'{name}_bucket{{le="0.01",replica="p"}}': small,
                f'{name}_bucket{{le="0.1",replica="p"}}': all_of_them,
                f'{name}_bucket{{le="+Inf",replica="p"}}': all_of_them,
                f'{name}_sum{{replica="p"}}': total_s,
            },
        )

    quantiles, mean_s = simulator_fit.handoff_quantiles(page(0, 5, 9, 1.0), page(9, 55, 109, 5.0))
    assert mean_s == pytest.approx(0.04)
    assert np.trapezoid(quantiles, np.linspace(0, 1, len(quantiles))) == pytest.approx(0.04)
    assert list(quantiles) == sorted(quantiles)
    with pytest.raises(ConfigError, match="no hand-off"):
        simulator_fit.handoff_quantiles(page(0, 5, 9, 1.0), page(9, 5, 9, 1.0))


def test_the_wait_for_a_step_is_taken_out_of_the_hand_off() -> None:
    """Of a sum of two, one being uniform, the other is left: its mean and its spread."""
    rng = np.random.default_rng(0)
    own = rng.gamma(9.0, 0.005, 200_000)
    waits = np.where(rng.random(200_000) < 0.8, 0.06 * rng.random(200_000), 0.0)
    at = np.linspace(0.0, 1.0, 401)
    seen = np.quantile(own + waits, at).tolist()
    left = np.array(simulator_fit.until_boundary(seen, 0.06, 0.8))
    assert left.mean() == pytest.approx(own.mean(), rel=0.03)
    assert left.std() == pytest.approx(own.std(), rel=0.15)
    assert simulator_fit.until_boundary([0.05], 0.06, 1.0) == pytest.approx((0.02,))


def test_too_short_a_run_is_refused_with_a_remedy() -> None:
    window = simulator_fit.Window(50.0, 1.0, 100.0, 9000.0)
    with pytest.raises(ConfigError, match="--duration-s"):
        simulator_fit.fit_step([window] * 3)


def test_a_response_that_failed_ends_the_comparison() -> None:
    played = cluster(3.0, 1)
    played.result.records[3].verdict.outcome = Outcome.REFUSED
    with pytest.raises(ConfigError, match="request 3 did not pass: it was refused"):
        simulator_fit.load_of(played)


@pytest.mark.parametrize(("slower", "ticks", "status"), [(1.0, 1, 0), (1.5, 1, 1), (1.0, 0, 1)])
def test_the_command_passes_a_cluster_it_describes_and_no_other(
    slower: float,
    ticks: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second time the cluster is as it was, half as slow again, or records no decision."""
    calls: list[str] = []

    def play(args: argparse.Namespace, policy: str, _: Any, more: Any, **__: Any) -> Played:
        calls.append(policy)
        assert (tmp_path / "simulator.partial.json").exists() == (len(calls) > 2)
        if ticks and policy == "ares" and len(calls) > 1:
            Path(more[-1].partition("=")[2]).write_text(f"{len(calls)}\n")
        name = {"off": "current_load", "ares": "oracle"}[policy]
        if len(calls) == 1:
            return cluster(args.rates[0], args.seed, policy=name)
        return cluster(args.rates[1], args.seed + 1, policy=name, slower=slower)

    monkeypatch.setattr(simulator, "play", play)
    monkeypatch.setattr(simulator, "read_ticks", lambda _: [SimpleNamespace(orders=[])])
    monkeypatch.setattr(simulator, "replay", lambda _: [])
    words = ["--rounds", "2", "--out", str(tmp_path), "--record", str(tmp_path / "ticks")]
    assert simulator.run(arguments(*words)) == status
    assert not ticks or (tmp_path / "ticks").read_text() == "3\n4\n"
    assert calls == ["ares", "off", "ares", "ares", "off"]
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["experiment"] == "bench simulator"
    assert line["headline"]["is_within_tolerance"] is (slower == 1.0)
    assert line["commit"] and line["machine"]["cores"]
    worst = line["headline"]["worst_deviation"]
    assert all((value <= 0.15) == (slower == 1.0) for value in worst.values())
    assert line["results"]["off"]["real"]["tpot_p50_ms"] > 62.0
    told = line["headline"]["fitted_step_over_real"]["off"]
    assert told == pytest.approx(1.0 if slower == 1.0 else 62 / 93, abs=0.06)
    assert not (tmp_path / "simulator.partial.json").exists()
    kept = json.loads((tmp_path / "simulator.json").read_text())
    assert sum(r["is_real"] for r in kept["runs"]) == 4
    assert len(kept["runs"]) == 4 * (1 + simulator.NUM_DRAWS)
    assert (tmp_path / "simulator.png").stat().st_size > 10_000


def test_what_there_is_none_of_is_null_and_moves_are_all_that_were_made() -> None:
    outcome = simulator_report.real_outcome(played := cluster(4.0, 0, policy="oracle"), CPU.step)
    assert outcome.num_moves == played.views[-1]["outcomes"]["moved"] > 2
    none = replace(outcome, load_variance_ms2=float("nan"), fitted_step=float("nan"))
    raw = simulator_report.raw(DELAYS, {"off": ([none], [])})  # type: ignore[arg-type]
    assert json.loads(json.dumps(raw, allow_nan=False))["runs"][0]["fitted_step"] is None


def test_the_worst_deviation_looks_at_what_must_agree_only() -> None:
    real = dict.fromkeys(simulator_report.MUST_AGREE, 10.0) | {"moves": 4.0, "x": 0.0}
    simulated = dict(real) | {"tpot_p99_ms": 8.0, "moves": 40.0, "x": 3.0}
    ratio = simulator_report.ratios(real, simulated)
    assert ratio["x"] is None
    assert simulator_report.worst_deviation(ratio) == pytest.approx(0.2)


def test_the_load_has_a_heavy_tail_and_fits_the_service() -> None:
    trace = simulator.heavy_tailed(4000, seed=0)
    assert trace.output_tokens.min() == simulator.OUTPUT_TOKENS[0]
    assert trace.output_tokens.max() == simulator.OUTPUT_TOKENS[1]
    held = np.sort(trace.output_tokens.astype(float) ** 2)[::-1]
    assert held[:400].sum() > 0.5 * held.sum(), "a tenth of the answers holds half of the memory"
    assert (simulator.heavy_tailed(50, seed=1).output_tokens != trace.output_tokens[:50]).any()
