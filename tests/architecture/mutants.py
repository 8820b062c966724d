"""`python -m tests.architecture.mutants`: small faults put into the product, and who notices.

A sample of faults (a comparison turned round, a condition negated, an integer off by one, a call
left out, None returned) is made one by one in a copy of the tree, and the nearest test files that
import the changed module are run. A fault that no test notices survives: a rule without a test, or
a change without an effect. Prints the survivors, and one line of JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from tests.architecture.tree import ROOT, SKIPPED, Module, Tree

PATHS = ["quadriga/scheduling", "quadriga/policies", "actors"]
FOLDERS = ("unit", "property")
"""Of tests that need no Ray and are over soon."""
MAX_STEPS = 3
"""Imports between a test file and the module, at most."""
SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A place in a file, in bytes, and what stands there instead."""

    file: Path
    line: int
    start: int
    end: int
    before: str
    after: str


def mutants(module: Module) -> Iterator[Mutant]:
    """All faults that can be made in a module."""
    text = module.source.encode()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _executed(module.syntax):
        for place, after in _changes(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
            yield Mutant(module.file, place.lineno, start, end, text[start:end].decode(), after)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """A syntax tree without annotations and what is there for types only."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or "TYPE_CHECKING" in ast.dump(node)[:80]:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _executed(child)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in SWAPS:
            yield node, f"({ast.unparse(ast.Compare(left, [SWAPS[type(op)]()], right))})"
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield node, f"({value + 1})"
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            if "log" not in ast.unparse(node.value).split(".")[0]:
                yield node, "pass"
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            yield node, "return None"
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


class Nearest:
    """Which test files are nearest to a module by what imports what."""

    def __init__(self, tree: Tree) -> None:
        self._files = {m.name: m.file for m in tree.tests if m.file.name.startswith("test_")}
        self._importers = defaultdict(set)
        for module in tree.modules.values():
            for imported in tree.imports_of(module):
                self._importers[imported.module].add(module.name)

    def tests(self, module: str) -> list[str]:
        """Return test files, one named as the module first, then by steps of import."""
        steps, ring = {module: 0}, {module}
        for step in range(1, MAX_STEPS + 1):
            ring = {name for inner in ring for name in self._importers[inner]} - steps.keys()
            steps |= dict.fromkeys(ring, step)
        word = module.rpartition(".")[2]
        found = {self._files[name]: step for name, step in steps.items() if name in self._files}
        ordered = sorted(found, key=lambda f: (word not in f.stem, found[f], f.parts[1:2], f))
        return [str(f) for f in ordered if f.parts[1] in FOLDERS]


class Copy:
    """A copy of the tree, in which files may be changed."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.root = folder / "tree"
        self._limit_s = limit_s
        left_out = shutil.ignore_patterns(".*", "__pycache__", "results", *SKIPPED)
        shutil.copytree(ROOT, self.root, ignore=left_out)

    def passes(self, files: list[str]) -> bool | None:
        """Run test files; None when they took too long."""
        command = [sys.executable, "-B", "-m", "pytest", "-xq", "-n0", "-pno:cacheprovider", *files]
        there = os.environ | {"PYTHONPATH": str(self.root)}
        limit_s, quiet = self._limit_s * len(files), subprocess.DEVNULL
        try:
            done = subprocess.run(command, cwd=self.root, env=there, stdout=quiet, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        return done.returncode == 0

    @cache  # noqa: B019
    def is_usable(self, file: str) -> bool:
        """Whether a test file passes as it is, and soon enough to be run for each fault."""
        return bool(self.passes([file]))

    def outcome(self, mutant: Mutant, files: list[str]) -> str:
        path = self.root / mutant.file
        text = path.read_bytes()
        try:
            path.write_bytes(text[: mutant.start] + mutant.after.encode() + text[mutant.end :])
            passed = self.passes(files)
        finally:
            path.write_bytes(text)
        return {True: "survived", False: "killed", None: "timed_out"}[passed]


def main(argv: Sequence[str] | None = None) -> None:
    """Make the sample, run the tests, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.mutants")
    parser.add_argument("--count", type=int, default=200, help="how many faults")
    parser.add_argument("--seed", type=int, default=1, help="the same one makes the same sample")
    parser.add_argument("--paths", nargs="+", default=PATHS, help="files or folders to change")
    parser.add_argument("--files", type=int, default=4, help="the most test files for one fault")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a test file")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the copy is removed, the tests ended
    tree = Tree()
    chosen = [m for m in tree.product if any(m.file.is_relative_to(p) for p in options.paths)]
    every = [(module, mutant) for module in chosen for mutant in mutants(module)]
    sample = random.Random(options.seed).sample(every, min(options.count, len(every)))
    nearest, counts = Nearest(tree), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), options.limit)
        for module, mutant in sample:
            usable = filter(copy.is_usable, nearest.tests(module.name))
            files = list(islice(usable, options.files))
            outcome = copy.outcome(mutant, files) if files else "untested"
            counts[outcome] += 1
            if outcome in ("survived", "untested"):
                place = f"{mutant.file}:{mutant.line}"
                print(f"{outcome} {place}: {mutant.before} -> {mutant.after}", flush=True)
    print(json.dumps({"seed": options.seed, "sampled": len(sample), "of": len(every)} | counts))


if __name__ == "__main__":
    main()
