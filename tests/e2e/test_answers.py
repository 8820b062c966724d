"""The service gives right answers over HTTP, gRPC and in the demonstration."""

from __future__ import annotations

import io

import pytest

from quadriga.client import Client
from serve_app.cli.demo import NUM_TASKS, ask_tasks, stream_over_grpc, stream_over_http
from serve_app.cli.sample_request import sample_requests
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
