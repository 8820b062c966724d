"""How large the product may be now, and how large it is wanted."""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """The most that a measure may be, today and in the end."""

    now: int
    wanted: int


BOUNDS = {
    # Of a running service; `tests/e2e/test_road.py`.
    "road_files": Bound(118, 50),
    "road_lines": Bound(29_730, 10_000),
    "request_classes": Bound(10, 10),
    "service_lines": Bound(50_930, 33_000),
    # Of the files alone; `tests/architecture/test_bounds.py`.
    "product_lines": Bound(105_640, 58_000),
    "test_lines": Bound(90_498, 38_000),
    "reliability_lines": Bound(5_285, 4_000),
    "actors_lines": Bound(7_220, 6_485),
    "llm_lines": Bound(250, 250),
    "readme_words": Bound(900, 900),
    "architecture_words": Bound(2_500, 2_500),
    "circles": Bound(0, 0),
    "largest_folder": Bound(15, 15),
    "old_names": Bound(0, 0),
    "shared_class_names": Bound(0, 0),
}
"""By the names in the line that `python -m tests.architecture.report` prints.

`now` follows what is measured. A feature may raise it by what it needs; its commit says why.
"""
