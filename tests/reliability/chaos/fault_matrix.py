"""What is broken, when, and by whom: the cells of the matrix."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class Fault(StrEnum):
    """How it is harmed."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    PARTITION = "partition"
    STALL = "transport stall"
    CORRUPTION = "KV corruption"
    MEMORY = "out of memory"
    DISK = "full disk"

    @property
    def number(self) -> signal.Signals:
        """Of the two that are signals."""
        return signal.Signals[self.value]


class Moment(StrEnum):
    """When it is harmed."""

    BEFORE_FIRST_TOKEN = "before first token"
    MID_STREAM = "mid-stream"
    RESERVE = "migration reserve"
    COPY = "migration copy"
    COMMIT = "migration commit"
    RESIZE = "during resize"
    SWITCH = "during model switch"


class Victim(StrEnum):
    """Which kind of process, by the names of `service_processes`; or a decode replica's part in a
    migration; or all that runs on one node."""

    PREFILL = "prefill"
    DECODE = "decode"
    SOURCE = "source"
    DESTINATION = "destination"
    INGRESS = "ingress"
    SCHEDULER = "scheduler"
    CONTROLLER = "controller"
    NODE = "node"


MIGRATION = (Moment.RESERVE, Moment.COPY, Moment.COMMIT)
CHANGES = (Moment.RESIZE, Moment.SWITCH)
IN_TRANSIT = (Fault.STALL, Fault.CORRUPTION)
REPLICAS = (Victim.PREFILL, Victim.DECODE, Victim.SOURCE, Victim.DESTINATION)


class Stage(StrEnum):
    """The service that a cell needs; one is started after the other."""

    PLAIN = "plain"
    CHOOSING = "choosing models and depths"
    NODES = "nodes in network namespaces"
    CHOOSING_NODES = "choosing nodes in network namespaces"


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to break the service."""

    fault: Fault
    moment: Moment
    victim: Victim

    def __str__(self) -> str:
        return f"{self.fault} {self.victim}, {self.moment}"

    @property
    def stage(self) -> Stage:
        """Where it is run."""
        needs_nodes = self.fault is Fault.PARTITION or self.victim is Victim.NODE
        if self.moment in CHANGES:
            return Stage.CHOOSING_NODES if needs_nodes else Stage.CHOOSING
        return Stage.NODES if needs_nodes else Stage.PLAIN

    @property
    def is_struck_first(self) -> bool:
        """Whether the streams come after the blow: their KV is what it is to meet."""
        return self.fault in IN_TRANSIT and self.moment in CHANGES

    @property
    def why_not(self) -> str | None:
        """Why it cannot be, or would be another cell again; None where it is run."""
        return _why_not_the_victim(self) or _why_not_the_fault(self)


def _why_not_the_victim(cell: Cell) -> str | None:
    is_move = cell.moment in MIGRATION
    if cell.victim in (Victim.SOURCE, Victim.DESTINATION) and not is_move:
        return "nothing moves then: a decode replica is the victim `decode`"
    if cell.victim is Victim.DECODE and is_move:
        return "a decode replica is `source` or `destination` then"
    return None


def _why_not_the_fault(cell: Cell) -> str | None:
    fault, moment, victim = cell.fault, cell.moment, cell.victim
    if fault is Fault.MEMORY and victim is Victim.NODE:
        return "memory lacks a process: one of the other victims"
    if fault is Fault.PARTITION and victim is Victim.NODE:
        return "a replica is cut off with its node: the victims `prefill`, `decode`, `source`, …"
    if fault not in IN_TRANSIT:
        return None
    if victim not in REPLICAS:
        return "no KV passes through it; a node's is its replicas'"
    if moment is Moment.MID_STREAM:
        return "no KV is in transit while sequences merely decode"
    if moment is Moment.RESERVE:
        return "no KV is in transit before room is promised"
    if moment is Moment.COMMIT:
        return "all KV has arrived when the commit leaves"
    if moment is Moment.COPY and victim is Victim.PREFILL:
        return "it has no part in a migration; its own KV is in `before first token`"
    if fault is Fault.CORRUPTION and victim is Victim.DESTINATION:
        return "between two ends there is one wire: `source`"
    if fault is Fault.CORRUPTION and victim is Victim.DECODE:
        return "between two ends there is one wire: `prefill`"
    return None


MATRIX = tuple(Cell(*parts) for parts in product(Fault, Moment, Victim))
"""The whole product; `why_not` says which of them are not run."""

_SIGNALS = (Fault.KILL, Fault.STOP)
_EARLY = (Moment.BEFORE_FIRST_TOKEN, Moment.MID_STREAM)
_PROCESSES = (Victim.PREFILL, Victim.DECODE, Victim.SCHEDULER, Victim.CONTROLLER)

QUICK = tuple(Cell(*parts) for parts in product(_SIGNALS, _EARLY, _PROCESSES))

QUICK_NEW = (
    Cell(Fault.KILL, Moment.MID_STREAM, Victim.INGRESS),
    Cell(Fault.KILL, Moment.COMMIT, Victim.SOURCE),
    Cell(Fault.KILL, Moment.COMMIT, Victim.DESTINATION),
    Cell(Fault.STALL, Moment.BEFORE_FIRST_TOKEN, Victim.PREFILL),
    Cell(Fault.CORRUPTION, Moment.BEFORE_FIRST_TOKEN, Victim.PREFILL),
    Cell(Fault.MEMORY, Moment.MID_STREAM, Victim.DECODE),
    Cell(Fault.DISK, Moment.MID_STREAM, Victim.DECODE),
    Cell(Fault.PARTITION, Moment.MID_STREAM, Victim.DECODE),
    Cell(Fault.KILL, Moment.RESIZE, Victim.DECODE),
    Cell(Fault.KILL, Moment.SWITCH, Victim.CONTROLLER),
)
"""One of each fault that is no signal, and of places and moments that the others do not reach."""
