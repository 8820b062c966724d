"""A client that resumes has the whole answer, or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import tests.reliability.load.resuming
from loadgen.checker import Verdict
from loadgen.checker.verdict import Choice, FaultKind, Outcome, Write
from loadgen.load.workload import RequestSpec
from loadgen.wire.capture import Capture, Transport
from tests.reliability.load.resuming import over_http
from tests.reliability.load.streams import make_streams

SPEC = make_streams(1, max_tokens=6, seed=0)[0]


def part(tokens: list[int], *faults: FaultKind, status: int = 200, ends: bool = False) -> Verdict:
    choice = Choice(token_ids=tokens, writes=[Write(1.0, len(tokens))] if tokens else [])
    choice.finish_reason = "length" if ends else None
    verdict = Verdict(choices=[choice], status=status)
    for fault in faults:
        verdict.add(fault, "…")
    return verdict


class Service:
    """Answers one attempt after the other."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)
        self.headers: list[Mapping[str, str]] = []

    def prepare(
        self, spec: RequestSpec, model: str, request_id: str, headers: Mapping[str, str]
    ) -> Any:
        self.headers.append(headers)

        async def send() -> Capture:
            return Capture(Transport.HTTP, sent_s=0.0)

        return send

    async def ask(self) -> Verdict:
        judged = iter(self.verdicts)
        client: Any = self
        _, verdict = await over_http(client, lambda *_: next(judged), SPEC, "m")
        return verdict


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.reliability.load.resuming, "PAUSE_S", 0.0)


async def test_a_whole_answer_is_judged_as_ever() -> None:
    whole = part([1, 2, 3, 4, 5, 6], ends=True)
    assert await Service(whole).ask() is whole


async def test_the_parts_of_a_broken_answer_are_one() -> None:
    service = Service(
        part([1, 2], FaultKind.CONNECTION, FaultKind.DONE),
        part([], FaultKind.STATUS, status=503),
        part([3, 4, 5, 6], FaultKind.GAP, FaultKind.LENGTH, FaultKind.USAGE, ends=True),
    )
    verdict = await service.ask()
    assert verdict.outcome is Outcome.OK, verdict.faults
    assert verdict.choices[0].token_ids == [1, 2, 3, 4, 5, 6]
    assert verdict.extension == {"rebuilds": 2}
    assert [h.get("x-resume-index") for h in service.headers] == [None, "2", "2"]
    assert len({h["idempotency-key"] for h in service.headers}) == 1


async def test_after_an_orderly_no_it_begins_from_the_beginning() -> None:
    service = Service(
        part([1, 2], FaultKind.CONNECTION),
        part([], FaultKind.STATUS, status=404),
        part([1, 2, 3, 4, 5, 6], ends=True),
    )
    verdict = await service.ask()
    assert verdict.outcome is Outcome.OK
    assert verdict.choices[0].token_ids == [1, 2, 3, 4, 5, 6]
    assert "x-resume-index" not in service.headers[2]


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (part([3, 4, 5], ends=True), FaultKind.LENGTH),
        (part([2, 3, 4, 5, 6], FaultKind.DUPLICATE, ends=True), FaultKind.DUPLICATE),
        (part([3], FaultKind.TIMEOUT), FaultKind.TIMEOUT),
    ],
)
async def test_what_is_wrong_with_the_rest_is_found(last: Verdict, kind: FaultKind) -> None:
    verdict = await Service(part([1, 2], FaultKind.CONNECTION), last).ask()
    assert verdict.outcome is Outcome.FAILED
    assert kind in {f.kind for f in verdict.faults}
