"""Judge id, created and model: constant through a response, and what was asked for."""

from __future__ import annotations

from typing import Any

from loadgen.checker.verdict import Expectation, FaultKind, Verdict


def read_identity(
    document: dict[str, Any], expect: Expectation, verdict: Verdict, where: str
) -> None:
    """Check id, created and model of a first or only document, and keep them."""
    response_id, created, model = (document.get(name) for name in ("id", "created", "model"))
    if not isinstance(response_id, str) or not response_id:
        verdict.add(FaultKind.IDENTITY, f"{where}: id is {response_id!r:.80}")
    if type(created) is not int:
        verdict.add(FaultKind.IDENTITY, f"{where}: created is {created!r:.80}")
    if not isinstance(model, str) or not model:
        verdict.add(FaultKind.IDENTITY, f"{where}: model is {model!r:.80}")
    elif expect.model is not None and model != expect.model:
        verdict.add(FaultKind.IDENTITY, f"{where}: model is {model!r}, not {expect.model!r}")
    verdict.response_id = response_id if isinstance(response_id, str) else None
    verdict.model = model if isinstance(model, str) else None
