"""`python -m loadgen replay`: what rescheduling would have decided under other settings.

Takes the newest ticks from the service's admin port (`/cluster/ticks`; about 4 MB of them are
kept), or a file that `scheduler.ares.record_file` or `--save` wrote, and decides each again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from loadgen.options import whole
from loadgen.report.output import file_to_write
from loadgen.report.plain_table import plain_table
from loadgen.wire.admin import add_admin_arguments, admin_client, fetch_text
from quadriga.core.migration import MigrationOrder
from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from quadriga.policies.ares.recording import (
    RecordedTick,
    parse_ticks,
    read_ticks,
    replay,
    with_exact_lengths,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("file", nargs="?", type=Path, help="a recording; default: ask the service")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of rescheduling to decide by: theta=.1, min_gain=.01, cooldown_s=1",
    )
    parser.add_argument(
        "--exact", action="store_true", help="decide by the lengths that the sequences came to have"
    )
    parser.add_argument(
        "--save", type=file_to_write, help="write the service's ticks to this file as well"
    )
    parser.add_argument("--shown", type=whole(0), default=20, help="differing ticks shown")
    add_admin_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Decide again and show what differs."""
    changes = dict(_change(text) for text in args.set)
    ticks = _ticks(args)
    if not ticks:
        raise ConfigError("no tick is recorded; two decode replicas of one depth are needed")
    again = with_exact_lengths(ticks) if args.exact else ticks
    differences = replay(again, changes)
    console = Console()
    table = plain_table("ticks that are decided otherwise")
    for name in ("at", "recorded", "now"):
        table.add_column(name)
    for difference in differences[: args.shown]:
        table.add_row(
            f"{difference.at_s - ticks[0].at_s:.1f} s",
            _shown(difference.recorded),
            _shown(difference.replayed),
        )
    if differences:
        console.print(table)
    recorded = sum(len(tick.orders) for tick in ticks)
    changed = sum(len(d.replayed) - len(d.recorded) for d in differences)
    console.print(
        f"{len(ticks)} ticks in {ticks[-1].at_s - ticks[0].at_s:.0f} s; {len(differences)} are "
        f"decided otherwise; {recorded} moves were ordered, {recorded + changed} would be now. "
        "Each tick is decided by itself: moves that were made stay made."
    )
    return 0


def _ticks(args: argparse.Namespace) -> list[RecordedTick]:
    if args.file is not None:
        if args.save is not None:
            raise ConfigError("--save: not with FILE, which has the ticks already", param="save")
        try:
            return list(read_ticks(args.file))
        except OSError as exc:
            raise ConfigError(f"{args.file}: cannot be read: {exc.strerror}") from exc
    text = fetch_text(admin_client(args), args.url, "/cluster/ticks")
    if args.save is not None:
        write_atomically(args.save, text.encode())
    return list(parse_ticks(text.splitlines(), args.url))


def _change(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise ConfigError(f"--set {text}: not NAME=NUMBER, as in theta=.1") from None


def _shown(orders: Sequence[MigrationOrder]) -> str:
    return "; ".join(f"{o.sequence_id[-12:]} → {o.destination}" for o in orders) or "nothing"
