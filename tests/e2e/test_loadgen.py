"""The load generator against the real service: every response passes the strict checker."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loadgen.__main__ import main

if TYPE_CHECKING:
    from tests.e2e.conftest import Service

ROWS = ("0,12,30", "0.1,300,8", "0.2,25,60", "0.2,700,5", "0.3,1,1", "0.5,90,40", "0.9,4,25")


def run(
    service: Service, tmp_path: Path, *words: str, command: str = "run"
) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; return its exit status and the lines of its results."""
    common = ["--url", service.base_url, "--grpc", service.grpc_target, "--no-plots"]
    common += ["--api-key", service.key, "--output", str(tmp_path), "--timeout-s", "120"]
    status = main([command, *common, *words])
    text = (tmp_path / "run.jsonl").read_text(encoding="utf-8")
    return status, [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_trace_keeps_its_lengths(transport: str, service: Service, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(("arrival_s,input_tokens,output_tokens", *ROWS)))
    words = ["--trace", str(trace), "--transport", transport]
    status, (_, *requests, summary) = run(service, tmp_path, *words)
    assert [fault for request in requests for fault in request["faults"]] == []
    assert status == 0
    lengths = [tuple(map(int, row.split(",")[1:])) for row in ROWS]
    found = [(request["prompt_tokens"], request["completion_tokens"]) for request in requests]
    assert found == lengths
    assert summary["ok"] == len(ROWS)


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_tasks_in_every_form_and_sampled_choices_are_checked_and_scored(
    transport: str, service: Service, tmp_path: Path
) -> None:
    tasks = "--tasks 24 --max-tokens 120 --stream both --arrivals closed:6"
    choices = "--tasks 6 --max-tokens 40 --choices 3 --temperature 0.8"
    for words in (tasks, choices):
        common = ["--transport", transport, "--endpoint", "both"]
        status, (_, *requests, summary) = run(service, tmp_path, *words.split(), *common)
        assert [fault for request in requests for fault in request["faults"]] == []
        assert status == 0
        if words == tasks:
            assert sum(judged for _, judged in summary["scores"].values()) == 24
    assert all(len(request["finish_reasons"]) == 3 for request in requests)


def test_conversations_are_followed_over_both_endpoints(service: Service, tmp_path: Path) -> None:
    """The checker compares every prompt's length with that of the conversation told so far."""
    words = ["--sessions", "4", "--turns", "3", "--endpoint", "both", "--stream", "both"]
    words += ["--turn-tokens", "20", "--answer-tokens", "4-9", "--think-s", "0.02"]
    status, (_, *requests, summary) = run(service, tmp_path, *words, "--transport", "grpc")
    assert [fault for request in requests for fault in request["faults"]] == []
    assert status == 0
    assert len(requests) == 12 and summary["unsent"] == {}
    forms = {(request["endpoint"], request["stream"]) for request in requests}
    assert forms == set(itertools.product(("completions", "chat"), (True, False)))
    for before, after in itertools.pairwise(requests):
        if after["session"] == before["session"]:
            assert after["sent_s"] >= before["ended_s"]
            if after["endpoint"] == "completions":
                told = before["prompt_tokens"] + before["completion_tokens"]
                assert after["prompt_tokens"] == told + 20


def test_a_conversation_stays_inside_the_context(service: Service, tmp_path: Path) -> None:
    words = ["--sessions", "1", "--turns", "3", "--turn-tokens", "700", "--answer-tokens", "5"]
    status, (head, *requests, _) = run(service, tmp_path, *words, "--think-s", "0")
    assert [fault for request in requests for fault in request["faults"]] == []
    assert status == 0
    context = head["config"]["max_model_len"]
    assert [r["dropped_turns"] for r in requests] == [0, 0, 1]
    assert [r["prompt_tokens"] for r in requests] == [700, 1405, 1405]
    assert context < 3 * 700  # or nothing had to be left out


@pytest.mark.parametrize(
    ("transport", "slo_tpot_s", "kept", "broken"),
    [("http", "0.00001", None, 1.0), ("grpc", "60", 4.0, None)],
)
def test_a_ramp_ends_where_the_slo_breaks(
    transport: str,
    slo_tpot_s: str,
    kept: float | None,
    broken: float | None,
    service: Service,
    tmp_path: Path,
) -> None:
    words = ["--tasks", "40", "--max-tokens", "4", "--concurrency", "1-4", "--steps", "2"]
    words += ["--step-s", "2", "--slo-ttft-s", "60", "--slo-tpot-s", slo_tpot_s]
    words += ["--transport", transport, "--warmup", "1"]
    for attempt in range(5):  # of a process that stands still a step may see no request at all
        folder = tmp_path / str(attempt)
        status, (head, *lines) = run(service, folder, *words, command="ramp")
        assert [f for line in lines if line["kind"] == "request" for f in line["faults"]] == []
        steps = [line for line in lines if line["kind"] == "step"]
        if all(step["requests"] > 0 for step in steps):
            break
    assert status == 0
    assert head["kind"] == "ramp"
    (capacity,) = [line for line in lines if line["kind"] == "capacity"]
    assert (capacity["kept"], capacity["broken"]) == (kept, broken)
    assert [step["kept"] for step in steps] == ([True, True] if kept else [False])
    assert all(step["ok"] > 0 and step["ttft"]["p50"] > 0 for step in steps)
