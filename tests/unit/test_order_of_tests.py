"""Tests of fixtures that a folder shares come last in it; others stay where they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Item

from tests.order_of_tests import common_last


def test_a_folder_is_ordered_by_its_common_fixtures_and_others_stay_where_they_are() -> None:
    items = [
        Item(path=Path("/e2e/a"), fixturenames=["main"]),
        Item(path=Path("/e2e/b"), fixturenames=[]),
        Item(path=Path("/ray/c"), fixturenames=["main", "tmp_path"]),
        Item(path=Path("/ray/d"), fixturenames=["small"]),
        Item(path=Path("/ray/e"), fixturenames=["tmp_path"]),
    ]
    common_last(items, Path("/ray"), ("small", "main"))
    assert "".join(item.path.name for item in items) == "abecd"
