"""The documents as tests read them: their fences, and the commands in these.

A fence that holds commands says behind `sh` what a test does with it:

    ```sh          cannot run here (a cluster, a service that stays, hours): its programs' own
                   parsers look at it, see `programs.py`
    ```sh run      is run, in a folder that looks like the project's root
    ```sh service  is run against the service of the end-to-end tests
    ```sh slow, ```sh slow service   the same by `make test-slow`, as it takes longer

A fence `text` right behind one that is run holds what it prints; `…` stands for anything. A fence
with a second word that is a file's name is that file in the folder where the page's commands run.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "deploy/**/*.md", "helm/**/*.md", "examples/*.md")
DOCUMENTS = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
LANGUAGES = {"sh", "python", "yaml", "json", "promql", "ini", "text", ""}
NOT_RUN, RUN, SERVICE, SLOW, SLOW_SERVICE = "", "run", "service", "slow", "slow service"
KINDS = (NOT_RUN, RUN, SERVICE, SLOW, SLOW_SERVICE)

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.M | re.S)
_OPERATORS = frozenset("();<>|&")
_ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.S)
_LOOKS_LIKE_A_COMMAND = re.compile(
    r"^\s*(?:\$ )?(?:\S*python3? |make |pip |helm |kubectl |docker |ray |serve (?=[a-z])|curl "
    r"|openssl |export |grpcurl |git )",
    re.M,
)
TIMEOUT_S = {RUN: 60, SERVICE: 60, SLOW: 360, SLOW_SERVICE: 120}
APART = {".git", ".venv", "results"}


@dataclass(frozen=True, slots=True)
class Fence:
    """One fenced block of a page.

    Attributes:
        word: What stands behind the language: a kind of command block, or a file's name.
        printed: For commands: the `text` fence right behind it; empty where there is none.
    """

    page: Path
    line: int
    language: str
    word: str
    text: str
    printed: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def looks_like_commands(self) -> bool:
        return _LOOKS_LIKE_A_COMMAND.search(self.text) is not None


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command.

    Attributes:
        variables: Assignments before the first word.
        writes: Files its output goes to.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()


@dataclass(slots=True)
class Shown:
    """What a page has shown so far.

    Attributes:
        kind: Of the fence at hand.
        files: Names that its fences hold, or its commands write.
        values: Of the Helm release as it was last installed or upgraded.
    """

    kind: str = ""
    files: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """A file's content. Raises: AssertionError: There is none of that name."""
        if name in self.files:
            return self.files[name]
        assert (ROOT / name).is_file(), f"no file {name} in the project or on this page"
        return (ROOT / name).read_text(encoding="utf-8")


def fences(page: Path) -> list[Fence]:
    """Every fenced block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    matches = list(_FENCE.finditer(text))
    found = []
    for match, following in itertools.zip_longest(matches, matches[1:]):
        language, _, word = match["info"].strip().partition(" ")
        printed = ""
        if following is not None and following["info"].strip() == "text":
            if not text[match.end() : following.start()].strip():
                printed = following["text"]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Fence(page, line, language, word.strip(), match["text"], printed))
    return found


def of_kind(kind: str) -> list[Path]:
    """The pages with command fences of a kind."""
    return [p for p in DOCUMENTS if any(f.language == "sh" and f.word == kind for f in fences(p))]


def commands(text: str) -> Iterator[Command]:
    """The simple commands of a fence: pipes, lists and substitutions are taken apart.

    Raises: ValueError: A quotation does not end.
    """
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        writes: list[str] = []
        tokens = iter(lexer)
        for token in tokens:
            if not set(token) <= _OPERATORS:
                words.append(token)
            elif set(token) <= {"<", ">"}:
                target = next(tokens, "")
                if ">" in token:
                    writes.append(target)
            else:
                yield from _command(words, writes)
                words, writes = [], []
        yield from _command(words, writes)


def _command(words: list[str], writes: list[str]) -> Iterator[Command]:
    variables: dict[str, str] = {}
    rest = list(words)
    if rest and rest[0] in ("for", "done", "fi"):
        return
    if rest and rest[0] in ("do", "then", "else", "if", "while", "!"):
        del rest[0]
    while rest and (match := _ASSIGNMENT.match(rest[0])):
        variables[match[1]] = match[2]
        del rest[0]
    if rest or variables:
        yield Command(tuple(rest), variables, tuple(writes))


def scratch(folder: Path) -> Path:
    """A folder that looks like the project's root, where commands may write."""
    for entry in ROOT.iterdir():
        if entry.name not in APART:
            (folder / entry.name).symlink_to(entry)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    return folder


def run_page(
    page: Path,
    kind: str,
    folder: Path,
    *,
    replace: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a page's fences of a kind one after another, its files lying beside them.

    Args:
        replace: Addresses in the documents, and what they are here.

    Raises: AssertionError: One ends with another status than 0, or prints something else.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("QUADRIGA_")} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "XDG_STATE_HOME": str(folder / ".state"),
        "COLUMNS": "100",
        **(variables or {}),
    }
    for fence in fences(page):
        if fence.language == "yaml" and fence.word:
            (folder / fence.word).write_text(fence.text, encoding="utf-8")
        if fence.language != "sh" or fence.word != kind:
            continue
        text = fence.text
        for documented, here in (replace or {}).items():
            text = text.replace(documented, here)
        done = subprocess.run(
            ["sh", "-eu", "-c", text],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S[kind],
        )
        assert done.returncode == 0, f"{fence}: status {done.returncode}\n{done.stderr}"
        check_printed(fence, done.stdout + done.stderr)


def check_printed(fence: Fence, output: str) -> None:
    """Raises: AssertionError when a line of the `text` fence is not in the output, in order."""
    position = 0
    for line in filter(None, (line.strip() for line in fence.printed.splitlines())):
        pattern = r"\s+".join(
            ".*?".join(re.escape(part) for part in word.split("…")) for word in line.split()
        )
        match = re.compile(pattern).search(output, position)
        assert match, f"{fence}: does not print {line!r} here:\n{output}"
        position = match.end()
