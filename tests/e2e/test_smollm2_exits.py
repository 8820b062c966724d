"""SmolLM2 leaves at the exits that the package has for it, and every stream is as it should be."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from quadriga.core.request import SamplingParams
from quadriga.llm import LLM
from tests.e2e.serve_command import ServeCommand, serve_command

pytestmark = [
    pytest.mark.slow,  # a service of its own
    pytest.mark.skipif("QUADRIGA_E2E_HTTP" in os.environ, reason="starts a service of its own"),
]
MODEL = "smollm2-135m-instruct"
NUM_LAYERS = 30
MAX_TOKENS = 24
QUESTIONS = [
    "What do bees make?",
    "How many days are there in a leap year?",
    "Write one sentence about a lighthouse.",
    "Name three fruits that are yellow.",
]


@pytest.fixture(scope="module")
def smollm2_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeCommand]:
    """Whatever pays on this machine: where answers must not depend on the load, exits are used."""
    words = (f"model={MODEL}", "exits.threshold=0.8", "deterministic=true")
    with serve_command(tmp_path_factory.mktemp("state"), *words) as command:
        yield command


def ask(smollm2_service: ServeCommand, question: str) -> tuple[str, dict[str, int]]:
    """The text of a streamed answer, and how many of its tokens ran how many layers."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0}
    body["messages"] = [{"role": "user", "content": question}]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with smollm2_service.http() as http:
        text = http.post("/v1/chat/completions", json=body).text
    words = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
    ]
    events = [json.loads(word) for word in words]
    pieces = [choice["delta"].get("content") or "" for e in events for choice in e["choices"]]
    exits: dict[str, int] = events[-1]["usage"]["quadriga"]["exits"]
    return "".join(pieces), exits


def test_streams_that_leave_early_are_those_of_the_engine_alone(
    smollm2_service: ServeCommand, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(QUESTIONS))
    words = ["--url", smollm2_service.url, "--prompts", str(prompts), "--arrivals", "closed:4"]
    words += ["--max-tokens", str(MAX_TOKENS), "--temperature", "0", "--no-plots", "--no-progress"]
    assert main(["run", *words, "--output", str(tmp_path / "run")]) == 0
    lines = map(json.loads, (tmp_path / "run" / "run.jsonl").read_text().splitlines())
    requests = [line for line in lines if line["kind"] == "request"]
    assert [fault for request in requests for fault in request["faults"]] == []
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        said = list(pool.map(lambda question: ask(smollm2_service, question), QUESTIONS))
    llm = LLM(MODEL, deterministic=True, exits={"threshold": 0.8}, engine={"compile": "off"})
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    alone = llm.generate(chats, SamplingParams(MAX_TOKENS, temperature=0.0), progress=False)
    llm.close()
    expected = [(o.text, {str(k): n for k, n in Counter(o.exit_layers).items()}) for o in alone]
    assert said == expected
    counted = sum((Counter(exits) for _, exits in said), Counter[str]())
    early = counted.total() - counted[str(NUM_LAYERS)]
    assert early > 0.1 * counted.total()
    assert set(counted) == {"15", "20", "25", "30"}
