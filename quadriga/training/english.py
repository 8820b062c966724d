"""English prompts for `quadriga.tune`, worded as requests from texts of public data sets."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from quadriga.checkpoint.json_files import GARBLED
from quadriga.errors import ConfigError
from quadriga.tune.prompts import TunePrompt, read_prompts

ENGLISH = Path(__file__).parent / "prompts" / "english.jsonl.gz"
MAX_CHARS = {"summarization": 2600}
MAX_CHARS_ELSEWHERE = 700
QUESTIONS = "questions"
_TURN = re.compile(r"^(User|Assistant): ?", re.MULTILINE)

Messages = list[dict[str, str]]


def make_prompts(texts: Sequence[Path], like: Path, more: int = 0, seed: int = 0) -> bytes:
    """Word texts as requests: those of an earlier file, in its order, and others behind them.

    Args:
        texts: `.txt` with a question a line, or `.jsonl` or `.jsonl.gz` with `id`, `domain` and
            `prompt`, the domains those of the earlier file.
        like: The earlier file; its ids choose.
        more: Texts to draw beside them, in the domains' shares of that file.
        seed: Of what is drawn.

    Returns:
        A `.jsonl.gz` for `quadriga.tune --prompts`; the same texts give the same bytes.

    Raises:
        ConfigError: A file cannot be read, two texts have one id, a text that is chosen is in none
            of them, or there are too few.
    """
    known: dict[str, TunePrompt] = {}
    for path in texts:
        for found in _texts(path):
            if known.setdefault(found.id, found) != found:
                raise ConfigError(
                    f"--texts: {path} has the id {found.id!r}, and so has another text; lines of a "
                    ".txt are numbered in each file: put all into one",
                    param="texts",
                )
    chosen = read_prompts(str(like))
    missing = [prompt.id for prompt in chosen if prompt.id not in known]
    if missing:
        raise ConfigError(
            f"--texts: {len(missing)} of the {len(chosen)} texts of {like} are in none of the "
            f"files, {missing[0]!r} among them; name the files of all its domains",
            param="texts",
        )
    prompts = [known[prompt.id] for prompt in chosen]
    prompts += _drawn(prompts, list(known.values()), more, seed)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        for prompt in prompts:
            said = {"id": prompt.id, "domain": prompt.domain, "messages": list(prompt.content)}
            file.write((json.dumps(said, ensure_ascii=False) + "\n").encode())
    return packed.getvalue()


def _drawn(
    chosen: Sequence[TunePrompt], known: Iterable[TunePrompt], more: int, seed: int
) -> list[TunePrompt]:
    """Others of the same domains, mixed. Raises: ConfigError: There are too few."""
    taken = {prompt.id for prompt in chosen}
    left: dict[str, list[TunePrompt]] = {}
    for prompt in known:
        size = sum(
            len(message["content"]) for message in prompt.content if isinstance(message, dict)
        )
        if prompt.id not in taken and size <= MAX_CHARS.get(prompt.domain, MAX_CHARS_ELSEWHERE):
            left.setdefault(prompt.domain, []).append(prompt)
    rng = np.random.default_rng(seed)
    domains = [prompt.domain for prompt in chosen]
    shares = {d: more * domains.count(d) / len(domains) for d in sorted(set(domains))}
    counts = {domain: int(share) for domain, share in shares.items()}
    left_over = more - sum(counts.values())
    for domain in sorted(shares, key=lambda d: counts[d] - shares[d])[:left_over]:
        counts[domain] += 1
    found: list[TunePrompt] = []
    for domain, count in counts.items():
        there = left.get(domain, [])
        if count > len(there):
            raise ConfigError(
                f"--more: {more} would take {count} further texts of the domain {domain}, which "
                f"has {len(there)} of at most "
                f"{MAX_CHARS.get(domain, MAX_CHARS_ELSEWHERE)} characters; take fewer",
                param="more",
            )
        found += [there[i] for i in sorted(rng.choice(len(there), count, replace=False))]
    return [found[i] for i in rng.permutation(len(found))]


def _texts(path: Path) -> Iterable[TunePrompt]:
    """The texts of a file, worded. Raises: ConfigError: It holds something else."""
    try:
        packed = path.read_bytes()
        text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
        lines = [line for line in text.split("\n") if line.strip()]
        if path.suffix == ".txt":
            for index, line in enumerate(lines):
                yield TunePrompt(f"question-{index}", QUESTIONS, tuple(_said(line)))
            return
        for line in lines:
            data = json.loads(line)
            domain = data["domain"]
            if domain in WORDINGS:
                messages = WORDINGS[domain](data["prompt"])
                yield TunePrompt(data["id"].strip(), domain, tuple(messages))
    except (OSError, EOFError, RecursionError, zlib.error, *GARBLED) as exc:
        raise ConfigError(f"--texts: {path} cannot be read: {exc!r:.200}", param="texts") from exc


def _said(text: str) -> Messages:
    return [{"role": "user", "content": text.strip()}]


def _turns(text: str) -> Messages:
    """A dialogue up to the assistant's next turn, as messages."""
    _, *parts = _TURN.split(text)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": who.lower(), "content": said.strip()} for who, said in turns if said.strip()]


WORDINGS: dict[str, Callable[[str], Messages]] = {
    "math": _said,
    "summarization": _said,
    "code": lambda text: _said(f"Write the body of this function.\n\n{text.strip()}"),
    "prose": lambda text: _said(f"Continue this passage:\n\n{text.strip()}"),
    "sentence-completion": lambda text: _said(f"How does this go on? {text.strip()}"),
    "intent": lambda text: _said(text.removeprefix("Customer message:").removesuffix("\nIntent:")),
    "chat": _turns,
}
"""By domain, how a text becomes a request."""
