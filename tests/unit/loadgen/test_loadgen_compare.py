"""Comparisons: what is noise and what is not, what is comparable, results read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.__main__ import main
from loadgen.checker import AnswerChoice, Outcome, Verdict, Write
from loadgen.comparison import intervals, runs
from loadgen.comparison.intervals import Finding, difference, difference_of_runs, mean, percentile
from loadgen.comparison.runs import slo_of
from loadgen.report import run_report as report
from loadgen.report.metrics import LoadSlo, summarise, tpot_s, ttft_s
from loadgen.report.results import SummaryLine, read_results
from loadgen.runner import Record, RunResult
from quadriga.errors import ConfigError
from tests.unit.loadgen.conftest import Service, make_spec

Values = Any


def correlated(rng: np.random.Generator, num: int, rho: float = 0.6) -> Values:
    """Latencies whose neighbours are alike, as those of requests that shared a busy moment."""
    noise = rng.normal(size=num)
    found = np.empty(num)
    found[0] = noise[0]
    for i in range(1, num):
        found[i] = rho * found[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return np.exp(0.8 * found)


def finding(
    a: Values, b: Values, seed: int = 0, *, paired: bool = False, **changes: Any
) -> Finding:
    options: dict[str, Any] = {
        "statistic": percentile(50),
        "is_paired": paired,
        "min_values": 30,
        "margin_share": 0.0,
        "confidence": 0.95,
        "num_draws": 300,
        "seed": seed,
    }
    return difference(a, b, **{**options, **changes}).finding


def test_noise_is_seldom_called_a_difference() -> None:
    """Of 60 pairs of alike runs a few may differ; drawn one by one, far more would."""
    wrong = {True: 0, False: 0}
    for pair in range(60):
        rng = np.random.default_rng([pair, 1])
        a, b = correlated(rng, 400), correlated(rng, 400)
        for in_blocks in wrong:
            found = finding(a, b, pair, in_blocks=in_blocks, num_draws=200)
            wrong[in_blocks] += found is not Finding.NOISE
    assert wrong[True] <= 9
    assert wrong[False] >= 15


def test_a_run_says_nothing_that_is_short_for_how_alike_its_neighbours_are() -> None:
    for pair in range(20):
        rng = np.random.default_rng([pair, 3])
        a, b = (correlated(rng, 60, 0.95) for _ in "ab")
        assert intervals.block_length(a) > 6
        assert finding(a, b) is Finding.TOO_FEW
    assert intervals.block_length(np.ones(60)) == 1
    assert intervals.block_length(rng.permutation(60).astype(float)) <= 3


def test_a_real_difference_is_found_in_its_direction() -> None:
    found = []
    for pair in range(10):
        rng = np.random.default_rng([pair, 2])
        a, b = correlated(rng, 400), 2.0 * correlated(rng, 400)
        found.append((finding(a, b, pair), finding(b, a, pair)))
    assert found.count((Finding.HIGHER, Finding.LOWER)) == 10


def test_the_same_requests_show_smaller_differences() -> None:
    """Paired, what the requests themselves differ by drops out."""
    rng = np.random.default_rng(3)
    a = correlated(rng, 400)
    b = a * rng.normal(1.08, 0.02, 400)
    assert finding(a, b) is Finding.NOISE
    assert finding(a, b, paired=True) is Finding.HIGHER


def test_sure_but_small_differences_are_noise_between_runs() -> None:
    rng = np.random.default_rng(4)
    a = rng.normal(100.0, 1.0, 400)
    assert finding(a, a + 3.0, paired=True) is Finding.HIGHER
    assert finding(a, a + 3.0, paired=True, margin_share=0.05) is Finding.NOISE
    assert finding(a, a + 9.0, paired=True, margin_share=0.05) is Finding.HIGHER
    assert finding(a, a - 9.0, paired=True, margin_share=0.05) is Finding.LOWER


def test_few_values_say_nothing() -> None:
    a = np.arange(29.0) * (-1.0) ** np.arange(29)  # neighbours are not alike
    assert finding(a, a + 100) is Finding.TOO_FEW
    assert finding(a, a + 100, min_values=29) is Finding.HIGHER
    with pytest.raises(ValueError, match="0 and 29"):
        finding(np.empty(0), a)


def test_intervals_hold_the_difference_and_follow_the_seed() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(10, 1, 300), rng.normal(12, 1, 300)
    options: dict[str, Any] = {"is_paired": False, "min_values": 2, "margin_share": 0.0}
    options |= {"confidence": 0.9, "num_draws": 500}
    first, same, other = (difference(a, b, mean, seed=seed, **options) for seed in (1, 1, 2))
    assert first == same != other
    assert first.low is not None and first.high is not None
    assert first.low < first.b - first.a < first.high
    assert first.high - first.low == pytest.approx(2 * 1.645 * np.sqrt(2 / 300), rel=0.3)
    assert first.ratio == pytest.approx(1.2, abs=0.02)


def test_the_spread_between_runs_says_what_is_noise() -> None:
    """Of 100 pairs of alike sides about 5 may differ, however few their runs."""
    options: dict[str, Any] = {"margin_share": 0.0, "confidence": 0.95}
    wrong = 0
    for pair in range(100):
        rng = np.random.default_rng([pair, 6])
        a, b = rng.normal(100, 5, 2 + pair % 3), rng.normal(100, 5, 3)
        found = difference_of_runs(a, b, **options)
        wrong += found.finding is not Finding.NOISE
    assert 1 <= wrong <= 11
    # By hand: means 10 and 14, standard error 1, 4 degrees of freedom, t = 2.776.
    one, other = np.array([9.0, 10, 11]), np.array([13.0, 14, 15])
    found = difference_of_runs(one * 1.5**0.5, other * 1.5**0.5, **options)
    assert found.low is not None and found.high is not None
    assert (found.high - found.low) / 2 == pytest.approx(2.776, rel=0.02)
    assert found.finding is Finding.HIGHER and found.is_of_runs
    with pytest.raises(ValueError, match="1 and 3 runs"):
        difference_of_runs(one[:1], other, **options)


def make_records(
    num: int, *, slow: float = 1.0, failed: int = 0, seed: int = 0, rng_seed: int = 7
) -> list[Record]:
    """Requests of 5 tokens at 20 per second; `slow` stretches all their latencies."""
    base = np.random.default_rng(seed).uniform(0.05, 0.3, num)
    noise = np.random.default_rng(rng_seed).normal(1.0, 0.02, num)
    records = []
    for index in range(num):
        sent_s = 1000.0 + index / 20
        first_s = base[index] * noise[index] * slow
        step_s = 0.01 * noise[index] * slow
        times = [sent_s + first_s + token * step_s for token in range(5)]
        choice = AnswerChoice(writes=[Write(time_s, 1) for time_s in times], num_tokens=5)
        verdict = Verdict(choices=[choice], prompt_tokens=9, completion_tokens=5)
        verdict.outcome = Outcome.FAILED if index < failed else Outcome.OK
        spec = make_spec(index=index, max_tokens=5)
        records.append(Record(spec, "id", sent_s, sent_s, times[-1], 1, 50, verdict))
    return records


def write(folder: Path, records: list[Record], kind: str = "run", **header: Any) -> Path:
    """Write a results file; `header` changes its first line."""
    folder.mkdir(parents=True, exist_ok=True)
    result = RunResult(start_s=1000.0, start_unix_s=5.0, end_s=1100.0, records=records)
    head = {
        "kind": kind,
        "scenario": "40 tasks",
        "config": {"tasks": 40, "seed": 0, "arrivals": "poisson:20", "transport": "http"},
        "seed": 0,
        "load_sha256": "a" * 64,
        "commit": "0123456789abcdef",
        "machine": {"cpu": "x", "cores": 2},
        **header,
    }
    summary = summarise(result, LoadSlo())
    report.write_results(folder, head, result, summary, header.get("steps", []))
    return folder


def compare(tmp_path: Path, a: Path, b: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out"
    words = ("--output", str(out), "--no-plots", "--draws", "300", *words)
    status = main(["compare", str(a), str(b), *words])
    file = out / "compare.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return status, {(row["group"] + " " + row["figure"]).strip(): row for row in rows}


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = make_records(40, failed=2)
    found = read_results(write(tmp_path / "a", records))
    assert found.header.kind == "run" and found.header.config["tasks"] == 40
    assert len(found.records) == 40
    for before, after in zip(records, found.records, strict=True):
        assert after.spec.index == before.spec.index
        assert after.verdict.outcome is before.verdict.outcome
        assert ttft_s(after) == pytest.approx(ttft_s(before), abs=2e-6)
        assert tpot_s(after) == pytest.approx(tpot_s(before), abs=2e-6)


def test_an_earlier_runs_pictures_and_failures_go_with_its_figures(tmp_path: Path) -> None:
    for name in ("latency.png", "timeline.png", "ramp.png", "failed-3.txt", "mine.png"):
        (tmp_path / name).touch()
    write(tmp_path, make_records(3))
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "mine.png"}


def test_alike_runs_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", make_records(400, rng_seed=1))
    b = write(tmp_path / "b", make_records(400, rng_seed=2))
    status, rows = compare(tmp_path, a, b, "--fail-if-worse")
    assert status == 0
    assert {row["verdict"] for row in rows.values()} == {"within noise"}
    assert "no difference beyond noise" in capsys.readouterr().out
    assert rows["TTFT P50"]["is_paired"] and rows["TTFT P50"]["num_a"] == 400


def test_an_earlier_comparisons_pictures_go_with_its_figures(tmp_path: Path) -> None:
    a = write(tmp_path / "a", make_records(40))
    (tmp_path / "out").mkdir()
    for name in ("distributions.png", "ratios.png"):
        (tmp_path / "out" / name).touch()
    compare(tmp_path, a, a)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["compare.json"]


def test_pairs_are_in_order_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "difference", lambda a, *_, **__: a)
    later_first = [replace(one, sent_s=-one.sent_s) for one in make_records(40)]
    figure, method = runs._figures(LoadSlo())[6], runs.Method(0.05, 0.95, 100, seed=0)
    values: Any = runs._of_requests("", figure, later_first, later_first, method, same_load=True)
    assert values.tolist() == [1e3 * runs.e2e_s(one) for one in reversed(later_first)]


def test_a_slower_run_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", make_records(400, rng_seed=1))
    b = write(tmp_path / "b", make_records(400, slow=1.3, failed=30, rng_seed=2))
    status, rows = compare(tmp_path, a, b)
    assert status == 0
    for name in ("TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99", "E2E P50", "passed"):
        assert rows[name]["verdict"] == "worse", name
    assert rows["TPOT P50"]["ratio"] == pytest.approx(1.3, abs=0.01)
    low, high = rows["TPOT P50"]["low"], rows["TPOT P50"]["high"]
    assert low < 3.0 < high and rows["TPOT P50"]["unit"] == "ms"
    assert rows["passed"]["b"] == pytest.approx(92.5)
    assert "B is worse" in capsys.readouterr().out
    assert compare(tmp_path, a, b, "--fail-if-worse")[0] == 1
    assert compare(tmp_path, b, a, "--fail-if-worse")[0] == 0
    assert compare(tmp_path, b, a)[1]["TPOT P50"]["verdict"] == "better"


def test_requests_within_the_slo_are_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a", make_records(400, rng_seed=1))
    b = write(tmp_path / "b", make_records(400, slow=1.5, rng_seed=2))
    _, rows = compare(tmp_path, a, b, "--slo-ttft-s", "0.3")
    assert rows["within SLO"]["a"] > 95 and rows["within SLO"]["verdict"] == "worse"
    assert "within SLO" not in compare(tmp_path, a, b)[1]


def test_each_limit_that_is_not_given_is_the_runs_own(tmp_path: Path) -> None:
    run = read_results(write(tmp_path, make_records(9)))
    limits = ({"slo": {"ttft_s": ttft_s, "tpot_s": 0.009}} for ttft_s in (1.0, 2.0))
    runs = [replace(run, summary=SummaryLine.model_validate(one)) for one in limits]
    assert slo_of(runs, 0.3, None) == LoadSlo(0.3, 0.009)
    assert slo_of(runs, None, None) == LoadSlo(None, 0.009), "they had different ones"


def test_tails_of_few_requests_are_not_judged(tmp_path: Path) -> None:
    a = write(tmp_path / "a", make_records(100, rng_seed=1))
    b = write(tmp_path / "b", make_records(100, slow=2.0, rng_seed=2))
    _, rows = compare(tmp_path, a, b)
    assert rows["TTFT P50"]["verdict"] == "worse"
    assert rows["TTFT P99"]["verdict"] == "too few to say"
    assert rows["TTFT P99"]["low"] is None
    assert rows["output tokens"]["verdict"] == "within noise"
    few = [write(tmp_path / f"few-{i}", make_records(290, rng_seed=i)[::10]) for i in (1, 2)]
    assert compare(tmp_path, few[0], few[1])[1]["output tokens"]["verdict"] == "too few to say"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"seed": 0, "config": {"tasks": 50, "seed": 0}}, "tasks: 40 and 50"),
        ({"load_sha256": "b" * 64}, "same options, other requests"),
        ({"scenario": "50 tasks"}, "load: 40 tasks and 50 tasks"),
    ],
)
def test_other_loads_are_refused_unless_told(
    header: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a", make_records(60))
    b = write(tmp_path / "b", make_records(60), **header)
    assert compare(tmp_path, a, b)[0] == 2
    error = capsys.readouterr().err
    assert message in error and "--anyway" in error
    status, rows = compare(tmp_path, a, b, "--anyway")
    assert status == 0
    assert not rows["TTFT P50"]["is_paired"]
    assert f"different load: {message}" in capsys.readouterr().out


def test_several_runs_a_side_show_the_noise_between_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that differ by 10 % among themselves: one pair shows a difference, three do not."""

    def side(name: str, *slow: float) -> list[str]:
        return [
            str(write(tmp_path / f"{name}-{i}", make_records(60, slow=one, rng_seed=i)))
            for i, one in enumerate(slow)
        ]

    a, b = side("a", 1.0, 1.1, 1.2), side("b", 1.15, 1.05, 1.25)
    assert compare(tmp_path, Path(a[0]), Path(b[0]))[1]["TPOT P50"]["verdict"] == "worse"
    words = ["--output", str(tmp_path / "out"), "--fail-if-worse"]
    assert main(["compare", *a, "vs", *b, *words]) == 0
    assert "no difference beyond noise" in capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document["intervals"]["method"] == "welch"
    assert [len(document["a"]), len(document["b"])] == [3, 3]
    rows = {row["figure"]: row for row in document["rows"]}
    assert rows["TPOT P50"]["num_a"] == 3 and rows["TPOT P50"]["is_of_runs"]
    slow = side("slow", 2.0, 2.1, 2.2)
    assert main(["compare", *a, "vs", *slow, *words, "--no-plots"]) == 1
    other = str(write(tmp_path / "other", make_records(60), load_sha256="b" * 64))
    assert main(["compare", *a, "vs", *b[:2], other, *words]) == 2
    assert "same options, other requests" in capsys.readouterr().err


def test_what_is_no_load_may_differ_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a", make_records(60))
    config = {"tasks": 40, "seed": 0, "arrivals": "poisson:20", "transport": "grpc"}
    b = write(tmp_path / "b", make_records(60), config=config, machine={"cpu": "y", "cores": 2})
    assert compare(tmp_path, a, b)[0] == 0
    out = capsys.readouterr().out
    assert "transport: http → grpc" in out and "machine, cpu: x → y" in out


def test_an_interrupted_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", make_records(60))
    file = a / "run.jsonl"
    cut = tmp_path / "cut.jsonl"
    text = file.read_text().replace('"was_interrupted": false', '"was_interrupted": true')
    cut.write_text(text)
    assert compare(tmp_path, a, cut)[0] == 2
    assert "cut.jsonl was interrupted" in capsys.readouterr().err


def test_ramps_are_compared_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ramp(name: str, slow: float, kept: float, unfinished: int = 0) -> Path:
        steps: list[dict[str, Any]] = [
            {
                "kind": "step",
                "step": {"level": level, "counted_from_s": at_s, "to_s": at_s + 5},
                "unfinished": unfinished,
            }
            for level, at_s in ((2.0, 0.0), (4.0, 5.0))
        ]
        steps.append({"kind": "capacity", "unit": "rate", "kept": kept, "broken": None})
        records = make_records(200, slow=slow, rng_seed=round(kept))
        return write(tmp_path / name, records, kind="ramp", steps=steps)

    _, rows = compare(tmp_path, ramp("a", 1.0, 4.0), ramp("b", 1.4, 2.0, unfinished=9))
    assert rows["2/s passed"]["verdict"] == rows["4/s passed"]["verdict"] == "worse"
    assert rows["4/s passed"]["b"] == pytest.approx(100 * 100 / 109)
    assert rows["2/s TTFT P50"]["verdict"] == rows["4/s TTFT P50"]["verdict"] == "worse"
    assert rows["4/s TPOT P50"]["num_a"] == 100
    assert "largest level that kept the SLO: 4/s → 2/s" in capsys.readouterr().out
    run = write(tmp_path / "run", make_records(60))
    assert compare(tmp_path, run, tmp_path / "a", "--anyway")[0] == 2
    assert "not comparable: a run and a ramp" in capsys.readouterr().err


def change(line: int, edit: Callable[[dict[str, Any]], Any]) -> Callable[[list[str]], list[str]]:
    def changed(lines: list[str]) -> list[str]:
        row = json.loads(lines[line])
        edit(row)
        return [*lines[:line], json.dumps(row), *lines[line + 1 :]]

    return changed


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines[:-1], "cut off: it has no summary line"),
        (lambda lines: [*lines[:2], lines[2][:50]], "line 3: not JSON"),
        (lambda lines: lines[1:], "line 1: kind 'request' has no place here"),
        (lambda lines: [lines[0], *lines], "line 2: kind 'run' has no place here"),
        (lambda lines: ["", ""], "no rows in it"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], "a request index comes twice"),
        (change(1, lambda row: row.pop("sent_s")), "line 2: sent_s: Field required"),
        (change(1, lambda row: row.update(sent_s=float("nan"))), "line 2: sent_s: "),
        (change(1, lambda row: row.update(writes=[[[1, -2]]])), "line 2: writes.0.0.1: "),
        (change(1, lambda row: row.update(outcome="fine")), "line 2: outcome: "),
        (change(0, lambda row: row.pop("config")), "line 1: config: Field required"),
    ],
)
def test_bad_results_files_are_named(
    edit: Callable[[list[str]], list[str]], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "a", make_records(5))
    lines = (folder / "run.jsonl").read_text().splitlines()
    (folder / "run.jsonl").write_text("\n".join(edit(lines)))
    with pytest.raises(ConfigError, match=message):
        read_results(folder)


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "run.jsonl: cannot be read" in capsys.readouterr().err


def test_runs_of_the_command_are_compared(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spelled_out = ["--arrivals", "closed:8"]
    for name, step_s, arrivals in (("fast", 0.001, []), ("slow", 0.02, spelled_out)):
        url, _ = service(step_s=step_s)
        words = ["run", "--url", url, "--tasks", "40", "--max-tokens", "8", "--no-plots", *arrivals]
        assert main([*words, "--output", str(tmp_path / name)]) == 0
    out = tmp_path / "out"
    words = ["compare", str(tmp_path / "fast"), str(tmp_path / "slow"), "--output", str(out)]
    assert main(words) == 0
    document = json.loads((out / "compare.json").read_text())
    rows = {row["figure"]: row for row in document["rows"]}
    # How far the runs are apart depends on this machine; verdicts are tested on made-up runs above.
    assert rows["TPOT P50"]["is_paired"]
    assert document["a"][0]["load_sha256"] == document["b"][0]["load_sha256"]
    said = " ".join(capsys.readouterr().out.split())
    for verdict in ("better", "worse"):
        named = [
            f"{row['figure']} {row['group'] or ''}".strip()
            for row in document["rows"]
            if row["verdict"] == verdict
        ]
        is_said = f"{verdict}: {', '.join(named)}; " in said
        assert is_said or f"{verdict}: {len(named)} figures; " in said or not named
    for name in ("distributions.png", "ratios.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
