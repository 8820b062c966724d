"""The service answers what a newcomer asks, through the doors and the demonstration they use."""

from __future__ import annotations

import io

from quadriga.client import Client
from serve_app.demo import NUM_TASKS, ask_tasks, chat_over_http, stream_over_grpc
from tests.e2e.conftest import Service


def test_the_demonstration_gets_right_answers(service: Service, sdk: Client) -> None:
    out = io.StringIO()
    counted = chat_over_http(service.base_url, service.model, out)
    assert counted == "Counting: " + " ".join(map(str, range(3, 31)))
    assert stream_over_grpc(sdk, service.model, out) == "Reversed: 9 8 7 6 5"
    score = ask_tasks(sdk, service.model, out)
    assert score.asked == NUM_TASKS
    assert score.faults(knows_tasks=True) == []
    assert f"{score.right} answers right" in out.getvalue()
