"""The project's source tree: its modules, what imports what, circles, folders, lines, classes.

Everything is read from the files; nothing of the project is imported.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = "tests"
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
SKIPPED = ("build", "dist", "shared", "node_modules")
"""Top-level folders that hold no source of ours; folders whose name begins with a dot neither."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a project module.

    Attributes:
        module: The imported module, dotted.
        is_deferred: The import runs when a function is called, or never (TYPE_CHECKING).
    """

    module: str
    is_deferred: bool


@dataclass(frozen=True, slots=True)
class Named:
    """A class, a function or a module, and where it is defined (`file:line`)."""

    name: str
    place: str


class Module:
    """One Python file of the project."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path
        self.file = path.relative_to(root)
        parts = self.file.with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def num_lines(self) -> int:
        return self.source.count("\n")

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def is_reliability_run(self) -> bool:
        """Whether it belongs to the runs of hours that `python -m loadgen chaos` … start."""
        return self.file.parts[:2] == (TESTS, "reliability")

    @property
    def is_generated(self) -> bool:
        return self.file.stem.endswith("_pb2")


class Tree:
    """All modules below a folder.

    Attributes:
        modules: By dotted name.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        found = (Module(root, path) for path in python_files(root))
        self.modules = {module.name: module for module in found}

    @cached_property
    def product(self) -> list[Module]:
        """Every module outside the tests."""
        return [m for m in self.modules.values() if m.file.parts[0] != TESTS]

    @cached_property
    def tests(self) -> list[Module]:
        return [m for m in self.modules.values() if m.file.parts[0] == TESTS]

    @cached_property
    def imports(self) -> dict[str, set[Import]]:
        """What each product module imports of the project, whenever the import runs."""
        return {m.name: self.imports_of(m) for m in self.product}

    def imports_of(self, module: Module) -> set[Import]:
        return set(self._imports_in(module.syntax, False))

    def lines(self, names: Iterable[str]) -> int:
        return sum(self.modules[name].num_lines for name in names if name in self.modules)

    def closure(self, roots: Iterable[str]) -> set[str]:
        """Return the modules that importing the roots imports, parent packages included."""
        found: set[str] = set()
        unseen = [parent for root in roots for parent in _with_parents(root)]
        while unseen:
            name = unseen.pop()
            if name in found or name not in self.imports:
                continue
            found.add(name)
            for imported in self.imports[name]:
                if not imported.is_deferred:
                    unseen += _with_parents(imported.module)
        return found

    def actor_modules(self) -> set[str]:
        """Return the modules of `actors` that other actors start: imported when they are needed."""
        return {
            imported.module
            for name, all_imported in self.imports.items()
            if name.split(".")[0] in ("actors", "serve_app")
            for imported in all_imported
            if imported.is_deferred and imported.module.split(".")[0] == "actors"
        }

    def circles(self) -> list[list[str]]:
        """Return the groups of modules that import each other, deferred imports counted."""
        edges = {name: {i.module for i in all_} for name, all_ in self.imports.items()}
        reached = {name: _reached(edges, name) for name in edges}
        circles = {
            tuple(sorted({name} | {n for n in reached[name] if name in reached[n]}))
            for name in edges
            if name in reached[name]
        }
        return [list(circle) for circle in sorted(circles)]

    def folders(self) -> list[tuple[str, int]]:
        """Return the product's folders and their number of modules, the largest first."""
        sizes = Counter(str(m.file.parent) for m in self.product if not m.is_package)
        return sizes.most_common()

    def classes(self) -> Iterator[Named]:
        """All classes of the product, private ones and inner ones too."""
        for module in self.product:
            for node in () if module.is_generated else statements(module.syntax):
                if isinstance(node, ast.ClassDef):
                    yield Named(node.name, f"{module.file}:{node.lineno}")

    def names(self, modules: Iterable[Module]) -> Iterator[Named]:
        """Classes and functions of modules, and the modules themselves as `name.py`."""
        for module in modules:
            if module.is_generated:
                continue
            yield Named(f"{module.name.rpartition('.')[2]}.py", f"{module.file}:1")
            for node in statements(module.syntax):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield Named(node.name, f"{module.file}:{node.lineno}")

    def _imports_in(self, node: ast.AST, is_deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                joined = [f"{child.module}.{alias.name}" for alias in child.names]
                names = [name if name in self.modules else child.module for name in joined]
            elif not isinstance(child, STATEMENTS):
                continue
            else:
                within = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                never = isinstance(child, ast.If) and _name_of(child.test) == "TYPE_CHECKING"
                yield from self._imports_in(child, is_deferred or within or never)
                continue
            for name in names:
                if name in self.modules:
                    yield Import(name, is_deferred)


def python_files(root: Path) -> Iterator[Path]:
    """Yield the project's Python files."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") or path.name in SKIPPED:
            continue
        if path.is_dir():
            yield from (p for p in sorted(path.rglob("*.py")) if "__pycache__" not in p.parts)
        elif path.suffix == ".py":
            yield path


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node; expressions hold neither imports nor definitions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, STATEMENTS):
            yield child
            yield from statements(child)


def _name_of(node: ast.expr) -> str:
    return getattr(node, "id", "") or getattr(node, "attr", "")


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _reached(edges: dict[str, set[str]], start: str) -> set[str]:
    """The modules that can be reached from one in one step or more."""
    found: set[str] = set()
    unseen = list(edges[start])
    while unseen:
        name = unseen.pop()
        if name not in found:
            found.add(name)
            unseen += edges.get(name, ())
    return found
