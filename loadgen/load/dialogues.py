"""Conversations under way: every turn's request, made from the answers so far.

Over `completions` a conversation is token ids, so that its lengths are exact; over `chat` it is
messages, whose tokens the service's own `/tokenize` counts while the user thinks. Where a
conversation outgrows the context, its oldest turns are left out, as chat applications do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from loadgen.checker import Outcome
from loadgen.load.sessions import Conversation, Turn
from loadgen.load.workload import RequestSpec
from loadgen.runner import Record
from loadgen.target import Target, count_chat
from loadgen.wire.client_http import HttpClient
from quadriga.errors import ConfigError

_MAX_COUNTS_IN_FLIGHT = 8
_CONTEXT = "context"
_TOO_LONG = "a turn and its answer exceed the context even alone"

Message = tuple[str, str]
"""(role, text)."""


class Dialogues:
    """Makes every request of the sessions; `follow` is what the runner asks.

    Args:
        template: What all requests have in common; its seed is that of the first request.

    Attributes:
        num_requests: If every conversation goes on to its end.
        unsent: Why conversations were broken off → turns that were therefore not sent.
    """

    def __init__(
        self,
        sessions: Sequence[Conversation],
        template: RequestSpec,
        target: Target,
        http: HttpClient,
    ) -> None:
        self.sessions = sessions
        self.template = template
        self.target = target
        self.http = http
        self.unsent: Counter[str] = Counter()
        self.num_requests = sum(len(session.turns) for session in sessions)
        lengths = (len(session.turns) for session in sessions)
        self._first_index = [0, *itertools.accumulate(lengths)]
        # Session number → the turns still told, each with its answer.
        self._request_log: dict[int, list[tuple[Turn, str | list[int]]]] = {}

    async def openings(self) -> list[RequestSpec]:
        """Return the first request of every conversation.

        Raises:
            ConfigError: One does not fit the context, or `/tokenize` is not usable.
        """
        limit = asyncio.Semaphore(_MAX_COUNTS_IN_FLIGHT)

        async def opening(number: int) -> RequestSpec:
            async with limit:
                return await self._request(number, 0, [])

        numbers = range(len(self.sessions))
        return list(await asyncio.gather(*(opening(number) for number in numbers)))

    async def follow(self, record: Record) -> RequestSpec | None:
        """Return the next turn of a conversation; None where it is over or cannot go on."""
        number, turn = record.spec.session, record.spec.turn
        if number is None:
            return None
        turns = self.sessions[number % len(self.sessions)].turns
        told = self._request_log.pop(number, [])
        if turn + 1 == len(turns):
            return None
        try:
            told.append((turns[turn], self._answer(record)))
            request = await self._request(number, turn + 1, told)
        except ConfigError as exc:
            reason = _TOO_LONG if exc.param == _CONTEXT else exc.message
            self.unsent[reason] += len(turns) - turn - 1
            return None
        self._request_log[number] = told
        return replace(request, extra=record.spec.extra)  # its cached prefix is its own turns

    def _answer(self, record: Record) -> str | list[int]:
        """Return what the conversation goes on from: of several choices the first.

        Raises:
            ConfigError: There is nothing to go on from.
        """
        outcome = record.verdict.outcome
        if outcome is not Outcome.OK:
            raise ConfigError(
                "a request before was refused"
                if outcome is Outcome.REFUSED
                else "a request before failed"
            )
        choice = record.verdict.choices[0]
        if record.spec.endpoint == "chat":
            return choice.text
        if not choice.token_ids:
            raise ConfigError("the service reports no token ids; use --endpoint chat")
        # The token that ended the answer is no part of the text.
        return choice.token_ids[:-1] if choice.finish_reason == "stop" else choice.token_ids

    async def _request(
        self, number: int, turn: int, told: list[tuple[Turn, str | list[int]]]
    ) -> RequestSpec:
        """Return the request of a turn; drops the oldest of `told` until it fits the context.

        Raises:
            ConfigError: It does not fit even alone, or its tokens cannot be counted.
        """
        cycle, base = divmod(number, len(self.sessions))
        session = self.sessions[base]
        said = session.turns[turn]
        context = self.target.max_model_len
        while True:
            prompt, history, num_tokens = await self._write(session, told, said)
            if context is None or num_tokens + said.max_tokens <= context:
                break
            if not told:
                raise ConfigError(
                    f"turn {turn} of conversation {number}: {num_tokens} tokens and an "
                    f"answer of {said.max_tokens} exceed the context of {context} even alone; "
                    "lower --turn-tokens, --answer-tokens or --max-tokens",
                    param=_CONTEXT,
                )
            del told[0]
        index = cycle * self.num_requests + self._first_index[base] + turn
        return replace(
            self.template,
            index=index,
            arrival_s=session.arrival_s,
            prompt=prompt,
            history=history,
            # An alias leaves the model open, and with it the tokens.
            prompt_tokens=num_tokens if self.target.expected_model else None,
            max_tokens=said.max_tokens,
            endpoint="chat" if session.is_chat else "completions",
            stream=session.stream,
            ignore_eos=session.ignore_eos,
            seed=(self.template.seed or 0) + index,
            session=number,
            turn=turn,
            dropped_turns=turn - len(told),
            think_s=said.think_s,
        )

    async def _write(
        self, session: Conversation, told: list[tuple[Turn, str | list[int]]], said: Turn
    ) -> tuple[str | list[int], tuple[Message, ...], int]:
        """Return a conversation as a prompt, what goes ahead of it, and how many tokens it is."""
        if isinstance(said.content, str):
            history: list[Message] = []
            if session.system is not None:
                history.append(("system", session.system))
            for turn, answer in told:
                history += [("user", str(turn.content)), ("assistant", str(answer))]
            messages = [*history, ("user", said.content)]
            num_tokens = await count_chat(self.http, self.target.model, messages)
            return said.content, tuple(history), num_tokens
        ids: list[int] = []
        for turn, answer in told:
            ids += [*map(int, turn.content), *map(int, answer)]
        ids += said.content
        return ids, (), len(ids)
