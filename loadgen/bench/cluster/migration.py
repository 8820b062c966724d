"""`python -m loadgen bench migration`: what a live migration is felt like by tokens.

Two decode replicas, streams that decode on both, and moves of random streams one after the other.
Looked at is the time between two tokens of a stream as they arrive here, in median steps: of the
stream that moves, around its move; of all others on either replica meanwhile; and, as a control, of
all streams while nothing moves: what the machine does by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from loadgen.options import check_service, whole
from loadgen.report.experiment import print_line, show
from quadriga.checkpoint.exits import ExitParams
from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport
from quadriga.core.output import EngineOutput, PollReply
from quadriga.core.replica import DepthClass
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.core.routing import Admission, AdmitRequest
from quadriga.ports import use_private_ray

APP = "bench-migration"
SPREAD_S = 0.4
"""Between the beginnings of two streams, so that they do not all end, and begin anew, at once."""
PACES = ("steady-15ms", "steady-60ms", None)
POLL_S = 1.0
READY_S = 180.0
PAUSE_S = 0.12
"""Between the end of one move and the next order."""
STILL_TO_COME = 60  # tokens, more, of a stream that is moved
STUCK_S = 60.0  # without a move, after which a pace is given up
AFTER_S = 0.15
"""How long after its end a move may still be felt."""


@dataclass(slots=True)
class Flow:
    """One stream.

    Attributes:
        arrivals_s: Of each token; tokens that come together have one arrival.
    """

    state: SequenceState
    replica: str
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    epoch: int = 0
    error: str | None = None
    is_over: bool = False

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Between tokens, in a time at least in part; but not before the second, which waits for
        the hand-off."""
        at = self.arrivals_s[1:]
        return [b - a for a, b in itertools.pairwise(at) if begin_s <= b and a <= end_s]


Move = tuple[Flow, float, float, MigrationReport]
"""(stream, ordered at, ended at, report)."""


@dataclass(frozen=True, slots=True)
class Felt:
    """Longest gaps, in median steps.

    Attributes:
        median, p95, longest: Over moves; of the control, over stretches as long as moves are felt.
    """

    count: int
    median: float
    p95: float
    longest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} / {self.p95:.2f} / {self.longest:.2f}"

    @classmethod
    def of(cls, longest_s: Sequence[float], step_s: float) -> Felt:
        values = np.array(longest_s or [0.0]) / step_s
        return cls(
            len(longest_s),
            round(float(np.median(values)), 3),
            round(float(np.percentile(values, 95)), 3),
            round(float(values.max()), 3),
        )


@dataclass(frozen=True, slots=True)
class PaceOutcome:
    """One pace.

    Attributes:
        step_ms: Median time between two tokens while nothing moves.
        migrated, others, control: See the module.
        rest_ms: Median of how long the moved sequences were at rest at their source.
    """

    pace: str
    step_ms: float
    moves: int
    failed: int
    migrated: Felt
    others: Felt
    control: Felt
    rest_ms: float
    rounds: float
    kilobytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--model", default="quadriga-s", help="bundled id, folder, GGUF file, or hub id"
    )
    parser.add_argument("--sequences", type=whole(2), default=12, help="streams at once")
    parser.add_argument("--moves", type=whole(1), help="at each pace; default: 60, or 20 if quick")
    parser.add_argument("--prompt", type=whole(1), default=60, help="tokens of a prompt")
    parser.add_argument(
        "--output", type=whole(STILL_TO_COME + 4), default=400, help="tokens of a stream"
    )
    parser.add_argument(
        "--transport", choices=("gloo", "object_store"), default="gloo", help="how KV travels"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything random")
    parser.add_argument("--quick", action="store_true", help="fewer moves")


def run(args: argparse.Namespace) -> int:
    """Measure at each pace; prints a table and one JSON line. Returns 1 where moves failed."""
    check_service(args.model, ())
    use_private_ray()
    os.environ |= {"RAY_worker_niceness": "0"}
    import ray

    args.moves = args.moves or (20 if args.quick else 60)
    ray.init(
        "local",
        num_cpus=4,
        object_store_memory=128 << 20,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        outcomes = [asyncio.run(_Bench(args, pace).run()) for pace in PACES]
    finally:
        ray.shutdown()
    _print(outcomes)
    paced, slow, unpaced = outcomes
    print_line(
        "bench migration",
        headline={
            "migrated_longest_steps": paced.migrated.longest,
            "migrated_p95_steps": paced.migrated.p95,
            "others_longest_steps": paced.others.longest,
            "others_p95_steps": paced.others.p95,
            "control_longest_steps": paced.control.longest,
            "slow_migrated_longest_steps": slow.migrated.longest,
            "slow_others_longest_steps": slow.others.longest,
            "slow_control_longest_steps": slow.control.longest,
            "unpaced_migrated_longest_steps": unpaced.migrated.longest,
            "failed": sum(o.failed for o in outcomes),
        },
        outcomes=[asdict(o) for o in outcomes],
        settings={k: v for k, v in vars(args).items() if isinstance(v, int | str | None)},
        packages=("torch", "ray"),
    )
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _print(outcomes: Sequence[PaceOutcome]) -> None:
    show(
        outcomes,
        {
            "pace": lambda o: o.pace,
            "step ms": lambda o: f"{o.step_ms:.2f}",
            "moves": lambda o: o.moves,
            "at rest ms": lambda o: f"{o.rest_ms:.2f}",
            "rounds": lambda o: f"{o.rounds:.1f}",
            "KiB": lambda o: f"{o.kilobytes:.0f}",
            "migrated median / P95 / longest": lambda o: o.migrated,
            "others median / P95 / longest": lambda o: o.others,
            "control median / P95 / longest": lambda o: o.control,
        },
        title="longest time between two tokens, in median steps",
        width=150,
    )


class _Bench:
    """One pace: an application, its streams, and their moves."""

    def __init__(self, args: argparse.Namespace, pace: str | None) -> None:
        self._args = args
        self._pace = pace
        self._app = f"{APP}-{pace or 'unpaced'}"
        self._rng = random.Random(args.seed)
        self._ingress_id = uuid.uuid4().hex
        self._flows: dict[str, Flow] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> PaceOutcome:
        from actors.rpc.lookup import controller_name, ensure_cluster

        await asyncio.to_thread(
            ensure_cluster,
            {
                "name": self._app,
                "model": self._args.model,
                "decode_replicas": 2,
                "decode.max_slots": self._args.sequences,
                "decode.pace": self._pace,
                "engine.compile": "wait",
                "engine.resources_cpus": 0.1,
                "transport.kind": self._args.transport,
                "lifecycle.orphan_timeout_s": 300.0,
            },
        )
        beat = asyncio.create_task(self._beat())
        try:
            self._decoders = await self._ready()
            return await self._measure()
        finally:
            for task in (beat, *self._polls.values()):
                task.cancel()
            await self._call(controller_name(self._app), "stop")

    async def _measure(self) -> PaceOutcome:
        keeping = asyncio.create_task(self._keep_busy())
        await asyncio.sleep(3.0 + SPREAD_S * self._args.sequences)
        control_begin_s = time.monotonic()
        await asyncio.sleep(8.0)
        control_end_s = time.monotonic()
        moves, failed = await self._make_moves(keeping)
        await asyncio.sleep(2 * AFTER_S)
        keeping.cancel()
        flows = list(self._flows.values())
        errors = [f.error for f in flows if f.error]
        if errors:
            raise RuntimeError(f"{len(errors)} streams failed, the first: {errors[0]}")
        gaps_s = [g for f in flows for g in f.gaps_s(control_begin_s, control_end_s)]
        step_s = float(np.median(gaps_s))
        return self._outcome(step_s, moves, failed, control_begin_s, control_end_s)

    async def _make_moves(self, keeping: asyncio.Task[None]) -> tuple[list[Move], int]:
        """Make the moves asked for; with the number of those that failed.

        Raises:
            RuntimeError: None comes about. What ended `keeping` or a poll is raised as well.
        """
        moves: list[Move] = []
        failed, last_s = 0, time.monotonic()
        while len(moves) < self._args.moves:
            await asyncio.sleep(PAUSE_S * self._rng.uniform(0.5, 1.5))
            for task in (keeping, *self._polls.values()):
                if task.done():
                    await task
            if time.monotonic() - last_s > STUCK_S:
                error = next((f.error for f in self._flows.values() if f.error), "no stream failed")
                raise RuntimeError(
                    f"no stream was moved for {STUCK_S:g} s, {failed} moves failed, {error}; "
                    "raise --output where streams end too early"
                )
            moved = await self._move()
            if moved is None:
                continue
            failed += moved[3].outcome == "failed"
            if moved[3].outcome == "moved":
                moves.append(moved)
                last_s = time.monotonic()
        return moves, failed

    def _outcome(
        self,
        step_s: float,
        moves: list[Move],
        failed: int,
        control_begin_s: float,
        control_end_s: float,
    ) -> PaceOutcome:
        flows = list(self._flows.values())

        def longest(some: Sequence[Flow], begin_s: float, end_s: float) -> list[float]:
            found = [max(f.gaps_s(begin_s, end_s), default=0.0) for f in some]
            return [max(found)] if found else []

        migrated_s, others_s, control_s = [], [], []
        for flow, begin_s, end_s, _ in moves:
            migrated_s += longest([flow], begin_s, end_s + AFTER_S)
            others_s += longest([f for f in flows if f is not flow], begin_s, end_s + AFTER_S)
        felt_s = float(np.median([end_s - begin_s for _, begin_s, end_s, _ in moves])) + AFTER_S
        at_s = control_begin_s
        while at_s + felt_s <= control_end_s:
            control_s += longest(flows, at_s, at_s + felt_s)
            at_s += felt_s
        reports = [report for *_, report in moves]
        return PaceOutcome(
            pace=self._pace or "unpaced",
            step_ms=round(1e3 * step_s, 3),
            moves=len(moves),
            failed=failed,
            migrated=Felt.of(migrated_s, step_s),
            others=Felt.of(others_s, step_s),
            control=Felt.of(control_s, step_s),
            rest_ms=round(1e3 * float(np.median([r.stall_s for r in reports])), 3),
            rounds=round(float(np.mean([r.rounds for r in reports])), 1),
            kilobytes=round(float(np.mean([r.bytes_sent for r in reports])) / 1024, 1),
        )

    async def _move(self) -> Move | None:
        """Move a random stream that will go on for a while."""
        able = [
            f
            for f in self._flows.values()
            if not f.is_over and 2 < f.num_tokens < self._args.output - STILL_TO_COME
        ]
        able = [f for f in able if f.replica in self._decoders]
        if not able:
            return None
        flow = self._rng.choice(able)
        order = MigrationOrder(
            sequence_id=flow.state.sequence_id,
            depth_class=self._decoders[flow.replica],
            source=flow.replica,
            destination=next(name for name in self._decoders if name != flow.replica),
            cause=MigrationCause.BALANCE,
            gain=0.0,
            num_tokens=flow.state.num_tokens,
            remaining_tokens=0.0,
        )
        begin_s = time.monotonic()
        report: MigrationReport = await self._call(flow.replica, "migrate", order)
        return flow, begin_s, time.monotonic(), report

    # Streams

    async def _keep_busy(self) -> None:
        """Keep as many streams as asked for; their ends are spread over time."""
        while True:
            live = sum(not f.is_over for f in self._flows.values())
            if live < self._args.sequences:
                await self._submit()
            await asyncio.sleep(SPREAD_S)

    async def _submit(self) -> None:
        from actors.rpc.lookup import scheduler_name

        args, rng = self._args, self._rng
        state = SequenceState(
            sequence_id=uuid.uuid4().hex,
            request_id=uuid.uuid4().hex,
            model=args.model,
            prompt_ids=[rng.randrange(5, 500) for _ in range(args.prompt)],
            sampling=SamplingParams(max_tokens=args.output, temperature=0.0, ignore_eos=True),
            ingress_id=self._ingress_id,
            arrival_unix_s=time.time(),
            deadline_unix_s=time.time() + 600.0,
            exits=ExitParams(),
        )
        request = AdmitRequest(
            state.sequence_id, args.model, args.prompt, args.output, 0, state.deadline_unix_s
        )
        admission: Admission = await self._call(scheduler_name(self._app), "admit", request)
        flow = Flow(state, admission.prefill_replica)
        self._flows[state.sequence_id] = flow
        self._poll(flow.replica)
        await self._call(flow.replica, "submit", state)

    def _poll(self, replica: str) -> None:
        if replica not in self._polls:
            self._polls[replica] = asyncio.create_task(self._poll_forever(replica))

    async def _poll_forever(self, replica: str) -> None:
        ack = 0
        while True:
            reply: PollReply = await self._call(replica, "poll", self._ingress_id, ack, POLL_S)
            now_s = time.monotonic()
            ack = reply.last_seq
            for emission in reply.emissions:
                flow = self._flows.get(emission.sequence_id)
                if flow is not None:
                    self._take(flow, replica, emission, now_s)

    def _take(self, flow: Flow, replica: str, emission: EngineOutput, now_s: float) -> None:
        if emission.moved_to is not None:
            self._poll(emission.moved_to)
            return
        if emission.error is not None:
            flow.error, flow.is_over = str(emission.error), True
        new = emission.first_index + len(emission.token_ids) - flow.num_tokens
        if new > 0:
            flow.arrivals_s.append(now_s)
            flow.num_tokens += new
        if emission.epoch >= flow.epoch:
            flow.epoch, flow.replica = emission.epoch, replica
        flow.is_over = flow.is_over or emission.finish is not None

    # The application

    async def _ready(self) -> dict[str, DepthClass]:
        from actors.rpc.lookup import controller_name

        give_up_s = time.monotonic() + READY_S
        while time.monotonic() < give_up_s:
            status = await self._call(controller_name(self._app), "status")
            if status["is_ready"]:
                names = [r["name"] for r in status["replicas"] if r["role"] == "decode"]
                return {name: (await self._call(name, "info")).depth_class for name in names}
            await asyncio.sleep(0.2)
        raise RuntimeError(f"the replicas are not ready after {READY_S:.0f} s")

    async def _beat(self) -> None:
        from actors.rpc.lookup import controller_name

        while True:
            await self._call(controller_name(self._app), "ingress_heartbeat", self._ingress_id)
            await asyncio.sleep(0.5)

    async def _call(self, name: str, method: str, *args: Any) -> Any:
        from actors.rpc.ray_rpc import call

        return await call(name, method, *args, timeout_s=60.0)
