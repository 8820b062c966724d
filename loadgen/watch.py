"""`python -m loadgen watch`: replicas, requests, load, exits, forecast and moves, live.

Reads `/cluster` on the service's admin port (`admin.port`), once a second, and changes nothing.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadgen.options import number, whole
from loadgen.report.exits_table import exits_table
from loadgen.report.plain_table import plain_table
from loadgen.wire.admin import add_admin_arguments, admin_client, fetch
from quadriga.errors import ConfigError

EXITS_SPAN_S = 10.0
WIDE_COLUMNS = 110
"""From this width on all that is known of a replica or a move is shown."""
BAR_CELLS, NARROW_BAR_CELLS = 14, 6
BLOCKS = " ▁▂▃▄▅▆▇█"
SOON_S, VERY_SOON_S, OLD_S = 60.0, 15.0, 5.0
OUTCOME_STYLES = {"moved": "green", "finished": "dim", "refused": "yellow", "failed": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_admin_arguments(parser)
    parser.add_argument("--interval-s", type=number(0), default=1.0, help="between two looks")
    parser.add_argument("--moves", type=whole(1), default=12, help="recent moves shown")
    parser.add_argument("--once", action="store_true", help="print what is there now, and end")


def run(args: argparse.Namespace) -> int:
    """Show the service until interrupted."""
    client = admin_client(args)
    console = Console()
    past: deque[dict[str, Any]] = deque()

    def look() -> RenderableType:
        view = fetch(client, args.url, "/cluster")
        past.append(view)
        while len(past) > 1 and abs(view["at_unix_s"] - past[0]["at_unix_s"]) > EXITS_SPAN_S:
            past.popleft()
        before = past[0] if len(past) > 1 else None
        return frame(view, moves=args.moves, width=console.width, before=before)

    if args.once:
        console.print(look())
        return 0
    shown = last_good = look()
    with Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(shown, refresh=True)
            time.sleep(args.interval_s)
            try:
                shown = last_good = look()
            except ConfigError as exc:  # the service may come back
                shown = Group(Text(exc.message, style="red"), last_good)


def frame(
    view: dict[str, Any], *, moves: int, width: int, before: dict[str, Any] | None = None
) -> Group:
    """Return what is shown of a view.

    Args:
        moves: The most recent moves shown.
        width: Columns of the terminal.
        before: An earlier view; exits are counted since then, else since the start.
    """
    replicas = view.get("replicas", [])
    is_wide = width >= WIDE_COLUMNS
    parts: list[RenderableType] = [_head(view)]
    decode = [r for r in replicas if r["role"] != "prefill"]
    if not decode:
        parts.append(Text("no decode replica has reported"))
    for depth_class in sorted({r["depth_class"] for r in decode}):
        members = [r for r in decode if r["depth_class"] == depth_class]
        parts.append(_decode_table(depth_class, members, is_wide=is_wide))
    prefill = [r for r in replicas if r["role"] == "prefill"]
    if prefill:
        parts.append(_prefill_table(prefill))
    exits = exits_table(view, before)
    if exits is not None:
        parts.append(exits)
    if view.get("recent"):
        parts.append(_moves_table(view["recent"][-moves:], view["at_unix_s"], is_wide=is_wide))
    if view.get("requests"):  # last: a small terminal shows what comes first
        parts.append(_requests_table(view["requests"], is_wide=is_wide))
    return Group(*parts)


def _head(view: dict[str, Any]) -> Text:
    text = Text()
    text.append("Quadriga", style="bold")
    text.append(f"   rescheduling {view.get('mode', '?')}, placement {view.get('placement', '?')}")
    outcomes = view.get("outcomes", {})
    if outcomes:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        text.append(f"   moves: {counts}")
    for model, length in sorted(view.get("lengths", {}).items()):
        text.append(
            f"\n{model}: {length['coverage']:.0%} of lengths inside their range, "
            f"error {length['mean_error_tokens']:.0f} tokens, of {length['num_ended']} ended"
        )
        if length["is_distrusted"]:
            text.append("  predictions do not hold: by the present load", style="yellow")
    for depth_class, why in sorted(view.get("last_tick", {}).get("why", {}).items()):
        text.append(f"\n{depth_class}: {why}")
    for line in _troubles(view):
        text.append(f"\n{line}", style="red")
    return text


def _troubles(view: dict[str, Any]) -> list[str]:
    """What makes the rest untrue or old, as the live page says it."""
    lines = [f"{name} does not answer: {why}" for name, why in view.get("missing", {}).items()]
    if error := view.get("fleet", {}).get("error"):
        lines.append(f"the configuration cannot be brought about: {error}")
    silent = [r for r in view.get("replicas", []) if r["age_s"] > OLD_S]
    return lines + [f"{_short(r['name'])} is silent for {r['age_s']:.0f} s" for r in silent]


def _decode_table(depth_class: str, replicas: Sequence[dict[str, Any]], *, is_wide: bool) -> Table:
    """The decode replicas of one class; columns that would be empty in all rows are left out."""
    points = next((r["forecast"] for r in replicas if r["forecast"]), None)
    has_paused = any(r["num_paused"] for r in replicas)
    table = plain_table(f"decode {depth_class}")
    table.add_column("replica", no_wrap=True)
    numbers = ["running", *["paused"] * has_paused, "KV", "step ms", "tokens/s"]
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    if points:
        for name in ["KV ahead", *["step ahead"] * is_wide]:
            table.add_column(name, no_wrap=True)
        table.add_column("full in", justify="right", no_wrap=True)
    slowest = max((p["step_s"] for r in replicas for p in r["forecast"]), default=0.0)
    for r in replicas:
        capacity = r["kv_capacity_tokens"]
        cells: list[RenderableType] = [
            _short(r["name"]) + ("*" if r["is_draining"] else ""),
            f"{r['num_running']}+{r['num_waiting'] - r['num_paused']}/{r['num_slots']}",
            *[str(r["num_paused"])] * has_paused,
            _bar(r["used_tokens"] / capacity, BAR_CELLS if is_wide else NARROW_BAR_CELLS),
            f"{1e3 * r['step_s']:.1f}",
            f"{r['tokens_per_s']:.0f}",
        ]
        if points:
            steps = [p["step_s"] / slowest if slowest else 0.0 for p in r["forecast"]]
            cells.append(_spark([p["tokens"] / capacity for p in r["forecast"]]))
            cells += [_spark(steps)] * is_wide
            cells.append(_full_in(r["seconds_to_full"]) if r["forecast"] else Text("–"))
        table.add_row(*cells)
    notes = ["* draining"] if any(r["is_draining"] for r in replicas) else []
    if points:
        ahead = ", ".join(f"{p['ahead_s']:.2g}" for p in points)
        notes.append(f"ahead: {ahead} s")
    table.caption, table.caption_justify = "; ".join(notes), "left"
    return table


def _prefill_table(replicas: Sequence[dict[str, Any]]) -> Table:
    table = plain_table("prefill")
    table.add_column("replica", no_wrap=True)
    table.add_column("class", no_wrap=True)
    is_sharing = any(r.get("cached_share") is not None for r in replicas)
    for name in ("running", "waiting", *["shared"] * is_sharing, "tokens/s"):
        table.add_column(name, justify="right")
    for r in replicas:
        table.add_row(
            _short(r["name"]),
            r["depth_class"],
            str(r["num_running"]),
            str(r["num_waiting"]),
            *[f"{r.get('cached_share') or 0:.0%}"] * is_sharing,
            f"{r['tokens_per_s']:.0f}",
        )
    return table


def _requests_table(rows: Sequence[dict[str, Any]], *, is_wide: bool) -> Table:
    table = plain_table("requests, the longest running first")
    for name in ("request", "replica", "status", "for", "tokens", "to go"):
        table.add_column(name, no_wrap=True)
    for name in ("predicted", "so far", "model") if is_wide else ():
        table.add_column(name)
    for row in rows:
        eta = row["eta"] or {}
        whole = [row["tokens"] + eta[name] for name in ("tokens", "lower", "upper") if eta]
        counts = ("migrations", "pauses", "rebuilds", "breaches")
        happened = ", ".join(f"{name} {row[name]}" for name in counts if row[name])
        predicted = "{:.0f} ({:.0f}–{:.0f})".format(*whole) if whole else "–"
        table.add_row(
            Text(row["request_id"][-12:] + (f" #{row['choice']}" if row["choice"] else "")),
            _short(row["replica"] or "–"),
            row["status"],
            f"{row['running_s']:.0f} s",
            str(row["tokens"]),
            f"{eta['seconds']:.0f} s" if "seconds" in eta else "–",
            *((predicted, happened, row["model"]) if is_wide else ()),
        )
    return table


def _moves_table(recent: Sequence[dict[str, Any]], at_unix_s: float, *, is_wide: bool) -> Table:
    table = plain_table("moves, the newest first")
    for name in ("ago", "sequence", "from", "to", "why"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "to come", "gain", "stall ms") if is_wide else ():
        table.add_column(name, justify="right")
    table.add_column("came to")
    for move in reversed(recent):
        report = move["report"]
        outcome = "under way" if report is None else report["outcome"]
        reason = "" if report is None or not report["reason"] else f" ({report['reason']})"
        figures = (
            str(move["num_tokens"]),
            f"{move['remaining_tokens']:.0f}" if move["remaining_tokens"] else "–",
            f"{move['gain']:.0%}",
            "–" if report is None else f"{1e3 * report['stall_s']:.0f}",
        )
        table.add_row(
            f"{max(0.0, at_unix_s - move['at_unix_s']):.0f} s",
            _short(move["sequence_id"]),
            _short(move["source"]),
            _short(move["destination"]),
            move["cause"],
            *(figures if is_wide else ()),
            Text(outcome + reason, style=OUTCOME_STYLES.get(outcome, "cyan")),
        )
    return table


def _short(name: str) -> str:
    """A replica's role and number, or the end of a sequence's id."""
    parts = name.split(":")
    return f"{parts[-3]} {parts[-2]}" if len(parts) == 4 else name[-12:]


def _bar(share: float, num_cells: int) -> Text:
    share = min(max(share, 0.0), 1.0)
    cells = round(share * num_cells)
    style = "red" if share > 0.9 else "yellow" if share > 0.75 else "green"
    return Text("█" * cells, style=style) + Text(
        "░" * (num_cells - cells) + f" {share:4.0%}", style="dim"
    )


def _spark(shares: Sequence[float]) -> Text:
    """One block a point; red where it is over the top."""
    text = Text()
    for share in shares:
        height = min(len(BLOCKS) - 1, max(0, round(share * (len(BLOCKS) - 1))))
        text.append(BLOCKS[height], style="red" if share > 1.0 else "cyan")
    return text


def _full_in(seconds: float | None) -> Text:
    if seconds is None:
        return Text("never", style="green")
    style = "red" if seconds < VERY_SOON_S else "yellow" if seconds < SOON_S else ""
    return Text(f"{seconds:.0f} s", style=style)
