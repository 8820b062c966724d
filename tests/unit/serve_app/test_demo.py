"""The demonstration names what is wrong with a service, and ends with status 1."""

from __future__ import annotations

import pytest

from quadriga.checkpoint import packaged_models
from serve_app.cli.demo import DemoAnswer, Score, _configuration


def test_the_demonstration_names_what_is_wrong() -> None:
    mostly_wrong = Score(asked=40, ended=40, right=8, tokens=900)
    assert mostly_wrong.faults() == ["8 of 40 answers are right; this model gives at least 80%"]
    cut = Score(asked=40, ended=39, right=38, tokens=900)
    assert cut.faults() == ["1 of 40 streams had no finish reason"]


def test_a_shown_answer_needs_text_and_a_finish_reason() -> None:
    assert DemoAnswer("Paris.", "stop").faults("HTTP") == []
    assert DemoAnswer("Par", None).faults("HTTP") == ["the stream over HTTP had no finish reason"]
    assert DemoAnswer(" ", "length").faults("gRPC") == ["the answer over gRPC is empty"]


def test_a_model_with_checkable_answers_is_served_beside_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packaged_models, "DEFAULT_MODEL", "quadriga-l")
    models = [pool.model for pool in _configuration(["engine.compile=off"]).pools]
    assert models == ["quadriga-l", "quadriga-s"]
    monkeypatch.setattr(packaged_models, "DEFAULT_MODEL", "quadriga-s")
    assert [pool.model for pool in _configuration([]).pools] == ["quadriga-s"]


@pytest.mark.parametrize("setting", ["model=quadriga-l", "decode_replicas=3", "exits.layers=none"])
def test_settings_of_a_pool_leave_one_pool(setting: str) -> None:
    assert len(_configuration([setting]).pools) == 1
