"""Ticks of rescheduling written to a file, read and replayed.

A cluster, or the simulator, records what its scheduler saw and ordered, one JSON line a tick;
`replay` gives the same snapshots to the present policy, under changed settings or with the lengths
that came to be, and compares. The newest ticks are kept in memory as well."""

from __future__ import annotations

import base64
import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from io import StringIO
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, TypeAdapter

from quadriga.core.migration import MigrationOrder
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.errors import ConfigError
from quadriga.files import cut_half_line
from quadriga.policies.ares.depth_pools import DepthPools
from quadriga.policies.ares.forecast import (
    REMAINING,
    REMAINING_LOWER,
    REMAINING_UPPER,
    TOKENS,
    check_forecast,
    packed_anew,
    rows_of,
)
from quadriga.policies.ares.overload import OverloadPlan
from quadriga.policies.ares.rescheduler import Rescheduler
from quadriga.policies.ares.settings import AresSettings, TransferCosts

logger = logging.getLogger(__name__)

VERSION = 4
PACKED = ("rows", "running", "context", "load_s", "tokens")
"""Fields of a forecast that are bytes."""
PLANNED = ("overload", "depth_pools")
"""Settings by which a plan is made before a tick, and recorded with it."""
RECENT_BYTES = 4_000_000
SNAPSHOT_BYTES, ID_BYTES = 2_000, 50
"""About what a snapshot takes without the bytes of its forecast, and a text without its letters."""


def _by_class(lines: Any) -> Any:
    """Pools as a line has them, each with its class, by the class."""
    return {DepthClass(**line.pop("depth_class")): line for line in lines}


@dataclass(frozen=True, slots=True)
class RecordedTick:
    """All that went into one decision, and what came of it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", val_json_bytes="base64")

    at_s: float
    snapshots: list[ReplicaSnapshot]
    settings: AresSettings
    costs: TransferCosts
    predicts: bool
    load_only: bool
    busy: frozenset[str]
    orders: list[MigrationOrder]
    overload: OverloadPlan | None = None
    pools: Annotated[Mapping[DepthClass, DepthPools], BeforeValidator(_by_class)] = field(
        default_factory=dict
    )
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Difference:
    """A tick at which the policy now decides otherwise."""

    at_s: float
    recorded: list[MigrationOrder]
    replayed: list[MigrationOrder]


def write_tick(stream: IO[str], tick: RecordedTick) -> None:
    """Append a tick to a recording."""
    pools = [asdict(pools) | {"depth_class": asdict(c)} for c, pools in tick.pools.items()]
    line = asdict(replace(tick, pools={})) | {"pools": pools}
    stream.write(json.dumps(line, default=_plain) + "\n")


def _plain(value: frozenset[str] | bytes) -> list[str] | str:
    """What JSON has in the place of a value it does not know."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return sorted(value)


class Recording:
    """The decisions on a file, up to a size; a file that cannot be written ends it, no more."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._is_begun = self._is_over = False

    def add(self, tick: RecordedTick) -> None:
        """Append a decision, unless the file is full."""
        if self._is_over:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_begun:
                if self._path.is_file():
                    next(read_ticks(self._path), None)  # as it is: of another version?
                cut_half_line(self._path)
                self._is_begun = True
            with self._path.open("a", encoding="utf-8") as stream:
                write_tick(stream, tick)
                self._is_over = stream.tell() >= self._max_bytes
            if self._is_over:
                logger.warning("the recording has its %d bytes; it ends", self._max_bytes)
        except (OSError, ConfigError) as exc:
            logger.warning("the recording ends: scheduler.ares.record_file: %s; name another", exc)
            self._is_over = True


class RecentTicks:
    """The newest decisions, in memory, up to about so many bytes."""

    def __init__(self, max_bytes: int = RECENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._ticks: deque[tuple[int, RecordedTick]] = deque()
        self._num_bytes = 0

    def add(self, tick: RecordedTick) -> None:
        """Keep a decision, and forget the oldest where there are too many."""
        held = [s.forecast for s in tick.snapshots if s.forecast is not None]
        ids = sum(ID_BYTES + len(name) for forecast in held for name in forecast.sequence_ids)
        packed = sum(len(getattr(forecast, name)) for forecast in held for name in PACKED)
        size = ids + packed + SNAPSHOT_BYTES * len(tick.snapshots)
        self._ticks.append((size, tick))
        self._num_bytes += size
        while self._num_bytes > self._max_bytes and len(self._ticks) > 1:
            self._num_bytes -= self._ticks.popleft()[0]

    def all(self) -> list[RecordedTick]:
        """What is kept, oldest first; from any thread, while others are added."""
        return [tick for _, tick in tuple(self._ticks)]


def lines_of(ticks: Iterable[RecordedTick]) -> str:
    """Return ticks as a recording has them."""
    stream = StringIO()
    for tick in ticks:
        write_tick(stream, tick)
    return stream.getvalue()


def read_ticks(path: Path) -> Iterator[RecordedTick]:
    """Yield the ticks of a recording, in order; half a last line is none.

    Raises:
        ConfigError: A line is no tick of this version, or the file no text.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            whole = (line for line in stream if line.endswith("\n"))
            yield from parse_ticks(whole, str(path))
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: no text; unpack a recording that is packed ({exc})") from exc


def parse_ticks(lines: Iterable[str], source: str) -> Iterator[RecordedTick]:
    """Yield the ticks of lines that came from `source`. Raises: ConfigError: As `read_ticks`."""
    reader = TypeAdapter(RecordedTick)
    for number, text in enumerate(lines, 1):
        try:
            if (version := json.loads(text)["version"]) != VERSION:
                raise ValueError(f"version {version}, this is {VERSION}")
            tick = reader.validate_json(text)
            for forecast in (s.forecast for s in tick.snapshots if s.forecast is not None):
                check_forecast(forecast)
            yield tick
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            ConfigError,
        ) as exc:
            raise ConfigError(f"{source}, line {number}: not a recorded tick ({exc})") from exc


def replay(
    ticks: Iterable[RecordedTick], changes: Mapping[str, float] | None = None
) -> list[Difference]:
    """Decide each tick again and return where the orders differ.

    Args:
        changes: Settings to decide by instead of the recorded ones, by name.

    Raises:
        ConfigError: A setting does not exist, or its value is out of range; or ticks do not show
            what it would change.
    """
    changes = changes or {}
    known = {field.name for field in fields(AresSettings)} - {"hold_share"}
    for name, value in changes.items():
        if name not in known:
            raise ConfigError(f"{name}: cannot be replayed; what can: {', '.join(sorted(known))}")
        if name in PLANNED and value != 0:
            raise ConfigError(
                f"{name}: {value:g} cannot be replayed: ticks hold what was planned, and not what "
                f"would have been; 0 leaves the plans out"
            )
    differences = []
    for tick in ticks:
        settings = replace(tick.settings, **changes)  # type: ignore[arg-type]
        orders = Rescheduler(settings, predicts=tick.predicts).tick(
            tick.snapshots,
            tick.costs,
            busy=tick.busy,
            load_only=tick.load_only,
            overload=tick.overload if settings.overload else None,
            pools=tick.pools if settings.depth_pools else None,
        )
        if orders != tick.orders:
            differences.append(Difference(tick.at_s, tick.orders, orders))
    return differences


def with_exact_lengths(ticks: Iterable[RecordedTick]) -> list[RecordedTick]:
    """Put in place of every prediction the tokens that the sequence still gained.

    A sequence has ended where a later tick does not show it any more; of one that the last tick
    still shows, the prediction stays. Up to a tick's tokens are missed at each end.
    """
    ticks = list(ticks)
    last: dict[str, float] = {}
    for tick in ticks:
        for forecast in (s.forecast for s in tick.snapshots if s.forecast is not None):
            tokens = rows_of(forecast)[:, TOKENS]
            for name, held in zip(forecast.sequence_ids, tokens.tolist(), strict=True):
                last[name] = max(held, last.get(name, 0.0))
    shown = [s.forecast for s in ticks[-1].snapshots if s.forecast] if ticks else []
    for name in (name for forecast in shown for name in forecast.sequence_ids):
        last.pop(name, None)
    return [
        replace(tick, snapshots=[_exact(s, last) for s in tick.snapshots], load_only=False)
        for tick in ticks
    ]


def _exact(snapshot: ReplicaSnapshot, last: Mapping[str, float]) -> ReplicaSnapshot:
    forecast = snapshot.forecast
    if forecast is None:
        return snapshot
    rows = rows_of(forecast).copy()
    for index, name in enumerate(forecast.sequence_ids):
        if name in last:
            gained = max(0.0, last[name] - float(rows[index, TOKENS]))
            rows[index, [REMAINING, REMAINING_LOWER, REMAINING_UPPER]] = gained
    packed = packed_anew(forecast, rows, snapshot.step_time_s)
    return replace(snapshot, forecast=packed)
