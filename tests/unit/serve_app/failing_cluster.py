"""Replicas of a toy model that die, hang and wake at chosen moments, all in one process."""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from quadriga.clock import SystemClock
from quadriga.core.output import EngineOutput, PollReply
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.request import FinishReason, ResumableSequence, SequenceState
from quadriga.core.routing import Admission, AdmitRequest, ClusterView
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError, Unavailable
from quadriga.scheduling.output_dispatcher import MAX_POLL_S, OutputDispatcher

CALL_TIMEOUT_S = 0.05
INGRESS = "the only one"


def next_token(token_ids: Sequence[int]) -> int:
    """A function of all tokens before: with others before it, the next token is another one."""
    return 20 + zlib.crc32(repr(list(token_ids)).encode()) % 500


def expected(prompt_ids: Sequence[int], count: int) -> list[int]:
    """The tokens of an undisturbed run."""
    tokens = list(prompt_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt_ids) :]


class FailingReplica:
    """A process as others see it: it answers, is dead, or hangs."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.is_dead = False
        self.awake = asyncio.Event()
        self.awake.set()
        self.own: set[str] = set()
        self.cancelled: set[str] = set()
        self._mail = OutputDispatcher(name, SystemClock(), MAX_POLL_S)

    @property
    def is_well(self) -> bool:
        return not self.is_dead and self.awake.is_set()

    def die(self) -> None:
        self.is_dead = True
        self.own.clear()
        self.awake.set()
        self._mail.close()

    def put(self, emission: EngineOutput) -> None:
        self._mail.put([(INGRESS, emission)])

    async def answering(self) -> None:
        """Return when the process handles a call. Raises: ReplicaDied, ReplicaError."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self.awake.wait()
        except TimeoutError:
            raise ReplicaError(f"{self.name} did not answer", code="timeout") from None
        self.check()

    def check(self) -> None:
        if self.is_dead:
            raise ReplicaDied(f"{self.name} died")

    async def poll(self, ack: int, timeout_s: float) -> PollReply:
        await self.awake.wait()  # the caller has a deadline of its own
        reply = await self._mail.poll(INGRESS, ack, timeout_s)
        await self.awake.wait()
        self.check()
        return reply


class FailingCluster:
    """Implements `serve_app.request.cluster_client.ClusterClient`.

    Args:
        step_s: Between two tokens of a sequence.
        gap: How many turns of the event loop lie between the announcement of a hand-off and its
            commit, and between the commit and the first token of the new owner.

    Attributes:
        on_move: Called with "announced" or "committed", source and destination of every hand-off.
    """

    def __init__(self, *, step_s: float = 0.001, gap: int = 3) -> None:
        self.step_s = step_s
        self.gap = gap
        self.replicas: dict[str, FailingReplica] = {}
        self.submitted: list[SequenceState] = []
        self.ended: list[str] = []
        self.lost: list[str] = []
        self.num_doubled = 0
        self.on_move: Callable[[str, FailingReplica, FailingReplica], None] = lambda *_: None
        self._numbers = itertools.count()
        self._turn = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: list[SequenceState] = []
        for role, count in ((Role.PREFILL, 2), (Role.DECODE, 3)):
            for _ in range(count):
                self.spawn(role)

    def spawn(self, role: Role) -> None:
        name = f"{role}-{next(self._numbers)}"
        self.replicas[name] = FailingReplica(name, role)

    def of(self, role: Role) -> list[FailingReplica]:
        return [r for r in self.replicas.values() if r.role is role]

    def kill(self, replica: FailingReplica) -> None:
        """A process dies; the controller starts another one."""
        if not replica.is_dead:
            replica.die()
            self.spawn(replica.role)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Cluster

    async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission]:
        return [
            Admission(self._choose(Role.PREFILL), DepthClass("quadriga-s", 8)) for _ in requests
        ]

    async def finished(self, sequence_ids: Sequence[str], lost: Sequence[str]) -> None:
        self.ended += sequence_ids
        self.lost += lost

    async def directory(self) -> ClusterView:
        now = time.time()
        return ClusterView(
            now,
            [
                ReplicaSnapshot(
                    ReplicaInfo(r.name, r.role, DepthClass("quadriga-s", 8), "n", r.name, 8, 4096),
                    now,
                )
                for r in self.replicas.values()
                if r.is_well
            ],
        )

    async def status(self) -> dict[str, list[str]]:
        return {"replicas": []}

    async def submit(self, replica: str, state: SequenceState) -> None:
        target = self.replicas[replica]
        task = asyncio.get_running_loop().create_task(self._arrive(target, state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await target.answering()

    async def cancel(
        self, replica: str, sequence_ids: Sequence[str], ingress_id: str | None
    ) -> None:
        target = self.replicas[replica]
        await target.answering()
        target.cancelled.update(sequence_ids)
        target.own.difference_update(sequence_ids)

    async def holding(self, replica: str, sequence_ids: Sequence[str]) -> list[str]:
        target = self.replicas[replica]
        await target.answering()
        return [s for s in sequence_ids if s in target.own]

    async def find_resumable(self, claims: Sequence[str]) -> list[ResumableSequence]:
        return []

    async def adopt(self, replica: str, sequence_id: str, ingress_id: str) -> bool:
        target = self.replicas[replica]
        await target.answering()
        state = next((s for s in self._running if s.sequence_id == sequence_id), None)
        if state is None or not self._has(target, state):
            return False
        said, depths = list(state.output_ids), [8] * len(state.output_ids)
        target.put(EngineOutput(sequence_id, state.epoch, token_ids=said, exit_layers=depths))
        return True

    async def poll(self, replica: str, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        return await self.replicas[replica].poll(ack, timeout_s)

    async def heartbeat(self, ingress_id: str, replicas: Sequence[str]) -> None: ...

    async def push_metrics(self, source: str, families: bytes, running: object = None) -> None: ...

    async def metrics(self) -> bytes:
        return b""

    # What the replicas do

    def _choose(self, role: Role) -> str:
        able = [r for r in self.of(role) if r.is_well]
        if not able:
            raise Unavailable(f"no {role} replica is ready", retry_after_s=0.1)
        return able[next(self._turn) % len(able)].name

    async def _arrive(self, source: FailingReplica, state: SequenceState) -> None:
        """A submission is handled when its process runs, however late that is."""
        await source.awake.wait()
        if source.is_dead or state.sequence_id in source.cancelled:
            return
        if any(s.sequence_id == state.sequence_id for s in self.submitted):
            self.num_doubled += 1
        self.submitted.append(replace(state, output_ids=list(state.output_ids)))
        self._running.append(state)
        source.own.add(state.sequence_id)
        await self._turns(source)
        if not state.output_ids:
            self._say(source, state)
        while self._has(source, state):
            try:
                peer = self.replicas[self._choose(Role.DECODE)]
            except QuadrigaError:
                await asyncio.sleep(0.01)
                continue
            source.put(EngineOutput(state.sequence_id, state.epoch, moved_to=peer.name))
            self.on_move("announced", source, peer)
            await self._turns(source)
            if not self._has(source, state) or peer.is_dead:
                continue
            source.own.discard(state.sequence_id)  # committed
            peer.own.add(state.sequence_id)
            state.epoch += 1
            self.on_move("committed", source, peer)
            await self._decode(peer, state)
            return

    async def _decode(self, replica: FailingReplica, state: SequenceState) -> None:
        await self._turns(replica)
        while self._has(replica, state):
            self._say(replica, state)
            await asyncio.sleep(self.step_s)
            await replica.awake.wait()

    def _has(self, replica: FailingReplica, state: SequenceState) -> bool:
        return not replica.is_dead and state.sequence_id in replica.own

    def _say(self, replica: FailingReplica, state: SequenceState) -> None:
        if not self._has(replica, state):
            return
        token = next_token(state.prompt_ids + state.output_ids)
        state.output_ids.append(token)
        is_last = len(state.output_ids) == state.sampling.max_tokens
        replica.put(
            EngineOutput(
                state.sequence_id,
                state.epoch,
                len(state.output_ids) - 1,
                [token],
                [8],
                finish=FinishReason.LENGTH if is_last else None,
            )
        )
        if is_last:
            replica.own.discard(state.sequence_id)

    async def _turns(self, replica: FailingReplica) -> None:
        for _ in range(self.gap):
            await asyncio.sleep(0)
        await replica.awake.wait()
