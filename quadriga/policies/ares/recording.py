"""Ticks of rescheduling written to a file, read and replayed.

A cluster, or the simulator, records what its scheduler saw and ordered, one JSON line a tick;
`replay` gives the same snapshots to the present policy and compares. It answers "why did this
request move?" after the fact, and shows where cluster, simulator and policy differ."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from quadriga.core.forecast import LoadForecast
from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.errors import ConfigError
from quadriga.policies.ares.rescheduler import Rescheduler
from quadriga.policies.ares.settings import AresSettings, TransferCosts

logger = logging.getLogger(__name__)

VERSION = 2
PACKED = ("rows", "running", "context", "load_s", "tokens")
"""Fields of a forecast that are bytes."""


@dataclass(frozen=True, slots=True)
class RecordedTick:
    """All that went into one decision, and what came of it."""

    at_s: float
    snapshots: list[ReplicaSnapshot]
    settings: AresSettings
    costs: TransferCosts
    predicts: bool
    load_only: bool
    busy: frozenset[str]
    orders: list[MigrationOrder]


@dataclass(frozen=True, slots=True)
class Difference:
    """A tick at which the policy now decides otherwise."""

    at_s: float
    recorded: list[MigrationOrder]
    replayed: list[MigrationOrder]


def write_tick(stream: IO[str], tick: RecordedTick) -> None:
    """Append a tick to a recording."""
    line = {
        "version": VERSION,
        "at_s": tick.at_s,
        "settings": asdict(tick.settings),
        "costs": asdict(tick.costs),
        "predicts": tick.predicts,
        "load_only": tick.load_only,
        "busy": sorted(tick.busy),
        "snapshots": [_packed(s) for s in tick.snapshots],
        "orders": [asdict(o) for o in tick.orders],
    }
    stream.write(json.dumps(line) + "\n")


class Recording:
    """The decisions on a file, up to a size; a file that cannot be written ends it, no more."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._is_over = False

    def add(self, tick: RecordedTick) -> None:
        """Append a decision, unless the file is full."""
        if self._is_over:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                write_tick(stream, tick)
                self._is_over = stream.tell() >= self._max_bytes
            if self._is_over:
                logger.warning("the recording has its %d bytes; it ends", self._max_bytes)
        except OSError as exc:
            logger.warning("the recording ends: scheduler.ares.record_file: %s", exc)
            self._is_over = True


def read_ticks(path: Path) -> Iterator[RecordedTick]:
    """Yield the ticks of a recording, in order.

    Raises:
        ConfigError: A line is no tick of this version.
    """
    with path.open(encoding="utf-8") as stream:
        for number, text in enumerate(stream, 1):
            try:
                line = json.loads(text)
                if line["version"] != VERSION:
                    raise ValueError(f"version {line['version']}, this is {VERSION}")
                yield _tick(line)
            except (ValueError, KeyError, TypeError) as exc:
                raise ConfigError(f"{path}, line {number}: not a recorded tick ({exc})") from exc


def replay(ticks: Iterable[RecordedTick]) -> list[Difference]:
    """Decide each tick again and return where the orders differ."""
    differences = []
    for tick in ticks:
        orders = Rescheduler(tick.settings, predicts=tick.predicts).tick(
            tick.snapshots, tick.costs, busy=tick.busy, load_only=tick.load_only
        )
        if orders != tick.orders:
            differences.append(Difference(tick.at_s, tick.orders, orders))
    return differences


def _packed(snapshot: ReplicaSnapshot) -> dict[str, Any]:
    line = asdict(snapshot)
    forecast = line["forecast"]
    if forecast is not None:
        for name in PACKED:
            forecast[name] = base64.b64encode(forecast[name]).decode("ascii")
    return line


def _snapshot(line: dict[str, Any]) -> ReplicaSnapshot:
    info = dict(line["info"])
    info["role"] = Role(info["role"])
    info["depth_class"] = DepthClass(**info["depth_class"])
    info["transports"] = tuple(info["transports"])
    forecast = line["forecast"]
    if forecast is not None:
        forecast = dict(forecast)
        for name in PACKED:
            forecast[name] = base64.b64decode(forecast[name], validate=True)
        forecast["grid_s"] = tuple(forecast["grid_s"])
        forecast["sequence_ids"] = tuple(forecast["sequence_ids"])
    fields = {**line, "info": ReplicaInfo(**info)}
    fields["forecast"] = None if forecast is None else LoadForecast(**forecast)
    return ReplicaSnapshot(**fields)


def _order(line: dict[str, Any]) -> MigrationOrder:
    return MigrationOrder(
        **{
            **line,
            "depth_class": DepthClass(**line["depth_class"]),
            "cause": MigrationCause(line["cause"]),
        }
    )


def _tick(line: dict[str, Any]) -> RecordedTick:
    return RecordedTick(
        at_s=line["at_s"],
        snapshots=[_snapshot(s) for s in line["snapshots"]],
        settings=AresSettings(**line["settings"]),
        costs=TransferCosts(**line["costs"]),
        predicts=line["predicts"],
        load_only=line["load_only"],
        busy=frozenset(line["busy"]),
        orders=[_order(o) for o in line["orders"]],
    )
