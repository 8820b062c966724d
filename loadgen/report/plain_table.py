"""The form of every table in the terminal view."""

from __future__ import annotations

from rich.table import Table


def plain_table(title: str) -> Table:
    """Return a table without lines: in 80 columns there is no room for them."""
    return Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        collapse_padding=True,
    )
