"""Logs as JSON: one object a line, fields as keys, and never a word of what clients say."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from quadriga.observability import load_progress
from quadriga.observability.logs import OURS, Format, configure_logging
from tests.unit.serve_app.conftest import ANSWER, MakeStand, make_stand

__all__ = ["make_stand"]
CANARY = "zebra-canary-4711"
GIVEN = {"request_id": "r-1", "took_s": 0.12345678, "_added": 1}
"""What a caller gives, and a private field, as Ray adds to every record of its processes."""


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    root, levels = logging.getLogger(), {n: logging.getLogger(n).level for n in OURS}
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def logged(kind: Format, level: str = "debug") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(kind, level, process="q:decode:0:a", stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_with_the_records_own_fields() -> None:
    stream = logged("json")
    logger = logging.getLogger("quadriga.test")
    logger.info("took %d\nsteps", 3, extra=GIVEN | {"n": None})
    [line] = lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "quadriga.test",
        "process": "q:decode:0:a",
        "message": "took 3\nsteps",
        "request_id": "r-1",
        "took_s": 0.123457,
        "n": None,
    }


def test_what_json_cannot_hold_is_text() -> None:
    stream = logged("json")
    extra = {"bad": float("nan"), "thing": {1, 2}, "long": "x" * 100_000}
    logging.getLogger("actors.test").warning("%s", "y" * 100_000, extra=extra)
    [line] = lines(stream)
    assert (line["bad"], line["thing"]) == ("nan", "{1, 2}")
    assert len(line["message"]) == 4000


def test_exceptions_are_inside_their_line() -> None:
    stream = logged("json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("serve_app.test").exception("it failed")
    [line] = lines(stream)
    assert "ValueError: broken" in line["exception"]


def test_text_has_the_fields_behind_the_message() -> None:
    stream = logged("text")
    logging.getLogger("quadriga.test").info("over", extra=GIVEN)
    assert stream.getvalue().endswith("INFO over request_id=r-1 took_s=0.123457\n")


def test_levels_are_ours_and_a_second_call_replaces_the_first() -> None:
    first, second = logged("json", "debug"), logged("json", "warning")
    for name in ("quadriga.a", "actors.b", "elsewhere"):
        logging.getLogger(name).info("no")
        logging.getLogger(name).warning("yes")
    assert first.getvalue() == ""
    assert [line["message"] for line in lines(second)] == ["yes"] * 3


async def test_a_request_leaves_one_line_and_no_word_of_its_text(make_stand: MakeStand) -> None:
    stand = await make_stand()
    stream = logged("json")
    for fields in (
        {"prompt": CANARY},
        {"prompt": CANARY, "stream": True, "user": CANARY, "stop": [CANARY]},
        {"prompt": CANARY, "max_tokens": -1},
        {"prompt": {CANARY: CANARY}},
        {"prompt": CANARY, "model": "not-served"},
        {"prompt": CANARY * 3000},
    ):
        await stand.complete(**fields)
    chat = {"model": "quadriga-s", "messages": [{"role": "user", "content": CANARY}]}
    await stand.http.post("/v1/chat/completions", json=chat)
    await stand.http.post("/v1/completions", content=f'{{"prompt": "{CANARY}'.encode())
    await stand.http.post("/tokenize", json={"prompt": CANARY})
    text = stream.getvalue()
    over = [line for line in lines(stream) if line["message"] == "request over"]
    assert len(over) == 3
    for line in over:
        assert len(line["request_id"]) == 32
        assert (line["model"], line["result"]) == ("quadriga-s", "stop")
        assert line["took_s"] >= line["ttft_s"] > 0
        assert line["num_output_tokens"] > 1
        assert line["replicas"]
    for word in (CANARY, *ANSWER.split()):
        assert len(word) < 4 or word not in text, f"the log says {word!r}"


async def test_the_line_of_each_request_can_be_turned_off(make_stand: MakeStand) -> None:
    stand = await make_stand(config={"logging.requests": False})
    stream = logged("json")
    assert (await stand.complete()).status_code == 200
    assert "request over" not in stream.getvalue()


def test_the_progress_of_loading_is_told_by_stage_and_not_for_every_tensor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", load_progress.__name__)
    progress = load_progress.LoadProgress()
    progress.begin("reads the weights", 14_000_000_000)
    assert progress.text == "reads the weights: 0%"
    progress.add(3_500_000_000)
    assert progress.text == "reads the weights: 25%"
    progress.add(20_000_000_000)
    assert progress.text == "reads the weights: 100%", "sizes are only about right"
    progress.begin("records CUDA graphs")
    progress.add(5)
    assert progress.text == "records CUDA graphs", "layers that come later are another matter"
    assert caplog.messages == ["reads the weights: 0%", "records CUDA graphs"]
