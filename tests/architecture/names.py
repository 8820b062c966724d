"""What is wrong with names of the product: old words, and classes that share a name."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.architecture.tree import Named, Tree

OLD_WORDS = Path(__file__).with_name("old_words.txt")
SHARED_NAMES = Path(__file__).with_name("shared_names.txt")


def entries(path: Path) -> dict[str, str]:
    """Read a list: the first word of each line, and what stands after it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    split = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return {word: rest for word, _, rest in split}


def old_names(tree: Tree, words: set[str]) -> list[Named]:
    """Classes and functions with an old word as their name, and modules listed as `word.py`."""
    return [named for named in tree.names() if named.name in words]


def shared_names(tree: Tree) -> dict[str, list[str]]:
    """Return the names that more than one class has, and where these classes are."""
    places: dict[str, list[str]] = defaultdict(list)
    for named in tree.classes():
        places[named.name].append(named.place)
    return {name: found for name, found in places.items() if len(found) > 1}
