"""`python -m loadgen why REQUEST_ID`: why the sequences of a request were moved.

Reads `/cluster/moves` on the service's admin port. The scheduler keeps its last 256 orders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from rich.console import Console, Group, RenderableType
from rich.text import Text

from loadgen.report.plain_table import plain_table
from loadgen.wire.admin import add_admin_arguments, admin_client, fetch

EXIT_NOTHING_KNOWN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("request_id", help="an answer's id; response_id in run.jsonl")
    parser.add_argument("--json", action="store_true", help="print the decisions as they are")
    add_admin_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Show the decisions; 1 where none is known."""
    path = f"/cluster/moves?request={quote(args.request_id, safe='')}"
    moves = fetch(admin_client(args), args.url, path)["moves"]
    if args.json:
        print(json.dumps(moves, indent=1))
        return 0 if moves else EXIT_NOTHING_KNOWN
    console = Console()
    if not moves:
        console.print(
            f"{args.request_id}: no order to move it is known; it was never ordered to move, or "
            "256 orders were given since"
        )
        return EXIT_NOTHING_KNOWN
    console.print(explained(moves))
    return 0


def explained(moves: Sequence[dict[str, Any]]) -> Group:
    """Return what is shown of the decisions about one request."""
    parts: list[RenderableType] = []
    for move in moves:
        report, why = move["report"], move["explanation"]
        outcome = "under way" if report is None else report["outcome"]
        text = Text(f"{move['sequence_id']}: {move['source']} → {move['destination']}, {outcome}")
        if report is not None:
            reason = f" ({report['reason']})" if report["reason"] else ""
            text.append(f"{reason}; its stream stood for {1e3 * report['stall_s']:.0f} ms")
        parts.append(text)
        if not why:
            parts.append(Text("  the decision no longer shows what it saw"))
            continue
        parts.append(Text(f"  {why['text']}"))
        if why["by"] == "controller":
            continue
        sequence = why["sequence"]
        parts.append(
            Text(
                f"  it held {sequence['tokens']} tokens, {sequence['remaining']:.0f} to come "
                f"({sequence['remaining_lower']:.0f} to {sequence['remaining_upper']:.0f}), "
                f"{sequence['moves']} moves before; to move it was taken to cost "
                f"{1e3 * why['transfer_s']:.0f} ms"
            )
        )
        table = plain_table("destinations")
        table.add_column("replica", no_wrap=True)
        for name in ("variance less", "its work", "after", "source after", "KV ahead", "free"):
            table.add_column(name, justify="right")
        for place in why["destinations"]:
            table.add_row(
                place["name"],
                f"{place['gain']:.1%}",
                *(f"{place[n]:.2f}" for n in ("work", "work_after", "source_work_after")),
                f"{place['memory_share']:.0%}",
                str(place["free_slots"]),
            )
        parts.append(table)
    return Group(*parts)
