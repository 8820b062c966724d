"""The demonstration says what is wrong with a service, and ends with status 1."""

from __future__ import annotations

from serve_app.demo import Score


def test_the_demonstration_names_what_is_wrong() -> None:
    mostly_wrong = Score(asked=40, ended=40, right=8, tokens=900)
    assert mostly_wrong.faults(knows_tasks=True) == [
        "8 of 40 answers are right; this model gives at least 80%"
    ]
    assert mostly_wrong.faults(knows_tasks=False) == []
    cut = Score(asked=40, ended=39, right=38, tokens=900)
    assert cut.faults(knows_tasks=False) == ["1 of 40 streams had no finish reason"]
