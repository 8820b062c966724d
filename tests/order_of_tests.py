"""In which order the tests of a folder run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def common_last(items: list[Any], folder: Path, common: Sequence[str]) -> None:
    """Put tests of common fixtures last in their folder; what these start would idle before."""
    folders = list(dict.fromkeys(item.path.parent for item in items))

    def key(item: Any) -> tuple[int, list[bool]]:
        is_here = item.path.parent == folder
        return folders.index(item.path.parent), [is_here and n in item.fixturenames for n in common]

    items.sort(key=key)
