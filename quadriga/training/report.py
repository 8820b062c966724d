"""Tables of the evaluation for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

SHOWN_THRESHOLD = "0.9"  # of the per-task rows; the histogram shows all


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print what `evaluate` returned."""
    for name, figures in report["models"].items():
        console.print(_tasks_table(name, figures, report))
        console.print(_exits_table(name, figures))
    if "complement" in report:
        for which, title in (("first", "the first exit"), ("any", "any exit but the last")):
            console.print(_complement_table(report["complement"], which, title))


def _tasks_table(name: str, figures: dict[str, Any], report: dict[str, Any]) -> Table:
    drawn = f"{report['examples']} examples a task, seed {report['seed']}"
    title = f"{name}: {drawn}, exits at p ≥ {SHOWN_THRESHOLD}"
    table = Table("task", "exact", "long", "reworded", "tokens", title=title)
    for layer in figures["exit_layers"]:
        table.add_column(f"at {layer}", justify="right")
    table.add_column("early = full", justify="right")
    for task, row in figures["tasks"].items():
        entry = row["exits"]["top"][SHOWN_THRESHOLD]
        table.add_row(
            task,
            f"{row['exact_match']:.3f}",
            f"{row['exact_match_long']:.3f}",
            f"{row['exact_match_reworded']:.3f}",
            str(row["answer_tokens"]),
            *(f"{share:.3f}" for share in entry["shares"]),
            _share(entry["agreement"]),
        )
    return table


def _exits_table(name: str, figures: dict[str, Any]) -> Table:
    table = Table("criterion", "threshold", title=f"{name}: exits, all tasks")
    for layer in figures["exit_layers"]:
        table.add_column(f"leave at {layer}", justify="right")
    table.add_column("early = full", justify="right")
    for criterion, rows in figures["all"].items():
        for threshold, entry in rows.items():
            shares = [f"{share:.3f}" for share in entry["shares"]]
            table.add_row(criterion, threshold, *shares, _share(entry["agreement"]))
    return table


def _complement_table(complement: dict[str, Any], which: str, title: str) -> Table:
    table = Table("tokens of", "criterion", "threshold", title=f"leaving early at {title}")
    figures = ("small", "large", "large_given_not_small", "union")
    for head in ("small", "large", "large | small not", "union"):
        table.add_column(head, justify="right")
    rows = [
        ("all", criterion, threshold)
        for criterion, entries in complement["all"].items()
        for threshold in entries
    ]
    rows += [(task, "top", SHOWN_THRESHOLD) for task in complement["tasks"]]
    for scope, criterion, threshold in rows:
        source = complement["all"] if scope == "all" else complement["tasks"][scope]
        entry = source[criterion][threshold]
        shares = [_share(entry[f"{which}_{figure}"]) for figure in figures]
        table.add_row(scope, criterion, threshold, *shares)
    return table


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
