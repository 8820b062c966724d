"""What is wrong with names of the product: old words, and classes that share a name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.architecture.tree import Named, Tree

OLD_WORDS = Path(__file__).with_name("old_words.txt")


def entries(path: Path) -> dict[str, str]:
    """Read a list: the first word of each line, and what stands after it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    split = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return {word: rest for word, _, rest in split}


def old_names(tree: Tree, words: Mapping[str, str]) -> list[Named]:
    """Classes, functions and modules (`word.py`) that have an old word as their name.

    A unit test's module has one, too, where it is called after a module of that name.

    Args:
        words: With "within" behind those that longer names may not contain either; such names are
            looked for in the tests as well.
    """
    within = [_parts(word) for word, rest in words.items() if rest == "within"]

    def is_old(named: Named, name: str) -> bool:
        parts = _parts(named.name)
        return name in words or any(word in parts for word in within)

    found = [named for named in tree.names(tree.product) if is_old(named, named.name)]
    for named in tree.names(tree.tests):
        is_unit = named.name.endswith(".py") and named.place.startswith("tests/unit/")
        if is_old(named, named.name.removeprefix("test_") if is_unit else ""):
            found.append(named)
    return found


def _parts(name: str) -> str:
    """The words of a name in lower case and the singular, each between two spaces."""
    parts = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name.removesuffix(".py"))
    return f" {' '.join(part.lower().removesuffix('s') for part in parts)} "


def shared_names(tree: Tree) -> dict[str, list[str]]:
    """Return the names that more than one class has, and where these classes are."""
    places: dict[str, list[str]] = defaultdict(list)
    for named in tree.classes():
        places[named.name].append(named.place)
    return {name: found for name, found in places.items() if len(found) > 1}
