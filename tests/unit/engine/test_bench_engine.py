"""`loadgen bench engine`: its files, its driver, its verdicts, and one run from end to end."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from loadgen.bench.engines import command as bench
from loadgen.bench.engines.agreement import Agreement, compare
from loadgen.bench.engines.base import GeneratedTokens
from loadgen.bench.engines.floor import MachineRates, ModelCosts, floor_s
from loadgen.bench.engines.hf_transformers import TransformersPeer, load_model
from loadgen.bench.engines.offline import run_offline
from loadgen.bench.engines.peer_process import PeerProcess, interpreters
from loadgen.bench.engines.workloads import (
    Workload,
    WorkloadError,
    WorkloadRequest,
    load_workload,
    make_suite,
)
from quadriga.engine import load_runner
from quadriga.errors import ConfigError
from quadriga.llm import LLM
from tests.equivalence.models import build, make_spec, save

REQUEST = {"prompt": [4, 5], "max_tokens": 3}
GOOD: dict[str, Any] = {"name": "w", "concurrency": 2, "requests": [REQUEST]}


def mixed() -> Workload:
    asked = [WorkloadRequest([5 + i, 9, 11][: 1 + i % 3], 2 + (5 * i) % 9) for i in range(7)]
    return Workload("mixed", 3, asked)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


def test_a_workload_survives_its_file(tmp_path: Path) -> None:
    mixed().save(tmp_path / "w.json")
    assert load_workload(tmp_path / "w.json") == mixed()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a/b"}, "name"),
        ({"name": 3}, "name"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": True}, "concurrency"),
        ({"requests": []}, "requests"),
        ({"requests": [3]}, r"requests\.0 must be an object"),
        ({"requests": [{"prompt": [], "max_tokens": 1}]}, r"requests\.0\.prompt"),
        ({"requests": [{"prompt": [1, -2], "max_tokens": 1}]}, r"requests\.0\.prompt"),
        ({"requests": [{"prompt": [1], "max_tokens": 0}]}, r"requests\.0\.max_tokens"),
    ],
)
def test_a_bad_workload_names_its_fault(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "w.json"
    file.write_text(json.dumps(GOOD | change))
    with pytest.raises(WorkloadError, match=message):
        load_workload(file)


def test_the_suite_is_reproducible_and_fits() -> None:
    suite = make_suite(600, 512, seed=3)
    assert suite == make_suite(600, 512, seed=3)
    assert suite != make_suite(600, 512, seed=4)
    assert [w.name for w in suite] == ["batch-1", "batch-8", "batch-32", "mixed-8", "mixed-32"]
    assert all(w.longest <= 512 for w in suite)
    assert all(0 <= t < 600 for w in suite for r in w.requests for t in r.prompt)
    outputs = sorted(r.max_tokens for r in suite[-1].requests)
    assert len(outputs) == 64
    assert outputs[-1] > 4 * outputs[32]  # heavy tail


def compared(checkpoint: Path, ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> Agreement:
    return compare(load_model(checkpoint), [r.prompt for r in mixed().requests], ours, theirs)


def test_equal_to_transformers(checkpoint: Path) -> None:
    llm = LLM.over(load_runner(make_spec(checkpoint, num_rows=3)))
    ours = run_offline(llm, mixed())
    assert all(0 < t <= ours.seconds for t in ours.ttft_s)
    theirs = TransformersPeer(checkpoint, 1).generate(mixed())
    agreement = compared(checkpoint, ours.token_ids, theirs.token_ids)
    assert agreement.ties + len(agreement.different) == 0
    assert "7/7 requests equal" in agreement.describe()


def test_a_difference_is_not_taken_for_a_tie(checkpoint: Path) -> None:
    tokens = TransformersPeer(checkpoint, 1).generate(mixed()).token_ids
    changed = [list(t) for t in tokens]
    changed[4][1] = (changed[4][1] + 1) % 130
    changed[6].pop()
    agreement = compared(checkpoint, changed, tokens)
    last = len(tokens[6]) - 1
    assert [(request, at) for request, at, _ in agreement.different] == [(4, 1), (6, last)]
    assert agreement.different[0][2] > 1e-4


def test_percentiles_of_first_tokens_lie_between_the_values_around_them() -> None:
    results = bench.EngineResults(memory_bytes={"quadriga": 1})
    results.add("quadriga", "w", GeneratedTokens(2.0, [0.0, 1.0], [[1], [1]]))
    workload = Workload("w", 2, [WorkloadRequest([1], 1)] * 2)
    [line] = bench._json_lines(results, [workload])
    assert (line["ttft_p50"], line["ttft_p99"]) == (0.5, 0.99)


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    results = bench.EngineResults()
    for ours_s, theirs_s in ((1.0, 3.0), (4.0, 4.0), (2.0, 8.0)):
        for peer, seconds in (("quadriga", ours_s), ("fast", theirs_s), ("slow", 9.0)):
            results.add(peer, "w", GeneratedTokens(seconds, [], [], 2.0))
    assert results.over_fastest(["slow", "fast"], "w", "seconds") == 3.0
    assert results.over_fastest(["slow", "fast"], "w", "cpu_s") == 1.0
    assert math.isnan(results.over_fastest([], "w", "seconds"))


def test_floor_counts_bytes_and_operations() -> None:
    costs = ModelCosts(weights=1000, head=100, kv_values=10, attention_flops=40)
    workload = Workload("w", 2, [WorkloadRequest([1] * 4, 3), WorkloadRequest([1] * 4, 3)])
    context = 2 * (5 + 6)
    by_bytes = floor_s(workload, costs, MachineRates(bytes_per_s=1.0, flops_per_s=1e30))
    assert by_bytes == 4 * (1000 * 3 + 10 * context)
    by_flops = floor_s(workload, costs, MachineRates(bytes_per_s=1e30, flops_per_s=1.0))
    assert by_flops == 2 * (900 * 12 + 100 * 6) + 40 * (context + 16), "a head for each output"


def test_from_end_to_end(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for workload in (mixed(), Workload("one", 1, [WorkloadRequest([3, 4, 5], 6)])):
        files.append(str(tmp_path / f"{workload.name}-in.json"))
        workload.save(Path(files[-1]))
    words = ["bench", "engine", "--checkpoint", str(checkpoint), "--workload", *files]
    words += ["--threads", "1", "--peer", "transformers", "--dump", str(tmp_path / "dump")]
    assert main(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(e["peer"], e["workload"], e["tokens"]) for e in lines] == [
        ("quadriga", "mixed", 38),
        ("transformers", "mixed", 38),
        ("quadriga", "one", 6),
        ("transformers", "one", 6),
    ]
    for entry in lines:
        names = "peer workload tokens seconds tokens_per_s cpu_seconds ttft_p50 ttft_p99"
        assert set(entry) == {*names.split(), "memory_bytes"}
        assert 0 < entry["ttft_p50"] <= entry["ttft_p99"] <= entry["seconds"]
        assert entry["tokens_per_s"] == pytest.approx(entry["tokens"] / entry["seconds"], rel=1e-2)
    dumped = json.loads((tmp_path / "dump" / "mixed.json").read_text())
    assert dumped == TransformersPeer(checkpoint, 1).generate(mixed()).token_ids


def test_without_a_workload_the_suite_is_measured(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "make_suite", lambda *args, **kwargs: [mixed()])
    monkeypatch.setattr(
        bench, "is_installed", lambda peer, _: peer in (bench.OURS, bench.REFERENCE)
    )
    assert main(["bench", "engine", "--checkpoint", str(checkpoint), "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "against transformers: 7/7 requests equal" in out
    assert json.loads(out.splitlines()[-1])["weights"] == "auto"


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload("w", 1, [WorkloadRequest([130], 2)]), "token id 130 is beyond the 130"),
        (Workload("w", 1, [WorkloadRequest([1] * 90, 7)]), "97 tokens are beyond the 96"),
    ],
)
def test_what_the_model_cannot_take(
    checkpoint: Path, tmp_path: Path, workload: Workload, message: str
) -> None:
    file = tmp_path / "w.json"
    workload.save(file)
    with (
        PeerProcess("quadriga", checkpoint, 1, sys.executable) as peer,
        pytest.raises(ConfigError, match=message),
    ):
        peer.prepare([file])


def test_a_peer_that_ended_unasked_is_named(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(ConfigError, match="ended before it was asked"))
        peer = stack.enter_context(PeerProcess("quadriga", tmp_path, 1, "false"))
        peer._process.wait(60)
        peer.prepare([])


def test_usage_errors(checkpoint: Path) -> None:
    assert main(["bench", "engine", "--checkpoint", "quadriga-s", "--workload", "nowhere"]) == 2
    pythons = interpreters([])
    assert bench.measure([bench.LLAMA], [], checkpoint, 1, 1, pythons).runs == {}
    with pytest.raises(ConfigError, match=r"llama\.cpp: llama\d+ is no GGUF file"):
        bench.measure([bench.LLAMA], [], checkpoint, 1, 1, pythons, needed=[bench.LLAMA])
    with pytest.raises(ConfigError, match="NAME one of"):
        interpreters(["nobody=/usr/bin/python3"])
    assert bench.OURS in interpreters([])
