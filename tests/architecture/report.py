"""`python -m tests.architecture.report`: the size of the product in one line of JSON.

Without options a service is started and measured, which takes about two minutes; `--recorded`
takes these figures from the last time, `--static` leaves them out. `--verbose` lists what the
figures count. The rules are in `road` and `tree`.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.architecture.names import OLD_WORDS, entries, old_names, shared_names
from tests.architecture.road import Road, measure
from tests.architecture.tree import ROOT, Tree

RECORDED = ROOT / "results" / "road.json"
ENTRY_POINTS = ("serve_app.app", "serve_app.__main__")


def static_figures(tree: Tree) -> dict[str, int]:
    """Measure the files alone."""
    gc.disable()  # it would look at millions of nodes again and again, and free none
    try:
        return _of_files(tree)
    finally:
        gc.enable()


def _of_files(tree: Tree) -> dict[str, int]:
    imported = tree.closure([*ENTRY_POINTS, *tree.actor_modules()])
    return {
        "product_lines": sum(m.num_lines for m in tree.product),
        "test_lines": sum(m.num_lines for m in tree.tests if not m.is_reliability_run),
        "reliability_lines": sum(m.num_lines for m in tree.tests if m.is_reliability_run),
        "imported_lines": tree.lines(imported),
        "actors_lines": sum(m.num_lines for m in tree.product if m.name.startswith("actors")),
        "llm_lines": tree.lines(["quadriga.llm"]),
        "readme_words": _words("README.md"),
        "architecture_words": _words("ARCHITECTURE.md"),
        "circles": len(tree.circles()),
        "largest_folder": tree.folders()[0][1],
        "old_names": len(old_names(tree, entries(OLD_WORDS))),
        "shared_class_names": len(shared_names(tree)),
    }


def _words(page: str) -> int:
    return len((ROOT / page).read_text(encoding="utf-8").split())


def traced_figures(tree: Tree, road: Road) -> dict[str, int]:
    """The figures of a running service.

    `service_lines` are those of all modules that its processes imported; `imported_lines` of
    `static_figures` lacks what is imported within functions, as the engine is.
    """
    return {
        "road_files": len(road.files),
        "road_lines": road.num_lines,
        "road_function_lines": road.num_function_lines,
        "service_modules": len(road.modules),
        "service_lines": tree.lines(road.modules),
        "request_classes": len(road.classes),
        "retained_classes": len(road.retained),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.report")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--recorded", action="store_true", help="the service as last measured")
    source.add_argument("--static", action="store_true", help="start no service")
    parser.add_argument("--verbose", action="store_true", help="list what is counted")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the service is ended then too
    tree = Tree()
    figures = static_figures(tree)
    if options.verbose:
        _list("import circles", (" ".join(circle) for circle in tree.circles()))
        _list("folders by modules", (f"{n:3} {folder}" for folder, n in tree.folders()[:12]))
        _list("old names", (f"{n.place} {n.name}" for n in old_names(tree, entries(OLD_WORDS))))
        shared = shared_names(tree).items()
        _list("names of several classes", (f"{name} {' '.join(at)}" for name, at in shared))
    if not options.static:
        road = _recorded() if options.recorded else _measured()
        figures = traced_figures(tree, road) | figures
        if options.verbose:
            _list("files of the road", road.files)
            _list("classes that live as long as a request", road.classes)
            _list("classes that outlive their request", road.retained)
    print(json.dumps(figures))


def _measured() -> Road:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        road = measure(Path(folder))
    RECORDED.parent.mkdir(exist_ok=True)
    road.save(RECORDED)
    return road


def _recorded() -> Road:
    try:
        return Road.load(RECORDED)
    except FileNotFoundError:
        sys.exit(f"{RECORDED} is not there: nothing was recorded yet; run without --recorded")


def _list(title: str, lines: Iterable[str]) -> None:
    print(f"{title}:", *lines, sep="\n  ", file=sys.stderr)


if __name__ == "__main__":
    main()
