"""After a run: every text must be what its own token ids say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from itertools import zip_longest

from loadgen.checker import AnswerChoice, FaultKind, Outcome
from loadgen.runner import Record
from loadgen.target import Target, detokenize
from loadgen.wire.client_http import HttpClient

MAX_IN_FLIGHT = 8
# How most tokens look that steer a model and are not shown: <|end|>, </s>, <pad>.
_SPECIAL = re.compile(r"<[^<>\s]+>")


async def verify_texts(client: HttpClient, target: Target, records: Sequence[Record]) -> int:
    """Compare texts with `/detokenize` of their ids; a difference fails the record.

    Returns:
        How many choices were compared; those without token ids cannot be, nor those whose text
        begins with their prompt or lacks the calls of tools.

    Raises:
        ConfigError: The service has no usable `/detokenize`.
    """
    verifier = _Verifier(client, target)
    passed = [
        record
        for record in records
        if record.verdict.outcome is Outcome.OK
        and not record.spec.extra.get("echo")
        and not record.spec.extra.get("tools")
    ]
    return sum(await asyncio.gather(*(verifier.verify(record) for record in passed)))


class _Verifier:
    """Detokenises through the service, a few calls at a time."""

    def __init__(self, client: HttpClient, target: Target) -> None:
        self.client = client
        self.target = target
        self.limit = asyncio.Semaphore(MAX_IN_FLIGHT)
        self.special: dict[int, bool] = {}

    async def verify(self, record: Record) -> int:
        compared = 0
        stop = record.spec.extra.get("stop") or ()
        stops = [stop] if isinstance(stop, str) else stop
        for index, choice in enumerate(record.verdict.choices):
            if not choice.token_ids:
                continue
            compared += 1
            text, expected = choice.text, await self._expected(choice, stops)
            if text != expected:
                pairs = enumerate(zip_longest(expected, text))
                at = next(index for index, (said, shown) in pairs if said != shown)
                record.verdict.add(
                    FaultKind.TEXT,
                    f"choice {index}: from character {at} on {text[at : at + 40]!r}, its "
                    f"token ids say {expected[at : at + 40]!r}",
                )
        return compared

    async def _expected(self, choice: AnswerChoice, stops: Sequence[str]) -> str:
        """Return what the ids say; of several readings the one that is the text."""
        ids, text = choice.token_ids, choice.text
        if choice.finish_reason == "stop":
            if stops:
                for whole in await self._readings(ids):
                    if any(whole.startswith(text + stop) for stop in stops):
                        return text
            ids = ids[:-1]  # the token that ends a sequence counts, but is not shown
        readings = await self._readings(ids)
        return text if text in readings else readings[-1]

    async def _readings(self, ids: list[int]) -> list[str]:
        """Return what the ids may say: other services do not tell which tokens they hide."""
        whole = await self._text(ids)
        if self.target.is_ours or not _SPECIAL.search(whole):
            return [whole]
        return [whole, await self._text([t for t in ids if not await self._is_special(t)])]

    async def _is_special(self, token: int) -> bool:
        if token not in self.special:
            self.special[token] = bool(_SPECIAL.fullmatch(await self._text([token])))
        return self.special[token]

    async def _text(self, ids: list[int]) -> str:
        if not ids:
            return ""
        async with self.limit:
            return await detokenize(self.client, self.target.model, ids)
