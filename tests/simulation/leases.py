"""Every order of events between a source and two destinations, over the real `LeaseTable`s.

The tables decide as in a replica, and rows are given back a step later, as by an engine. A source
is the most general one that keeps to one rule: it offers a sequence to nobody else before the last
destination has said what became of its transfer, or is dead. Between any two events messages may
be delivered in any order, lost, or delivered again later; a lease may lapse, a source may give up,
either side may die, and an owner may hand the sequence on. A state that was seen is not gone
through again, so what is printed is all that can happen within the bounds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from quadriga.core.kv import KVPart, TransferOffer
from quadriga.core.replica import DepthClass
from quadriga.errors import KVTransportError, MigrationFailed, Overloaded
from quadriga.scheduling.transfer.handoff import Lease, LeaseState, LeaseTable

CLASS = DepthClass("m", 1)
SEQUENCE, SOURCE, PAIR = "s", "p", ("a", "b")
NUM_PARTS = 1
LONG_AGO_S, MUCH_LATER_S = 0.0, 1e9
ENDS = frozenset({LeaseState.ABORTED, LeaseState.CANCELLED, LeaseState.LAPSED})

Message = tuple[str, int]
"""(what, number of the transfer)."""
Table = tuple[Any, ...]


class BrokenPromise(AssertionError):
    """Something that must never hold; with the events that led there."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may happen on the way."""

    transfers: int = 3
    lost: int = 2
    repeated: int = 2
    deaths: int = 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a source knows of a transfer: "reserving", "sending", "committing", "aborting", "over".

    Attributes:
        source: Who sends: the prefill replica, or the owner.
    """

    source: str
    destination: str
    epoch: int
    phase: str = "reserving"


@dataclass(frozen=True, slots=True)
class State:
    """The whole world.

    Attributes:
        tables: Of the two destinations.
        runs: Where the sequence runs.
        stands: Owner that stands still while its commit is under way.
        pending: Messages on their way, sorted.
        to_free: (destination, transfer) whose row is given back next.
        epoch: Highest that was given to a transfer.
    """

    tables: tuple[Table, Table]
    runs: frozenset[str] = frozenset()
    stands: str = ""
    transfers: tuple[Transfer, ...] = ()
    pending: tuple[Message, ...] = ()
    to_free: frozenset[tuple[str, int]] = frozenset()
    dead: frozenset[str] = frozenset()
    num_lost: int = 0
    num_repeated: int = 0


def _part(number: int) -> KVPart:
    return KVPart(str(number), 0, 0, 1, 0, 1, (1, 2, 1, 1, 1), "float32", 0)


def _offer(number: int, transfer: Transfer) -> TransferOffer:
    return TransferOffer(str(number), SEQUENCE, CLASS, transfer.source, transfer.epoch, 1, 8, 1.0)


def _freeze(table: LeaseTable) -> Table:
    leases = tuple((tid, v.state, tuple(v.parts)) for tid, v in sorted(table._leases.items()))
    return leases, tuple(sorted(table._ended.items())), table._epochs.get(SEQUENCE, -1)


def _thaw(frozen: Table, transfers: tuple[Transfer, ...]) -> LeaseTable:
    leases, ended, epoch = frozen
    table = LeaseTable(CLASS)
    for tid, state, parts in leases:
        lease = Lease(_offer(int(tid), transfers[int(tid)]), 0, 1, LONG_AGO_S, state)
        lease.parts = {index: _part(int(tid)) for index in parts}
        lease.checksums = dict.fromkeys(parts, 0)
        table._leases[tid] = lease
    table._ended = OrderedDict(ended)
    if epoch >= 0:
        table._epochs[SEQUENCE] = epoch
    return table


class Checker:
    """Goes through all states, those that fewest events lead to first.

    Attributes:
        num_states, depth: Seen so far, and events to the farthest.
        ends: How transfers ended, over all states in which nothing is left to happen.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.num_states = self.num_events = self.depth = 0
        self.ends: Counter[str] = Counter()

    def run(self) -> None:
        """Raises: BrokenPromise."""
        empty = _freeze(LeaseTable(CLASS))
        first = State((empty, empty))
        before: dict[State, tuple[State, str] | None] = {first: None}
        due = deque([(first, 0)])
        while due:
            state, depth = due.popleft()
            self.depth = max(self.depth, depth)
            following = list(self._next(state, before))
            self.num_events += len(following)
            if not following:
                self._check_end(state, before)
            for event, reached in following:
                then = _without_void(reached)
                if then not in before:
                    before[then] = state, event
                    self._check(then, before)
                    due.append((then, depth + 1))
        self.num_states = len(before)

    # What may happen

    def _next(self, state: State, before: Any) -> Iterator[tuple[str, State]]:
        yield from self._messages(state)
        yield from self._of_sources(state)
        if SOURCE not in state.dead and len(state.dead) < self.bounds.deaths:
            yield f"{SOURCE} dies", _died(state, SOURCE)
        for i, name in enumerate(PAIR):
            if name in state.dead:
                continue
            table = _thaw(state.tables[i], state.transfers)
            lapsed = table.lapse(now_s=MUCH_LATER_S)
            if lapsed:
                freed = {(name, int(v.offer.transfer_id)) for v in lapsed}
                then = replace(state, to_free=state.to_free | freed)
                yield f"leases lapse at {name}", _with(then, i, table)
            if len(state.dead) < self.bounds.deaths:
                yield f"{name} dies", _died(state, name)
        for name, number in state.to_free:
            i = PAIR.index(name)
            table = _thaw(state.tables[i], state.transfers)
            lease = table._leases.get(str(number))
            if lease is not None:
                table.freed(lease)
            then = replace(state, to_free=state.to_free - {(name, number)})
            yield f"{name} gives the row of {number} back", _with(then, i, table)

    def _messages(self, state: State) -> Iterator[tuple[str, State]]:
        for message in sorted(set(state.pending)):
            rest = list(state.pending)
            rest.remove(message)
            less = replace(state, pending=tuple(rest))
            what, number = message
            yield f"{what} of {number} arrives", self._arrive(less, what, number)
            if state.num_lost < self.bounds.lost:
                yield f"{what} of {number} is lost", replace(less, num_lost=state.num_lost + 1)
            if state.num_repeated < self.bounds.repeated and not what.startswith("answer"):
                again = replace(state, num_repeated=state.num_repeated + 1)
                yield f"{what} of {number} comes twice", self._arrive(again, what, number)

    def _of_sources(self, state: State) -> Iterator[tuple[str, State]]:
        """What a source may do by itself."""
        for number, transfer in enumerate(state.transfers):
            if transfer.source in state.dead or transfer.phase == "over":
                continue
            asks = {"committing": "commit", "aborting": "abort"}.get(transfer.phase)
            if transfer.destination in state.dead:
                # An owner goes on under a higher epoch; a prefill replica begins another name.
                then = _phase(state, number, "over")
                if transfer.source == state.stands:
                    then = replace(then, runs=then.runs | {state.stands}, stands="")
                yield f"the source of {number} hears of the death", then
                continue
            if asks is not None and not any(n == number for _, n in state.pending):
                yield f"the source of {number} asks again", _send(state, asks, number)
            if transfer.phase in ("reserving", "sending", "committing"):
                yield (
                    f"the source gives {number} up",
                    _send(_phase(state, number, "aborting"), "abort", number),
                )
        if len(state.transfers) == self.bounds.transfers:
            return
        if any(t.phase != "over" and t.source not in state.dead for t in state.transfers):
            return
        source, epoch = SOURCE, 1
        if not state.runs and SOURCE in state.dead:
            return
        if state.runs:
            source = next(iter(state.runs))
            epoch = 1 + max(t.epoch for t in state.transfers)
        elif any(t.destination in state.dead for t in state.transfers):
            return
        for destination in PAIR:
            if destination != source and destination not in state.dead:
                transfer = Transfer(source, destination, epoch)
                more = replace(state, transfers=(*state.transfers, transfer))
                yield (
                    f"{source} offers {len(state.transfers)} to {destination}",
                    _send(more, "reserve", len(state.transfers)),
                )

    def _arrive(self, state: State, what: str, number: int) -> State:
        transfer = state.transfers[number]
        if what.startswith("answer"):
            return self._answered(state, what.removeprefix("answer "), number)
        name = transfer.destination
        if name in state.dead:
            return state
        i = PAIR.index(name)
        table = _thaw(state.tables[i], state.transfers)
        answer, then = "refused", state
        try:
            if what == "reserve":
                then = self._reserve(state, table, name, number)
                answer = "reserved"
            elif what == "part":
                lease = table.begin_store(transfer.source, _part(number), now_s=LONG_AGO_S)
                if table.end_store(lease, _part(number), 0, now_s=LONG_AGO_S):
                    then = replace(state, to_free=state.to_free | {(name, number)})
                answer = "stored"
            elif what == "commit":
                lease = table.commit(
                    str(number), epoch=transfer.epoch, num_tokens=1, checksums=[0] * NUM_PARTS
                )
                if lease is not None:
                    then = replace(state, runs=state.runs | {name})
                answer = "committed"
            else:
                lease = table.abort(str(number))
                if lease is not None:
                    then = replace(state, to_free=state.to_free | {(name, number)})
                end = table.state(str(number))
                answer = "committed" if end is LeaseState.COMMITTED else "aborted"
        except (MigrationFailed, KVTransportError, Overloaded):
            pass
        return _send(_with(then, i, table), f"answer {answer}", number)

    def _reserve(self, state: State, table: LeaseTable, name: str, number: int) -> State:
        """As `HandoffReceiver.reserve`."""
        if table.get(str(number)) is not None:
            return state
        offer = _offer(number, state.transfers[number])
        freed = set()
        for rival in table.check_offer(offer):
            if table.abort(rival) is not None:
                freed.add((name, int(rival)))
        then = replace(state, to_free=state.to_free | freed)
        table.check_row(SEQUENCE)
        if name in state.runs or name == state.stands:
            raise BrokenPromise(f"{name} promises a row to what it runs")
        table.open(offer, 0, now_s=LONG_AGO_S)
        return then

    def _answered(self, state: State, answer: str, number: int) -> State:
        """The source hears of its transfer; late answers to earlier questions change nothing."""
        transfer = state.transfers[number]
        phase = transfer.phase
        if transfer.source in state.dead or phase == "over":
            return state
        if answer == "committed" and phase in ("committing", "aborting"):
            done = _phase(state, number, "over")
            return replace(done, stands="") if transfer.source == state.stands else done
        if answer == "aborted" and phase == "aborting":
            failed = _phase(state, number, "over")
            if transfer.source == state.stands:
                return replace(failed, runs=failed.runs | {state.stands}, stands="")
            return failed
        if answer == "reserved" and phase == "reserving":
            return _send(_phase(state, number, "sending"), "part", number)
        if answer == "stored" and phase == "sending":
            going = _send(_phase(state, number, "committing"), "commit", number)
            if transfer.source in going.runs:  # it stands still from here on
                going = replace(going, runs=going.runs - {transfer.source}, stands=transfer.source)
            return going
        if answer == "refused" and phase in ("reserving", "sending"):
            return _send(_phase(state, number, "aborting"), "abort", number)
        return state

    # What must hold

    def _check(self, state: State, before: Any) -> None:
        if len(state.runs) > 1:
            raise BrokenPromise(f"{sorted(state.runs)} run it at once:\n{_way(state, before)}")

    def _check_end(self, state: State, before: Any) -> None:
        """Nothing is left to happen."""
        for name, table in zip(PAIR, state.tables, strict=True):
            if name not in state.dead and table[0]:
                raise BrokenPromise(f"{name} keeps {table[0]}:\n{_way(state, before)}")
        if state.stands and state.stands not in state.dead:
            raise BrokenPromise(f"{state.stands} stands still:\n{_way(state, before)}")
        for transfer in state.transfers:
            if transfer.source not in state.dead:
                self.ends[transfer.phase] += 1


def _with(state: State, i: int, table: LeaseTable) -> State:
    tables = list(state.tables)
    tables[i] = _freeze(table)
    return replace(state, tables=(tables[0], tables[1]))


def _send(state: State, what: str, number: int) -> State:
    return replace(state, pending=tuple(sorted([*state.pending, (what, number)])))


USEFUL = {
    "answer reserved": ("reserving",),
    "answer stored": ("sending",),
    "answer refused": ("reserving", "sending"),
    "answer committed": ("committing", "aborting"),
    "answer aborted": ("aborting",),
}
"""Phases in which a source does something with an answer; phases only go forward."""


def _without_void(state: State) -> State:
    """Without messages that can have no effect any more: these are the same state."""
    kept = []
    for what, number in state.pending:
        transfer = state.transfers[number]
        if what in USEFUL:
            if transfer.phase in USEFUL[what] and transfer.source not in state.dead:
                kept.append((what, number))
        elif transfer.destination not in state.dead:
            kept.append((what, number))
    return replace(state, pending=tuple(kept))


def _phase(state: State, number: int, phase: str) -> State:
    transfers = list(state.transfers)
    transfers[number] = replace(transfers[number], phase=phase)
    return replace(state, transfers=tuple(transfers))


def _died(state: State, name: str) -> State:
    return replace(
        state,
        dead=state.dead | {name},
        runs=state.runs - {name},
        stands="" if state.stands == name else state.stands,
        to_free=frozenset(f for f in state.to_free if f[0] != name),
    )


def _way(state: State, before: dict[State, tuple[State, str] | None]) -> str:
    events = []
    while (step := before[state]) is not None:
        state, event = step
        events.append(event)
    return "\n".join(reversed(events))
