"""The product does not grow, and its names are the field's: what can be read from its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.bounds import BOUNDS
from tests.architecture.names import old_names, shared_names
from tests.architecture.report import static_figures
from tests.architecture.tree import ROOT, Tree, python_files


def test_every_figure_is_within_its_bound() -> None:
    """`python -m tests.architecture.report --static --verbose` lists what the figures count."""
    figures = static_figures(Tree())
    bounds = {name: BOUNDS[name].now for name in figures if name in BOUNDS}
    assert len(bounds) >= 6
    assert not {n: (figures[n], most) for n, most in bounds.items() if figures[n] > most}


def test_the_formatter_lays_out_all_but_the_tables() -> None:
    """Lines count as the formatter breaks them; packing them by hand would hide their number."""
    exempt = re.compile(r"# fm[t]: (off|skip)")
    found = {
        path.relative_to(ROOT).as_posix()
        for path in python_files(ROOT)
        if exempt.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"deploy/grafana.py", "serve_app/openai/openapi.py"}


@pytest.fixture
def small_tree(tmp_path: Path) -> Tree:
    """A package whose modules import each other, within a function and for types only."""
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shop.till\n"
    texts = {
        "shop/__init__.py": "",
        "shop/till.py": "import shop.shelf\n\ndef pay():\n    from shop import door\n",
        "shop/shelf.py": for_types,
        "shop/door.py": "class Doorman:\n    pass\n",
        "shop/lamp.py": "import shop.lamp2\nclass Doorman:\n    pass\n",
        "tests/unit/test_till.py": "import shop.till\n\ndef pay():\n    pass\n",
        "tests/test_shop.py": "class DoormenAndDoormans:\n    pass\n\ndef pay():\n    pass\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return Tree(tmp_path)


def test_imports_are_followed_and_circles_found(small_tree: Tree) -> None:
    assert small_tree.circles() == [["shop.shelf", "shop.till"]]
    assert small_tree.closure(["shop.till"]) == {"shop", "shop.till", "shop.shelf"}
    assert small_tree.lines(["shop.till", "shop.door"]) == 6
    assert small_tree.folders() == [("shop", 4)]


def test_old_words_and_shared_names_are_found_with_their_places(small_tree: Tree) -> None:
    found = old_names(small_tree, {"Doorman": "", "lamp.py": "", "pay": ""})
    assert {f"{n.place} {n.name}" for n in found} == {
        "shop/door.py:1 Doorman",
        "shop/lamp.py:1 lamp.py",
        "shop/lamp.py:2 Doorman",
        "shop/till.py:3 pay",
    }
    found = old_names(small_tree, {"Doorman": "within", "till.py": ""})
    assert {f"{n.place} {n.name}" for n in found} == {
        "shop/door.py:1 Doorman",
        "shop/lamp.py:2 Doorman",
        "shop/till.py:1 till.py",
        "tests/unit/test_till.py:1 test_till.py",
        "tests/test_shop.py:1 DoormenAndDoormans",
    }
    assert shared_names(small_tree) == {"Doorman": ["shop/door.py:1", "shop/lamp.py:2"]}
