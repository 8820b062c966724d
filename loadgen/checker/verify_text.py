"""After a run: every text must be what its own token ids say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from loadgen.checker import Choice, FaultKind, Outcome
from loadgen.runner import Record
from loadgen.target import detokenize
from loadgen.wire.client_http import HttpClient

MAX_IN_FLIGHT = 8
# How tokens look that steer the model and are not shown: <|end|>, </s>, <pad>.
_SPECIAL = re.compile(r"<[^<>\s]+>")


async def verify_texts(client: HttpClient, model: str, records: Sequence[Record]) -> int:
    """Compare texts with `/detokenize` of their ids; a difference fails the record.

    Returns:
        How many choices were compared; those without token ids cannot be, nor those that echo
        their prompt.

    Raises:
        ConfigError: The service has no usable `/detokenize`.
    """
    verifier = _Verifier(client, model)
    passed = [
        record
        for record in records
        if record.verdict.outcome is Outcome.OK and not record.spec.extra.get("echo")
    ]
    return sum(await asyncio.gather(*(verifier.verify(record) for record in passed)))


class _Verifier:
    """Detokenises through the service, a few calls at a time."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self.client = client
        self.model = model
        self.limit = asyncio.Semaphore(MAX_IN_FLIGHT)
        self.special: dict[int, bool] = {}

    async def verify(self, record: Record) -> int:
        compared = 0
        for index, choice in enumerate(record.verdict.choices):
            if not choice.token_ids:
                continue
            compared += 1
            expected = await self._expected(choice)
            # A stop string cuts the text anywhere inside its last tokens.
            is_cut = choice.finish_reason == "stop" and bool(record.spec.extra.get("stop"))
            if expected != choice.text and not (is_cut and expected.startswith(choice.text)):
                at = _first_difference(expected, choice.text)
                record.verdict.add(
                    FaultKind.TEXT,
                    f"choice {index}: from character {at} on {choice.text[at : at + 40]!r}, its "
                    f"token ids say {expected[at : at + 40]!r}",
                )
        return compared

    async def _expected(self, choice: Choice) -> str:
        # The token that ends a sequence counts, but is not shown.
        ids = choice.token_ids[:-1] if choice.finish_reason == "stop" else choice.token_ids
        text = await self._text(ids)
        if text == choice.text:
            return text
        # Nor are the special tokens that a model emits when its end is ignored.
        return await self._text([token for token in ids if not await self._is_special(token)])

    async def _is_special(self, token: int) -> bool:
        if token not in self.special:
            self.special[token] = bool(_SPECIAL.fullmatch(await self._text([token])))
        return self.special[token]

    async def _text(self, ids: list[int]) -> str:
        if not ids:
            return ""
        async with self.limit:
            return await detokenize(self.client, self.model, ids)


def _first_difference(left: str, right: str) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
