"""HELIOS: choose model and depth from live profiles; load only the layers worth having.

messages     what the machine is told, and what it orders: the seam to the controller
candidates   step 1: at most three models of the catalogue
profiling    step 2: live requests at full depth
history      the performance history table; `history_file` keeps it
changed      how many tokens a partial depth is expected to change
plans        what each model would do at each depth worth loading
selection    the best plan by objective, and what a change costs
choices      after a profile, after too many breaches
breaches     the confidence breach counter
fleet        which replica shall hold what
orders       one order at a time
status       what the machine says of itself
start        from the configuration to a machine
machine      all of it together

The controller makes one `Helios` (`start.start_helios`), calls `handle(event, now_s)` for
everything that happens, and carries out the `Resize` and `Switch` orders it returns, one at a time
by construction; it answers each with `OrderDone` or `OrderFailed`. The scheduler routes auto
requests by `routing`.
"""

from quadriga.policies.helios.candidates import Picked, Refusal, pick_candidates
from quadriga.policies.helios.history import HistoryRow, HistoryTable
from quadriga.policies.helios.machine import Helios
from quadriga.policies.helios.messages import (
    Choose,
    ChosenDevice,
    ControllerTick,
    Event,
    Keep,
    Order,
    OrderDone,
    OrderFailed,
    Output,
    ReplicaReport,
    RequestFinished,
    RequestLost,
    RequestStarted,
    Resize,
    Routing,
    Switch,
    TokensServed,
    UnchangedSampled,
)
from quadriga.policies.helios.status import Counters, HeliosPhase, ModelDecision, Status

__all__ = [
    "Choose",
    "ChosenDevice",
    "ControllerTick",
    "Counters",
    "Event",
    "Helios",
    "HeliosPhase",
    "HistoryRow",
    "HistoryTable",
    "Keep",
    "ModelDecision",
    "Order",
    "OrderDone",
    "OrderFailed",
    "Output",
    "Picked",
    "Refusal",
    "ReplicaReport",
    "RequestFinished",
    "RequestLost",
    "RequestStarted",
    "Resize",
    "Routing",
    "Status",
    "Switch",
    "TokensServed",
    "UnchangedSampled",
    "pick_candidates",
]
