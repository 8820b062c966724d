"""A cluster in one process, with a toy model, for the ingress's unit tests."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Any

from quadriga.clock import SystemClock
from quadriga.core.output import EngineOutput, PollReply
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.request import FinishReason, ResumableSequence, SequenceState, TokenLogprob
from quadriga.core.routing import Admission, AdmitRequest, AutoReport, ClusterView
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError, TakenOver
from quadriga.observability.metrics import MetricsHub
from quadriga.scheduling.output_dispatcher import MAX_POLL_S, OutputDispatcher

PREFILL, DECODE = "prefill-0", "decode-0"


class FakeReplica:
    """What it has to say to each ingress; it dies, and its replies are lost, as a test wants."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mail = OutputDispatcher(f"{name}-a", SystemClock(), MAX_POLL_S)
        self.dead = False
        self.held: set[str] = set()
        self.cancelled: list[str] = []
        self.num_polls = 0
        self.lost_replies = 0

    def put(self, ingress_id: str, emission: EngineOutput) -> None:
        self.mail.put([(ingress_id, emission)])

    def die(self) -> None:
        self.dead = True
        self.mail.close()

    async def poll(self, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        self.num_polls += 1
        reply = await self.mail.poll(ingress_id, ack, timeout_s)
        self._check()
        if self.lost_replies > 0 and reply.emissions:
            self.lost_replies -= 1
            raise QuadrigaError("the reply was lost")
        return reply

    def _check(self) -> None:
        if self.dead:
            raise ReplicaDied(f"{self.name} has died")


class FakeCluster:
    """One prefill and one decode replica; every answer spells `script`, token by token.

    Args:
        model: Id of the model served.
        script: Output token ids; an answer that reaches its end stops there.
        step_s: Pause between two decode steps; 0 yields to the loop only.
        gate: Decoding waits for this event, where given.
        loaded: Layers that are loaded when token i is said, where that changes.
    """

    def __init__(
        self,
        model: str,
        script: Sequence[int],
        *,
        step_s: float = 0.0,
        tokens_per_step: int = 1,
        gate: asyncio.Event | None = None,
        loaded: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.script = list(script)
        self.step_s = step_s
        self.tokens_per_step = tokens_per_step
        self.gate = gate
        self.loaded = loaded
        self.prefill = FakeReplica(PREFILL)
        self.decode = FakeReplica(DECODE)
        self.hub = MetricsHub()
        self.submitted: list[SequenceState] = []
        self.reports: list[AutoReport] = []
        self.finished_ids: list[str] = []
        self.running: list[dict[str, Any]] = []
        self.heartbeats = 0
        self.refuse_admission: QuadrigaError | None = None
        self.refuse_submission: list[QuadrigaError] = []
        self.num_orphan_calls = 0
        self.loses_orphans = False
        self.num_said: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_held(self) -> int:
        """Sequences that still cost something somewhere."""
        return len(self.prefill.held) + len(self.decode.held)

    async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission]:
        if self.refuse_admission is not None:
            raise self.refuse_admission
        return [Admission(PREFILL, DepthClass(self.model, 8))] * len(requests)

    async def finished(self, sequence_ids: Sequence[str], lost: Sequence[str]) -> None:
        self.finished_ids.extend([*sequence_ids, *lost])

    async def directory(self) -> ClusterView:
        snapshots = [
            ReplicaSnapshot(
                ReplicaInfo(name, role, DepthClass(self.model, 8), "node", name, 8, 4096),
                time.time(),
            )
            for name, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE))
        ]
        return ClusterView(time.time(), snapshots)

    async def submit(self, replica: str, state: SequenceState) -> None:
        if self.refuse_submission:
            raise self.refuse_submission.pop(0)
        self.submitted.append(state)
        self.prefill.held.add(state.sequence_id)
        task = asyncio.get_running_loop().create_task(self._run(state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(
        self, replica: str, sequence_ids: Sequence[str], ingress_id: str | None
    ) -> None:
        others = {s.sequence_id for s in self.submitted if ingress_id not in (None, s.ingress_id)}
        for target in (self.prefill, self.decode):
            target.held.difference_update(set(sequence_ids) - others)
        self._replica(replica).cancelled.extend(sequence_ids)

    async def holding(self, replica: str, sequence_ids: Sequence[str]) -> list[str]:
        self._replica(replica)._check()
        return [s for s in sequence_ids if s in self._replica(replica).held]

    async def find_resumable(self, claims: Sequence[str]) -> list[ResumableSequence]:
        self.num_orphan_calls += 1
        return [
            ResumableSequence(s.claim, DECODE, s.sequence_id, s.epoch + 1, s.model)
            for s in self.submitted
            if s.claim in claims and s.sequence_id in self.decode.held
        ]

    async def adopt(self, replica: str, sequence_id: str, ingress_id: str) -> bool:
        """All output is sent to the new ingress, from the first token on."""
        self._replica(replica)._check()
        if sequence_id not in self._replica(replica).held or self.loses_orphans:
            return False
        state = next(s for s in self.submitted if s.sequence_id == sequence_id)
        before, state.ingress_id = state.ingress_id, ingress_id
        if before != ingress_id:
            gone = self._emission(state, 0, [], moves=1)
            gone.error = TakenOver("resumed elsewhere")
            self._replica(replica).put(before, gone)
        said = self._emission(state, 0, self.script[: self.num_said[sequence_id]], moves=1)
        self._replica(replica).put(ingress_id, said)
        return True

    async def poll(self, replica: str, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        return await self._replica(replica).poll(ingress_id, ack, timeout_s)

    async def heartbeat(self, ingress_id: str, replicas: Sequence[str]) -> None:
        self.heartbeats += 1

    async def push_metrics(
        self, source: str, families: bytes, running: list[dict[str, Any]] | None = None
    ) -> None:
        self.hub.push(source, families, now_s=time.monotonic())
        self.running = self.running if running is None else running

    async def moves(self, request_id: str) -> list[dict[str, Any]]:
        return []

    async def ticks(self) -> str:
        return ""

    async def kv_events(self, replica: str, after: int) -> dict[str, Any] | None:
        if after == 11:
            raise ReplicaError(f"{replica} takes no such call", code="unknown_method")
        if after > 9:
            raise ReplicaDied(f"{replica} is gone")
        return {"seq": after, "events": []} if after < 9 else None

    async def operators_view(self) -> dict[str, Any]:
        return {"at_unix_s": time.time(), "replicas": []}

    async def auto_reports(self, ingress_id: str, first: int, reports: list[AutoReport]) -> None:
        self.reports.extend(reports)

    async def history(self) -> dict[str, Any] | None:
        return {"rows": []}

    async def metrics(self) -> bytes:
        return self.hub.exposition(now_s=time.monotonic())

    def _replica(self, name: str) -> FakeReplica:
        return self.prefill if name == PREFILL else self.decode

    async def _run(self, state: SequenceState) -> None:
        """First token from prefill, then the move, then the rest from decode."""
        script = self.script[: state.sampling.max_tokens]
        ends_itself = len(script) == len(self.script)
        reason = FinishReason.STOP if ends_itself else FinishReason.LENGTH
        first = self._emission(state, 0, script[:1])
        self.num_said[state.sequence_id] = 1
        if state.sampling.num_prompt_logprobs is not None:
            first.prompt_logprobs = [TokenLogprob(state.prompt_ids[0], None)] + [
                TokenLogprob(t, -1.0, ((t, -1.0),)) for t in state.prompt_ids[1:]
            ]
        if state.sampling.pooling is not None:
            first.embedding = array("f", [float(t) for t in state.prompt_ids[:3]])
        if len(script) <= 1:
            first.finish = reason
            self.prefill.held.discard(state.sequence_id)
            self.prefill.put(state.ingress_id, first)
            return
        self.prefill.put(state.ingress_id, first)
        self.decode.held.add(state.sequence_id)
        self.prefill.held.discard(state.sequence_id)
        self.prefill.put(
            state.ingress_id, EngineOutput(state.sequence_id, state.epoch, moved_to=DECODE)
        )
        at = 1
        while at < len(script):
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(self.step_s)
            if state.sequence_id not in self.decode.held or self.decode.dead:
                return
            emission = self._emission(state, at, script[at : at + self.tokens_per_step], moves=1)
            at += self.tokens_per_step
            self.num_said[state.sequence_id] = min(at, len(script))
            if at >= len(script):
                emission.finish = reason
                self.decode.held.discard(state.sequence_id)
            self.decode.put(state.ingress_id, emission)

    def _emission(
        self, state: SequenceState, index: int, token_ids: list[int], *, moves: int = 0
    ) -> EngineOutput:
        logprobs = None
        if state.sampling.num_logprobs is not None:
            top = tuple((t, -0.5 - t / 1000) for t in range(state.sampling.num_logprobs))
            logprobs = [TokenLogprob(t, -0.5, top) for t in token_ids]
        return EngineOutput(
            state.sequence_id,
            state.epoch + moves,
            index,
            list(token_ids),
            [8] * len(token_ids),
            logprobs,
            depth=self.loaded[index] if self.loaded else 0,
        )
