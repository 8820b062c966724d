"""Conversations, as far as their users know them beforehand: made up, or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loadgen.load.arrivals import Arrivals
from loadgen.load.json_lines import read_objects
from loadgen.load.workload import Form
from quadriga.errors import ConfigError

MAX_TURNS = 1000


class WholeRange(NamedTuple):
    """Whole numbers drawn uniformly, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


DEFAULT_TURNS = WholeRange(2, 6)
DEFAULT_TURN_TOKENS = WholeRange(20, 60)
DEFAULT_ANSWER_TOKENS = WholeRange(20, 100)
DEFAULT_THINK_S = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says once.

    Attributes:
        content: Text (chat) or token ids (completions).
        think_s: Time from the answer before it; 0 for the first.
    """

    content: str | list[int]
    max_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, without the answers.

    Attributes:
        system: What goes ahead of all turns and is never left out; chat only.
        ignore_eos: Answers are exactly as long as asked for.
    """

    arrival_s: float
    turns: tuple[Turn, ...]
    system: str | None = None
    ignore_eos: bool = False
    stream: bool = True

    @property
    def is_chat(self) -> bool:
        return isinstance(self.turns[0].content, str)


@dataclass(frozen=True, slots=True)
class SessionShape:
    """How made-up conversations look.

    Attributes:
        turns: Per conversation.
        turn_tokens: Said by the user each time: token ids, or words over chat.
        answer_tokens: Of each answer, exactly.
        think_s: Mean of the exponentially distributed time before a further turn.
    """

    turns: WholeRange
    turn_tokens: WholeRange
    answer_tokens: WholeRange
    think_s: float


def make_sessions(
    count: int,
    arrivals: Arrivals,
    shape: SessionShape,
    *,
    forms: Sequence[Form],
    token_ids: Sequence[int],
    words: Sequence[str],
    seed: int,
) -> list[Conversation]:
    """Make conversations up; the same seed gives the same ones.

    Args:
        forms: Taken in turns, one per conversation.
        token_ids: What turns over completions are drawn from.
        words: What turns over chat are drawn from.
    """
    times_s = arrivals.times_s(count, seed=seed)
    pools = {"completions": np.asarray(token_ids), "chat": np.asarray(words)}
    sessions = []
    for number in range(count):
        rng = np.random.default_rng([seed, 0x5E55, number])
        stream, endpoint = forms[number % len(forms)]
        turns = []
        for turn in range(shape.turns.draw(rng)):
            length = shape.turn_tokens.draw(rng)
            drawn = rng.choice(pools[endpoint], length).tolist()
            content: str | list[int] = " ".join(drawn) if endpoint == "chat" else drawn
            think_s = float(rng.exponential(shape.think_s)) if turn and shape.think_s else 0.0
            turns.append(Turn(content, shape.answer_tokens.draw(rng), think_s))
        arrival_s = float(times_s[number])
        sessions.append(Conversation(arrival_s, tuple(turns), ignore_eos=True, stream=stream))
    return sessions


def read_sessions(
    path: Path,
    arrivals: Arrivals,
    *,
    limit: int | None,
    max_tokens: int,
    think_s: float,
    streams: Sequence[bool],
    seed: int,
) -> list[Conversation]:
    """Read conversations from JSON lines (or gzip): `{"messages": [{"role", "content"}, …]}`.

    The messages of role `assistant` are left out: the service's own answers take their place.

    Raises:
        ConfigError: Naming file, line, field and value.
    """
    rows = [_read_messages(*row) for row in read_objects(path, param="sessions", limit=limit)]
    times_s = arrivals.times_s(len(rows), seed=seed)
    sessions = []
    for number, (system, texts) in enumerate(rows):
        rng = np.random.default_rng([seed, 0x5E55, number])
        thinks = [
            float(rng.exponential(think_s)) if i and think_s else 0.0 for i in range(len(texts))
        ]
        turns = tuple(Turn(text, max_tokens, s) for text, s in zip(texts, thinks, strict=True))
        stream = streams[number % len(streams)]
        sessions.append(Conversation(float(times_s[number]), turns, system, stream=stream))
    return sessions


def _read_messages(where: str, row: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Return (system text, the user's texts) of a row.

    Raises:
        ConfigError: It is no conversation.
    """
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise ConfigError(
            f"{where}: messages must be a list; got {messages!r:.80}", param="messages"
        )
    system: str | None = None
    texts: list[str] = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        at = f"{where}: messages.{number}"
        if not isinstance(content, str) or not content:
            raise ConfigError(f"{at}: content must be text; got {content!r:.80}", param="messages")
        if role == "system" and number == 0:
            system = content
        elif role == "user":
            texts.append(content)
        elif role != "assistant":
            raise ConfigError(
                f"{at}: role must be user, assistant or, first of all, system; got {role!r:.80}",
                param="messages",
            )
    if not 1 <= len(texts) <= MAX_TURNS:
        raise ConfigError(
            f"{where}: {len(texts)} messages of role user; 1..{MAX_TURNS} are possible",
            param="messages",
        )
    return system, texts
