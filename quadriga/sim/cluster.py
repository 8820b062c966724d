"""The simulated cluster: an event queue, and the path of a request through it.

    arrival → admission → prefill queue → prefill pass → placement → KV transfer → decode batch
                                  ↑                          ↑ no room: waits         │ ↑
                                  └── rebuilt after a death ──────────── tick: move ──┘ └ full

Admission, prefill queue, placement, rescheduling and the choice of victims are the cluster's own
code; only the time that work takes is modelled.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quadriga.config.scheduling import SchedulerConfig
from quadriga.core.replica import ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import AdmitRequest
from quadriga.errors import Overloaded, QuadrigaError
from quadriga.policies.admission import admit
from quadriga.policies.ares.overload import may_hold_more
from quadriga.sim.board import NOWHERE, Board
from quadriga.sim.config import DEPTH_CLASS, MODEL, Failure, SimConfig
from quadriga.sim.decode.lock_step import LockStep, LockStepReplica
from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.decode.vllm import VllmDecodeReplica
from quadriga.sim.moving import Moving
from quadriga.sim.placing import Placing, RoomlessSequence
from quadriga.sim.policies import PolicySet
from quadriga.sim.prediction import RemainingPredictor
from quadriga.sim.prefill import SimulatedPrefillReplica
from quadriga.sim.profiles import NO_DELAYS, drawn
from quadriga.sim.records import Gaps, Happened, Sequence
from quadriga.sim.results import Sample, SimulatedRun
from quadriga.sim.scaling import Autoscaler

_SCHEDULER = SchedulerConfig()
_MOST_ASKED = 16
"""Of the sequences that wait for a decode replica, so many are looked at each time."""


class Simulation:
    """One run of one load under one policy.

    Ticks and reports stand still while the cluster is empty, however long that is.

    Args:
        arrivals_s: [num_requests], ascending.
        input_tokens, output_tokens: [num_requests].
        predictor: In place of the policy's own; policies that do not foresee ask none.
        on_tick: Called at each tick with the time and the number of open requests.
        stop: Asked at each tick, with the time; True ends the run there.
        on_decision: Called with (now, cluster, costs, busy, load_only, orders, placing) of each
            decision, for recordings.
        make_replica: Makes the decode replicas; by default as `config.memory` says. Tests put a
            plain one here.

    Attributes:
        result: What came of the run; whole once `run` returned, and as far as it came if it raised.
    """

    def __init__(
        self,
        config: SimConfig,
        policy: PolicySet,
        arrivals_s: NDArray[np.float64],
        input_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
        *,
        predictor: RemainingPredictor | None = None,
        on_tick: Callable[[float, int], None] | None = None,
        stop: Callable[[float, SimulatedRun], bool] | None = None,
        on_decision: Callable[..., None] | None = None,
        make_replica: Callable[..., SimulatedDecodeReplica] | None = None,
    ) -> None:
        self._config, self._policy = config, policy
        self._arrivals_s = arrivals_s
        self._input, self._output = input_tokens.tolist(), output_tokens.tolist()
        self._on_tick, self._stop, self._on_decision = on_tick, stop, on_decision
        self.result = self._run = run = SimulatedRun(len(arrivals_s), config.num_prefill)
        profile = config.profile
        names = [f"decode-{i:04}" for i in range(config.num_decode)]
        made = make_replica or _replica_class(config)
        self._decode = [
            made(n, config.profile_of(i), config.memory, run.gaps.append)
            for i, n in enumerate(names)
        ]
        if config.lock_step:
            LockStep([r for r in self._decode if isinstance(r, LockStepReplica)])
        self._board = Board(
            names,
            profile,
            input_tokens,
            output_tokens,
            depths=config.depths,
            is_lock_step=config.lock_step,
        )
        if config.strict_share:
            draws = np.random.default_rng([config.seed, 0x57C1]).random(len(arrivals_s))
            self._board.is_strict = draws < config.strict_share
        self._budgets = np.zeros(len(arrivals_s))
        if config.exits is not None:
            self._board.stays = config.exits.drawn(len(arrivals_s), config.seed)
            self._budgets = config.exits.budgets(self._board.stays, config.seed)
            self._board.front_share = config.exits.front_share
            for replica in self._decode:
                replica.front_share = config.exits.front_share
        self._placing = Placing(config, policy, self._board, output_tokens, predictor)
        self._moving = Moving(
            config, self._board, self._decode, run, changed=self._changed, at=self._at
        )
        self._prefill = {
            name: SimulatedPrefillReplica(name, profile, config.prefill)
            for name in (f"prefill-{i:04}" for i in range(config.num_prefill))
        }
        infos = (ReplicaInfo(n, Role.PREFILL, DEPTH_CLASS, n, n, 1, 1) for n in self._prefill)
        self._prefill_snapshots = [ReplicaSnapshot(info=i, taken_unix_s=0.0) for i in infos]
        delays, rng = config.delays, np.random.default_rng([config.seed, 0xDE1A])
        self._queued_s = arrivals_s + drawn(delays.ingress_s, len(arrivals_s), rng)
        self._handoff_s = (
            None if delays.handoff_s is None else drawn(delays.handoff_s, len(arrivals_s), rng)
        )
        if delays.step_factor != NO_DELAYS.step_factor:
            for replica in self._decode:
                replica.draw_factor = lambda: float(drawn(delays.step_factor, 1, rng)[0])
        if self._placing.predictor is not None:
            for replica in self._decode:
                replica.predict = self._placing.predict
        self._roomless: dict[int, RoomlessSequence] = {}  # in the order in which they came
        self.scaler = self._make_scaler(config)
        self._rebuilt: dict[int, int] = {}  # KV tokens of the sequences that prefill makes anew
        self._halted_s: dict[int, float] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._versions = [0] * config.num_decode
        self._back_s = [-math.inf] * config.num_decode  # when a replica that died is there again
        self._num_open = len(arrivals_s)
        self._num_inside = 0  # arrived, and not over
        self._resting: list[tuple[float, float, Callable[..., None], tuple[Any, ...]]] = []
        self._is_stopped = False

    # Events

    def run(self) -> SimulatedRun:
        """Simulate until every request is finished or failed, or `stop` says so."""
        for index, at_s in enumerate(self._queued_s.tolist()):
            self._at(at_s, self._arrive, index)
        for failure in self._config.failures:
            self._at(failure.at_s, self._fail, failure)
        self._at(0.0, self._tick)
        if (every_s := self._config.report_every_s) > 0.0:
            for index in range(self._config.num_decode):
                self._at(index * every_s / self._config.num_decode, self._report, index)
        now_s = 0.0
        try:
            while self._events and self._num_open and not self._is_stopped:
                now_s, _, action, arguments = heapq.heappop(self._events)
                action(now_s, *arguments)
        finally:
            for replica in self._prefill.values():
                if replica.blocked_since_s is not None:
                    self._run.prefill_blocked.append((replica.blocked_since_s, now_s))
            self._run.num_lowered = sum(replica.num_lowered for replica in self._decode)
            self._run.end(now_s)
        return self._run

    def _at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(at_s, *arguments)` at a time; equal times in the order of the asking."""
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, action, arguments))

    def _repeat(
        self, now_s: float, every_s: float, action: Callable[..., None], *arguments: Any
    ) -> None:
        """Call again a period from now on; in an empty cluster, when there is something again."""
        if self.scaler is None and (not self._num_inside or not self._board.is_alive.any()):
            self._resting.append((now_s, every_s, action, arguments))
        else:
            self._at(now_s + every_s, action, *arguments)

    def _wake(self, now_s: float) -> None:
        """Go on with what rests, at the times it would have had."""
        for last_s, every_s, action, arguments in self._resting:
            periods = max(1, math.ceil((now_s - last_s) / every_s))
            self._at(last_s + periods * every_s, action, *arguments)
        self._resting.clear()

    # Admission and prefill

    def _arrive(self, now_s: float, index: int) -> None:
        self._num_inside += 1
        self._wake(now_s)
        replicas = self._prefill.values()
        for snapshot, replica in zip(self._prefill_snapshots, replicas, strict=True):
            snapshot.num_waiting = replica.num_waiting
            snapshot.waiting_tokens = replica.waiting_tokens
            snapshot.tokens_per_s = replica.tokens_per_s
        request = AdmitRequest(
            sequence_id=str(index),
            model=MODEL,
            num_prompt_tokens=self._input[index],
            max_tokens=max(self._output[index], self._config.profile.max_tokens),
            priority=0,
            deadline_unix_s=math.inf,
        )
        try:
            self._check_room()
            admission = admit(
                request,
                [*self._prefill_snapshots, self._placing.any_snapshot],
                now_unix_s=0.0,
                scheduler=_SCHEDULER,
                prefill=self._config.prefill,
            )
            self._to_prefill(now_s, index, self._input[index], admission.prefill_replica)
        except QuadrigaError as exc:
            self._close(now_s, index, exc)

    def _check_room(self) -> None:
        """Raises: Overloaded: Too many wait for a decode replica to let another one in."""
        num_held, prefill = len(self._roomless), self._config.prefill
        if self._placing.overload is not None:
            is_full = not may_hold_more(num_held, prefill.num_rows * len(self._prefill))
        else:
            is_full = self._policy.sheds and num_held >= prefill.max_rows * len(self._prefill)
        if is_full:
            raise Overloaded(f"{num_held} sequences wait for a decode replica", retry_after_s=1.0)

    def _to_prefill(self, now_s: float, index: int, num_tokens: int, name: str) -> None:
        """Queue a prompt, or a sequence to be rebuilt. Raises: Overloaded."""
        replica = self._prefill[name]
        replica.push(index, num_tokens, float(self._arrivals_s[index]), now_s=now_s)
        if not replica.is_busy:
            self._next_pass(now_s, replica)

    def _next_pass(self, now_s: float, replica: SimulatedPrefillReplica) -> None:
        prefill = self._config.prefill
        rows = prefill.max_rows if self._placing.overload is None else prefill.num_rows
        # All of them hold sequences that wait for a decode replica.
        if len(self._roomless) >= rows * len(self._prefill):
            if replica.num_waiting and replica.blocked_since_s is None:
                replica.blocked_since_s = now_s
            return
        if replica.blocked_since_s is not None:
            self._run.prefill_blocked.append((replica.blocked_since_s, now_s))
            replica.blocked_since_s = None
        pass_s = replica.start_pass(now_s=now_s)
        if pass_s is None:
            return
        self._run.prefill_busy.append((now_s, now_s + pass_s))
        for index in replica.in_pass:
            if index not in self._rebuilt:
                self._run.prefill_wait_s[index] = now_s - self._queued_s[index]
        self._at(now_s + pass_s, self._prefilled, replica)

    def _prefilled(self, now_s: float, replica: SimulatedPrefillReplica) -> None:
        """A pass is over: its sequences have their first token, and look for a decode replica."""
        for index in replica.in_pass:
            if index not in self._rebuilt:
                self._run.first_token_s[index] = now_s
                self._run.produced[index] = 1
                if self._output[index] == 1:
                    self._close(now_s, index)
                    continue
            if not self._place(now_s, index):
                tokens = self._tokens_of(index)
                self._roomless[index] = self._placing.waiting(now_s, index, tokens)
        replica.end_pass()
        self._next_pass(now_s, replica)

    def _wake_prefill(self, now_s: float) -> None:
        for replica in self._prefill.values():
            if not replica.is_busy:
                self._next_pass(now_s, replica)

    def _place(self, now_s: float, index: int) -> bool:
        """Send a prefilled sequence to a decode replica; False where none has room."""
        tokens = self._tokens_of(index)
        prefilled_s = self._halted_s.setdefault(index, now_s)
        placed = self._placing.choose(now_s, index, tokens, now_s - prefilled_s)
        if placed is None:
            return False
        replica, promised = placed
        self._rebuilt.pop(index, None)
        keeps_promises = self._config.memory.reservation == "used"
        sequence = Sequence(
            index=index,
            tokens=tokens,
            final_tokens=self._input[index] + self._output[index],
            prompt_tokens=self._input[index],
            arrival_s=float(self._arrivals_s[index]),
            promised_tokens=promised if keeps_promises else 0,
            stays=float(self._board.stays[index]),
            usual_stays=float(self._board.stays[index]),
            quality_budget=float(self._budgets[index]),
        )
        if self._handoff_s is None:
            handoff_s = self._config.link.seconds(tokens)
        else:
            handoff_s = float(self._handoff_s[index])
        self._decode[replica].join(sequence, ready_s=now_s + handoff_s)
        self._board.give(index, replica)
        self._board.base[index] = tokens
        self._board.is_running[index] = False
        self._changed(replica)
        return True

    def _place_roomless(self, now_s: float) -> None:
        """Ask again for the waiting sequences, in the order of prefill replicas' turns."""
        most_tokens = self._placing.most_room(now_s) if self._roomless else 0.0
        for index in self._in_turn(now_s) if most_tokens > 0.0 else ():
            if self._tokens_of(index) < most_tokens and self._place(now_s, index):
                self._run.room_wait_s[index] += now_s - self._roomless.pop(index).since_s
                most_tokens = self._placing.most_room(now_s)
        self._wake_prefill(now_s)

    def _in_turn(self, now_s: float) -> list[int]:
        """The oldest where it is overdue, then the shortest; the oldest without predictions."""
        waiting = self._roomless
        if self._placing.predictor is None or not waiting:
            return list(waiting)[:_MOST_ASKED]
        oldest = next(iter(waiting))
        is_overdue = self._placing.is_overdue(now_s, waiting[oldest])
        ordered = sorted(
            waiting, key=lambda i: (i != oldest or not is_overdue, waiting[i].total_tokens)
        )
        return ordered[:_MOST_ASKED]

    def _tokens_of(self, index: int) -> int:
        """KV tokens of a sequence after prefill."""
        return self._rebuilt.get(index) or int(self._input[index]) + 1

    # Decoding

    def _changed(self, replica: int) -> None:
        """Note a replica's state and when something happens there next."""
        self._board.note(replica, self._decode[replica])
        self._versions[replica] += 1
        next_s = self._decode[replica].next_event_s()
        if next_s < math.inf:
            self._at(next_s, self._decode_event, replica, self._versions[replica])

    def _decode_event(self, now_s: float, replica: int, version: int) -> None:
        if version != self._versions[replica]:
            return  # something else happened there first
        happened = self._decode[replica].run_to_event(now_s)
        # In lock step all made these steps, and the next may take longer or shorter.
        for index in range(len(self._decode)) if self._config.lock_step else (replica,):
            self._changed(index)
        self._note(now_s, replica, happened)
        if self._roomless and (happened.finished or happened.left):
            self._place_roomless(now_s)

    def _note(self, now_s: float, index: int, happened: Happened) -> None:
        board, replica = self._board, self._decode[index]
        for sequence in happened.finished:
            self._finish(now_s, sequence)
        keeps_kv = self._config.memory.on_full == "pause"
        for sequence in happened.preempted:
            board.is_running[sequence.index] = False
            board.is_paused[sequence.index] = keeps_kv
            board.base[sequence.index] = sequence.tokens
            self._halted_s.setdefault(sequence.index, now_s)
            self._run.preempted[sequence.index] += 1
            self._run.full_s.append(now_s)
            if not keeps_kv:
                self._moving.give_up(sequence.index)
        for sequence in happened.resumed:
            board.is_paused[sequence.index] = False
        for sequence in happened.joined.values():
            self._moving.joined(replica.anchor_s, sequence.index)
            if sequence.index in replica.running:  # not preempted at once
                board.is_running[sequence.index] = True
                board.base[sequence.index] = sequence.tokens - replica.steps
                halted_s = self._halted_s.pop(sequence.index)
                gap_s = replica.anchor_s - halted_s
                self._run.gaps.append(Gaps(gap_s, gap_s, 1, replica.anchor_s))
        for sequence in happened.left:
            self._halted_s[sequence.index] = now_s
            self._moving.hand_over(now_s, sequence)

    def _finish(self, now_s: float, sequence: Sequence) -> None:
        index = sequence.index
        self._run.produced[index] = sequence.tokens - sequence.prompt_tokens
        self._placing.finished(index, self._output[index])
        self._moving.give_up(index)
        self._close(now_s, index)

    def _close(self, now_s: float, index: int, failure: QuadrigaError | None = None) -> None:
        """A request is over, for good."""
        if failure is None:
            self._run.close(index, now_s, None)
        else:
            self._run.close(index, now_s, failure.code, failure.message)
        self._num_inside -= 1
        self._board.give(index, NOWHERE)
        self._board.is_running[index] = False
        self._num_open -= 1

    # The tick

    def _tick(self, now_s: float) -> None:
        self._repeat(now_s, self._config.tick_s, self._tick)
        self._sample(now_s)
        if self._policy.rescheduler is not None and self._board.is_alive.sum() > 1:
            self._reschedule(now_s)
        else:
            self._placing.overload = None
        if self.scaler is not None:
            self.scaler.tick(now_s)
        self._place_roomless(now_s)
        if self._on_tick is not None:
            self._on_tick(now_s, self._num_open)
        if self._stop is not None:
            self._is_stopped = self._stop(now_s, self._run)

    def _report(self, now_s: float, replica: int) -> None:
        self._placing.reported(now_s, replica)
        self._repeat(now_s, self._config.report_every_s, self._report, replica)

    def _sample(self, now_s: float) -> None:
        board = self._board
        new_steps = board.new_steps(now_s)
        step_s = board.step_s(new_steps)[board.is_alive]
        if len(step_s):
            capacity = self._config.profile.kv_capacity_tokens
            used = board.running_tokens(new_steps)[board.is_alive] / capacity
            mean_s = float(step_s.sum()) / len(step_s)
            off_s = step_s - mean_s
            wanted = board.used_tokens(new_steps)[board.is_alive] / capacity
            self._run.samples.append(
                Sample(
                    at_s=now_s,
                    variance_ms2=1e6 * float(off_s @ off_s) / len(off_s),
                    mean_step_s=mean_s,
                    most_used=float(used.max()),
                    mean_used=float(used.mean()),
                    most_wanted=float(wanted.max()),
                    num_running=int(board.num_running.sum()),
                    num_waiting=len(self._roomless),
                )
            )

    def _reschedule(self, now_s: float) -> None:
        rescheduler, placing = self._policy.rescheduler, self._placing
        assert rescheduler is not None
        cluster = self._board.forecast(
            now_s, placing.grid_s, self._config.profile.kv_capacity_tokens, placing.predictor
        )
        placing.look_for_overload(cluster, len(self._roomless))
        placing.look_at_depths(cluster, now_s)
        if placing.pools is not None:
            self._run.depth_gains.append(placing.pools.gain)
            self._run.num_ticks_apart += placing.pools.is_on
        overload, load_only = placing.overload, placing.drift.is_drifting
        busy, costs = self._moving.busy, self._moving.costs
        orders = rescheduler.decide_all(
            cluster,
            DEPTH_CLASS,
            costs,
            busy=busy,
            load_only=load_only,
            overload=overload,
            pools=placing.pools,
        )
        if self._on_decision is not None:
            self._on_decision(now_s, cluster, costs, busy, load_only, orders, placing)
        placing.forecast = cluster if self._policy.places_ahead else None
        for order in orders:
            self._moving.start(now_s, order)

    # Scaling

    def _make_scaler(self, config: SimConfig) -> Autoscaler | None:
        if config.scaling is None:
            return None
        return Autoscaler(
            config.scaling,
            config.admitted_tokens,
            self._board,
            self._decode,
            self._placing,
            self._moving,
            waiting=self._waiting,
            changed=self._changed,
            at=self._at,
        )

    def _waiting(self) -> tuple[int, int]:
        """Sequences without a decode replica, and the tokens of their KV."""
        queued = sum(p.num_waiting for p in self._prefill.values())
        tokens = sum(p.waiting_tokens for p in self._prefill.values())
        kv = sum(w.tokens for w in self._roomless.values())
        return queued + len(self._roomless), tokens + kv

    # Failures

    def _fail(self, now_s: float, failure: Failure) -> None:
        """A decode replica dies: what it held is computed anew elsewhere, from its tokens."""
        replica, is_alive = failure.replica, self._board.is_alive[failure.replica]
        if not is_alive and now_s > self._back_s[replica]:
            return  # it never started
        back_s = now_s + failure.down_s
        self._back_s[replica] = max(self._back_s[replica], back_s)
        if self.scaler is None:  # or else it is there again when the scaler starts it
            self._at(back_s, self._recover, replica)
        if not is_alive:
            return
        self._board.is_alive[replica] = False
        self._placing.forecast = None
        self._moving.replica_died(replica)
        self._rebuild(now_s, self._decode[replica].kill(now_s))
        self._changed(replica)

    def _rebuild(self, now_s: float, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            index = sequence.index
            self._moving.lost(index)
            self._board.give(index, NOWHERE)
            self._board.is_running[index] = self._board.is_paused[index] = False
            self._run.rebuilt[index] += 1
            self._run.produced[index] = sequence.tokens - sequence.prompt_tokens
            self._halted_s.setdefault(index, now_s)
            self._rebuilt[index] = sequence.tokens
            least = min(
                self._prefill.values(), key=lambda p: (p.waiting_tokens, p.num_waiting, p.name)
            )
            try:
                self._to_prefill(now_s, index, sequence.tokens, least.name)
            except QuadrigaError as exc:
                self._close(now_s, index, exc)

    def _recover(self, now_s: float, replica: int) -> None:
        if now_s < self._back_s[replica]:
            return  # it was to be away for longer
        self._board.is_alive[replica] = True
        self._placing.forecast = None
        if self._num_inside:
            self._wake(now_s)
        self._changed(replica)
        self._place_roomless(now_s)


def _replica_class(config: SimConfig) -> type[SimulatedDecodeReplica]:
    if config.lock_step:
        return LockStepReplica
    return VllmDecodeReplica if config.memory.on_full == "vllm" else SimulatedDecodeReplica
