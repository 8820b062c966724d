"""From the rows of an experiment to a table, a JSON file, its last line and plots: one way for all.

show(rows, {"policy": lambda r: r.policy, "tokens/s": lambda r: f"{r.tokens_per_s:,.0f}"})
publish("drex", headline, [asdict(r) for r in rows], folder)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from loadgen.report import provenance
from loadgen.report.figures import figures
from quadriga.checkpoint.json_files import GARBLED
from quadriga.errors import ConfigError
from quadriga.files import write_atomically

R = TypeVar("R")
Columns = Mapping[str, Callable[[R], object]]

WIDTH = 220
"""Columns of a table where standard output is no terminal."""
REPORT_WIDTH = 120
"""And of the report of a run."""
ALL_DIGITS = 17
"""Of a float: none is rounded away."""
PARTIAL = ".partial.json"
DPI = 120
PANEL = (5.5, 3.5)
"""Inches, of a panel of the plots of a run."""


def say(text: str) -> None:
    """Write a line of progress to stderr: standard output is the experiment's."""
    print(text, file=sys.stderr, flush=True)


def wide_console(width: int = WIDTH) -> Console:
    """Return standard output: as wide as the terminal is, or `width` where it is none."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def table_of(
    rows: Iterable[R],
    columns: Columns[R],
    *,
    title: str | None = None,
    caption: str | None = None,
    left: Sequence[str] = (),
) -> Table:
    """Make a table with one row for each of `rows`.

    Args:
        columns: Heading → the text of a cell; None leaves it empty.
        left: Headings of columns that stand on the left, beside the first.
    """
    table = Table(title=title, caption=caption)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 or name in left else "right")
    for row in rows:
        cells = (cell(row) for cell in columns.values())
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    return table


def show(rows: Iterable[R], columns: Columns[R], *, width: int = WIDTH, **options: Any) -> None:
    """Print `table_of` on standard output."""
    wide_console(width).print(table_of(rows, columns, **options))


def least(values: Iterable[float | None]) -> float | None:
    """Return the smallest value, rounded; None where there is none."""
    return rounded(min((v for v in values if v is not None), default=None))


def most(values: Iterable[float | None]) -> float | None:
    """Return the largest value, rounded; None where there is none."""
    return rounded(max((v for v in values if v is not None), default=None))


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Round, where there is a value."""
    return None if value is None else round(value, digits)


def print_line(name: str, *, packages: Sequence[str] = (), **facts: Any) -> dict[str, Any]:
    """Print an experiment's last line: its name, its figures, and where they come from.

    A figure that is NaN or infinite is null, as JSON has neither.

    Args:
        packages: Whose versions the figures depend on.
    """
    line: dict[str, Any] = {
        "experiment": name,
        **figures(facts, ALL_DIGITS),
        "commit": provenance.commit(),
        "machine": provenance.machine(),
    }
    if packages:
        line["versions"] = provenance.versions(*packages)
    print(json.dumps(line, allow_nan=False), flush=True)
    return line


def publish(
    name: str, headline: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """Print the headline as the last line, and write it with all rows to `<name>.json`."""
    _write_rows(folder / f"{name}.json", rows, print_line(name, headline=dict(headline)))
    drop_rows(name, folder)


def keep_rows(name: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write the rows there are yet to `<name>.partial.json`: what a run has that is killed.

    Where there is no room for them that is said, and the run goes on.
    """
    try:
        _write_rows(folder / f"{name}{PARTIAL}", rows, {})
    except OSError as exc:
        say(f"what there is yet is not kept: {exc}")


def drop_rows(name: str, folder: Path) -> None:
    """The run is over: what `keep_rows` wrote of it goes."""
    (folder / f"{name}{PARTIAL}").unlink(missing_ok=True)


def _write_rows(file: Path, rows: Sequence[Mapping[str, Any]], line: Mapping[str, Any]) -> None:
    whole = json.dumps({**line, "rows": figures(rows, ALL_DIGITS)}, indent=1, allow_nan=False)
    write_atomically(file, (whole + "\n").encode())


def kept_rows(path: Path, parse: Callable[[dict[str, Any]], R]) -> list[R]:
    """Read the rows that an earlier run published, if one did. Raises: ConfigError: Other rows."""
    if not path.is_file():
        return []
    try:
        return [parse(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except (OSError, *GARBLED) as exc:
        what = f"the rows of {path} cannot be read, or are of another version"
        raise ConfigError(f"--keep: {what}; leave --keep out", param="keep") from exc


@contextmanager
def drawn(
    path: Path,
    columns: int = 1,
    rows: int = 1,
    *,
    size: tuple[float, float] = (4.6, 3.6),
    title: str | None = None,
    **layout: Any,
) -> Iterator[Any]:
    """Yield axes [rows, columns], and write their figure when the block ends.

    Args:
        size: Of one panel, inches.
        layout: Further arguments of `pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, **layout
    )
    figure.suptitle(title)
    try:
        yield axes
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
    finally:
        pyplot.close(figure)


def stacked_bars(axis: Any, names: Sequence[str], shares: Sequence[Mapping[str, float]]) -> None:
    """Draw one bar a name, from its shares of the same parts, in percent; the first on top."""
    left = [0.0] * len(names)
    for part in sorted({p for share in shares for p in share}):
        widths = [100 * share.get(part, 0.0) for share in shares]
        axis.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.legend(fontsize=6)
