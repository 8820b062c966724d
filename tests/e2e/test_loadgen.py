"""The load generator against the real service: every response passes the strict checker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loadgen.__main__ import main

if TYPE_CHECKING:
    from tests.e2e.conftest import Service

ROWS = ("0,12,30", "0.1,300,8", "0.2,25,60", "0.2,700,5", "0.3,1,1", "0.5,90,40", "0.9,4,25")


def run(service: Service, tmp_path: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; return its exit status and the lines of its results."""
    common = ["--url", service.base_url, "--grpc", service.grpc_target, "--no-plots"]
    common += ["--api-key", service.key, "--output", str(tmp_path), "--timeout-s", "120"]
    status = main(["run", *common, *words])
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
def test_tasks_in_every_form_are_checked_and_scored(
    transport: str, service: Service, tmp_path: Path
) -> None:
    words = ["--tasks", "24", "--max-tokens", "120", "--transport", transport]
    words += ["--endpoint", "both", "--stream", "both", "--arrivals", "closed:6"]
    status, (_, *requests, summary) = run(service, tmp_path, *words)
    assert [fault for request in requests for fault in request["faults"]] == []
    assert status == 0
    assert sum(judged for _, judged in summary["scores"].values()) == 24


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_several_sampled_choices_are_checked(
    transport: str, service: Service, tmp_path: Path
) -> None:
    words = ["--tasks", "6", "--max-tokens", "40", "--transport", transport]
    words += ["--choices", "3", "--temperature", "0.8", "--endpoint", "both"]
    status, (_, *requests, _summary) = run(service, tmp_path, *words)
    assert [fault for request in requests for fault in request["faults"]] == []
    assert status == 0
    assert all(len(request["finish_reasons"]) == 3 for request in requests)
