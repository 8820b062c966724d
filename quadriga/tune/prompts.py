"""Prompts to tune with: read from a file, or made from the seeded tasks; and how they are divided.

A prompt belongs to one part for good: what the exits learn from, what thresholds are chosen on, and
what is reported. Domains that are held back are reported alone.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quadriga.errors import ConfigError
from quadriga.tasks import TASKS, make_example

Part = Literal["train", "calibrate", "test"]
SHARES: dict[Part, float] = {"train": 0.70, "calibrate": 0.15, "test": 0.15}
TASK_SEED = 99_000
"""Of prompts from the tasks; no other measurement uses it."""
TASKS_NAME = "tasks:"
ALL = "all"
_MAX_CHARS = 1_000_000


@dataclass(frozen=True, slots=True)
class TunePrompt:
    """One prompt.

    Attributes:
        id: Unique in its file.
        domain: What it is reported under.
        content: Text that goes on, or the messages of a conversation.
    """

    id: str
    domain: str
    content: str | tuple[Mapping[str, Any], ...]

    def part(self, held_back: Sequence[str]) -> Part:
        """Which part it belongs to; it depends on nothing but its id and domain.

        Args:
            held_back: Domains that nothing is learned or chosen on.
        """
        if self.domain in held_back:
            return "test"
        draw = int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "big") / 2**64
        if draw < SHARES["train"]:
            return "train"
        return "calibrate" if draw < SHARES["train"] + SHARES["calibrate"] else "test"


def read_prompts(source: str) -> list[TunePrompt]:
    """Read a prompt file, or make prompts of the seeded tasks.

    Args:
        source: A `.txt` file with a prompt a line, which is a user's message; a `.jsonl` or
            `.jsonl.gz` file whose objects have `prompt` (text that the model goes on with) or
            `messages`, and may have `id` and `domain`; or `tasks:N`, N prompts of each task.

    Raises:
        ConfigError: It cannot be read, a line is no prompt, two have one id, or a domain is `all`.
    """
    if source.startswith(TASKS_NAME):
        return _of_tasks(source)
    path = Path(source).expanduser()
    try:
        packed = path.suffix == ".gz"
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if packed
            else path.open(encoding="utf-8-sig") as lines
        ):
            is_text = path.name.removesuffix(".gz").endswith(".txt")
            found = [
                _read(line, number, path, is_text)
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as exc:
        raise ConfigError(f"--prompts: {path} cannot be read: {exc}", param="prompts") from exc
    if not found:
        raise ConfigError(f"--prompts: {path} holds no prompts", param="prompts")
    seen: set[str] = set()
    for prompt in found:
        if prompt.id in seen:
            raise ConfigError(f"--prompts: {path} has the id {prompt.id!r} twice", param="prompts")
        seen.add(prompt.id)
    return found


def distinct(prompts: Sequence[TunePrompt]) -> list[TunePrompt]:
    """Each content once: under two ids it might be learned from and measured on."""
    first = {json.dumps(prompt.content): prompt for prompt in reversed(prompts)}
    kept = {prompt.id for prompt in first.values()}
    return [prompt for prompt in prompts if prompt.id in kept]


def _read(line: str, number: int, path: Path, is_text: bool) -> TunePrompt:
    """One line. Raises: ConfigError."""
    if is_text:
        return TunePrompt(f"{number}", "prompts", ({"role": "user", "content": line.strip()},))
    try:
        if not isinstance(row := json.loads(line), dict):
            raise ValueError("no JSON object")
        data = {name: said for name, said in row.items() if said is not None}
        content = data.get("messages", data.get("prompt"))
        is_chat = isinstance(content, list) and all(
            isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m
            for m in content
        )
        if not content or not (isinstance(content, str) or is_chat) or len(line) > _MAX_CHARS:
            raise ValueError("neither a text `prompt` nor `messages` with role and content")
        if data.get("domain") == ALL:
            raise ValueError(f"{ALL!r} is what reports call all domains; name this one otherwise")
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--prompts: {path}:{number}: {exc}", param="prompts") from exc
    return TunePrompt(
        str(data.get("id", number)),
        str(data.get("domain", "prompts")),
        content if isinstance(content, str) else tuple(content),
    )


def _of_tasks(source: str) -> list[TunePrompt]:
    """`tasks:N`. Raises: ConfigError."""
    count = source.removeprefix(TASKS_NAME)
    if not (count.isascii() and count.isdecimal() and 0 < int(count) <= 100_000):
        raise ConfigError(
            f"--prompts: {source!r} must be tasks:N, N prompts of each task, 1 to 100000",
            param="prompts",
        )
    return [
        TunePrompt(f"{task}-{index}", task, make_example(task, seed=TASK_SEED, index=index).text)
        for index in range(int(count))
        for task in TASKS
    ]
