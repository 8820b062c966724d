"""What is broken, when, and by whom: the cells of the matrix."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class Fault(StrEnum):
    """How a process is harmed."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"

    @property
    def number(self) -> signal.Signals:
        return signal.Signals[self.value]


class Moment(StrEnum):
    """When it is harmed, seen from the streams."""

    BEFORE_FIRST_TOKEN = "before first token"
    MID_STREAM = "mid-stream"


class Victim(StrEnum):
    """Which kind of process; the names are those of `service_processes`."""

    PREFILL = "prefill"
    DECODE = "decode"
    SCHEDULER = "scheduler"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to break the service."""

    fault: Fault
    moment: Moment
    victim: Victim

    def __str__(self) -> str:
        return f"{self.fault} {self.victim}, {self.moment}"


QUICK = tuple(Cell(*parts) for parts in product(Fault, Moment, Victim))
