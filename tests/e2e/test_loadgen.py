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


def run(service: Service, tmp_path: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; return its exit status and the lines of its results."""
    common = ["--url", service.base_url, "--grpc", service.grpc_target, "--no-plots"]
    common += ["--api-key", service.key, "--output", str(tmp_path), "--timeout-s", "120"]
    status = main(["run", *common, *words])
    text = (tmp_path / "run.jsonl").read_text(encoding="utf-8")
    return status, [json.loads(line) for line in text.splitlines()]


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
