"""After a run: every streamed text must be what its own token ids say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loadgen.checker import FaultKind, Outcome
from loadgen.client_http import HttpClient
from loadgen.runner import Record
from loadgen.target import detokenize

MAX_IN_FLIGHT = 8


async def verify_texts(client: HttpClient, model: str, records: Sequence[Record]) -> int:
    """Compare texts with `/detokenize` of their ids; a difference fails the record.

    Returns:
        How many choices were compared; those without token ids cannot be.

    Raises:
        ConfigError: The service has no usable `/detokenize`.
    """
    limit = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def verify(record: Record) -> int:
        compared = 0
        for index, choice in enumerate(record.verdict.choices):
            if not choice.token_ids:
                continue
            # The token that ends a sequence counts, but is not shown.
            hidden = 1 if choice.finish_reason == "stop" else 0
            ids = choice.token_ids[: len(choice.token_ids) - hidden]
            async with limit:
                expected = await detokenize(client, model, ids) if ids else ""
            compared += 1
            if expected != choice.text:
                at = _first_difference(expected, choice.text)
                record.verdict.add(
                    FaultKind.TEXT,
                    f"choice {index}: from character {at} on {choice.text[at : at + 40]!r}, its "
                    f"token ids say {expected[at : at + 40]!r}",
                )
        return compared

    passed = [record for record in records if record.verdict.outcome is Outcome.OK]
    return sum(await asyncio.gather(*(verify(record) for record in passed)))


def _first_difference(left: str, right: str) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
