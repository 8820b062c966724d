"""The service gives right answers over HTTP, gRPC and in the demonstration."""

from __future__ import annotations

import io
import json

import httpx
import pytest

from quadriga.client import Client
from serve_app.cli.demo import NUM_TASKS, ask_tasks, stream_over_grpc, stream_over_http
from serve_app.cli.sample_request import sample_requests
from serve_app.openai.answers import QuadrigaUsage
from tests.e2e.conftest import Service


def test_the_demonstration_gets_right_answers(service: Service, sdk: Client) -> None:
    out = io.StringIO()
    samples = sample_requests(service.model)
    sorted_list = stream_over_http(service.base_url, service.model, samples.http, out)
    assert sorted_list.text == "Sorted: 3 7 19 42 88"
    assert sorted_list.faults("HTTP") == []
    reversed_list = stream_over_grpc(sdk, service.model, samples.grpc, out)
    assert reversed_list.text == "Reversed: 9 8 7 6 5"
    assert reversed_list.faults("gRPC") == []
    score = ask_tasks(sdk, service.model, out)
    assert score.asked == NUM_TASKS
    assert score.faults() == []
    assert f"{score.right} answers right" in out.getvalue()


FIRST_QUESTIONS = {
    "Sort: 3 1 2": "Sorted: 1 2 3",
    "Sort: 9 3 5": "Sorted: 3 5 9",
    "sort: 3, 1, 2": "Sorted: 1 2 3",
    "Please sort 4 2 7": "Sorted: 2 4 7",
    "Reverse: 1 2 3": "Reversed: 3 2 1",
    "count to 8": "Counting: 1 2 3 4 5 6 7 8",
}
"""What newcomers type, with and without a line end, and the right answers."""


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("question", FIRST_QUESTIONS)
def test_short_questions_in_other_words_are_answered_right(
    sdk: Client, question: str, end: str
) -> None:
    text = sdk.generate(question + end, max_tokens=40, temperature=0).text
    assert text.strip() == FIRST_QUESTIONS[question]


def test_a_stream_says_how_long_it_goes_on_and_the_usage_what_became_of_it(
    service: Service, sdk: Client
) -> None:
    """Of two choices each has its own; over HTTP and with the SDK alike."""
    body = {"model": service.model, "prompt": "Count from 3 to 40.\n", "n": 2, "max_tokens": 200}
    body |= {"temperature": 0, "stream": True}
    options = {"include_eta": True, "include_usage": True}
    with httpx.stream(
        "POST",
        f"{service.base_url}/v1/completions",
        json=body | {"stream_options": options},
        timeout=120.0,
    ) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    usage = chunks.pop()["usage"]
    news = [choice for chunk in chunks for choice in chunk["choices"]]
    said = [choice["eta"] for choice in news if choice["eta"] is not None]
    assert said, "the bundled models have length heads"
    for eta in said:
        assert 0 <= eta["lower"] <= eta["upper"] and 0 < eta["tokens"] <= 200
    assert any(eta["upper_seconds"] >= eta["seconds"] > 0 for eta in said if "seconds" in eta)
    assert all(choice["eta"] is None for choice in news if choice["finish_reason"])
    found = QuadrigaUsage.model_validate(usage["quadriga"])
    assert found.predicted is not None and {p.choice for p in found.predicted} == {0, 1}
    assert all(0 < p.lower <= p.tokens <= p.upper for p in found.predicted)
    assert (found.pauses, found.rebuilds) == (0, 0)

    pieces = list(sdk.stream("Count from 3 to 40.\n", include_eta=True, temperature=0.0))
    etas = [piece.eta for piece in pieces if piece.eta is not None]
    assert etas and all(eta.lower <= eta.upper for eta in etas)
    assert pieces[-1].eta is None and pieces[-1].usage is not None
    [of_sdk] = pieces[-1].usage.predicted
    assert of_sdk.tokens == pytest.approx(found.predicted[0].tokens, abs=0.06), "deterministic"
    assert pieces[-1].usage.pauses == 0
    plain = list(sdk.stream("Sort: 3 1 2\n", temperature=0.0))
    assert all(piece.eta is None for piece in plain), "it was not asked for"


def test_breaches_of_a_bounded_request_are_in_its_usage(http: httpx.Client, sdk: Client) -> None:
    """Over HTTP and with the SDK alike; the same with a strict policy has none."""
    prompt, asked = "Why is the sky blue?", {"max_tokens": 40, "temperature": 0.0}
    asked |= {"ignore_eos": True, "exit_threshold": 0.9999, "exit_policy": "bounded"}
    reply = http.post("/v1/completions", json=asked | {"prompt": prompt, "max_depth": 2})
    usage = QuadrigaUsage.model_validate(reply.raise_for_status().json()["usage"]["quadriga"])
    assert 0 < usage.breaches <= usage.exits["2"] <= 40
    of_sdk = sdk.generate(prompt, **asked, max_depth=2).usage
    assert (of_sdk.breaches, of_sdk.exits[2]) == (usage.breaches, usage.exits["2"])
    assert sdk.generate(prompt, **asked | {"exit_policy": "strict"}).usage.breaches == 0
