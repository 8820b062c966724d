"""Calls of the ingress to the cluster's actors, its cached view of them, and batched cancellations.

Every method raises errors of `quadriga.errors` only; Ray's own exceptions end in `ray_rpc`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

from quadriga.clock import Clock
from quadriga.core.output import POLL_SLACK_S, PollReply
from quadriga.core.replica import PARTS, ReplicaSnapshot, Role
from quadriga.core.request import AUTO_MODEL, ResumableSequence, SequenceState
from quadriga.core.routing import Admission, AdmitRequest, AutoReport, ClusterView
from quadriga.errors import QuadrigaError, ReplicaDied, ReplicaError, Unavailable, is_known_death
from quadriga.policies.liveness import HeartbeatMonitor, Liveness, event_loop_stall_s
from serve_app.ops.tasks import Tasks
from serve_app.request.sequence_request import SequenceRequest

logger = logging.getLogger("quadriga.ingress")

Call = Callable[[], Coroutine[Any, Any, None]]

CALL_TIMEOUT_S = 10.0
SCHEDULER_TIMEOUT_S = 2.0
"""The ingress can do without the scheduler: a later answer is worth less than the wait."""
HEARTBEAT_TIMEOUT_S = 3.0
LOOK_TIMEOUT_S = 0.5
PASSED_OVER = (ReplicaError, MemoryError)
HOLDING_TIMEOUT_S = 5.0
ENDED_PAUSE_S = 0.25
SHOWN_STARTING = 4
"""Replicas of which an answer that the service is not ready says what they do."""
LOST_S = 3.0
"""After a replica was found to be gone the scheduler may still name it for so long."""


class ClusterClient:
    """The named Ray actors of one application. Every method raises QuadrigaError only.

    Args:
        app_name: `QuadrigaConfig.name`; scheduler and controller are called after it.
    """

    def __init__(self, app_name: str) -> None:
        from actors.rpc.ray_rpc import call
        from actors.rpc.rpc_batcher import RpcBatcher

        self._calls = RpcBatcher(call)
        self._scheduler = f"{app_name}:scheduler"
        self._controller = f"{app_name}:controller"
        self._monitor = HeartbeatMonitor(time.monotonic())
        self._actor = own_actor()

    async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission]:
        reply: list[Admission] = await self._calls.call(
            self._scheduler, "admit", requests, timeout_s=SCHEDULER_TIMEOUT_S
        )
        return reply

    async def finished(self, sequence_ids: Sequence[str], lost: Sequence[str]) -> None:
        await self._call(self._scheduler, "finished", list(sequence_ids), list(lost))

    async def directory(self) -> ClusterView:
        view: ClusterView = await self._call(
            self._scheduler, "directory", deadline_s=SCHEDULER_TIMEOUT_S
        )
        return view

    async def status(self) -> dict[str, Any]:
        """See `Controller.status`."""
        status: dict[str, Any] = await self._call(
            self._controller, "status", deadline_s=SCHEDULER_TIMEOUT_S
        )
        return status

    async def submit(self, replica: str, state: SequenceState) -> None:
        await self._calls.call(replica, "submit", state, timeout_s=CALL_TIMEOUT_S)

    async def cancel(
        self, replica: str, sequence_ids: Sequence[str], ingress_id: str | None
    ) -> None:
        """Have sequences freed that belong to this ingress; None: to any. Asks again if need be."""
        await self._calls.tell(replica, "cancel", list(sequence_ids), ingress_id)

    async def holding(self, replica: str, sequence_ids: Sequence[str]) -> list[str]:
        """Those of the sequences that the replica has."""
        held: list[str] = await self._call(
            replica, "holding", list(sequence_ids), deadline_s=HOLDING_TIMEOUT_S
        )
        return held

    async def find_resumable(self, claims: Sequence[str]) -> list[ResumableSequence]:
        """Those of the sequences that still run, with their replicas."""
        found: list[ResumableSequence] = await self._call(
            self._scheduler, "find_resumable", list(claims), deadline_s=SCHEDULER_TIMEOUT_S
        )
        return found

    async def adopt(self, replica: str, sequence_id: str, ingress_id: str) -> bool:
        """Have a sequence's tokens sent here, from the first on; False where it is not there."""
        is_there: bool = await self._call(
            replica, "adopt", sequence_id, ingress_id, deadline_s=HOLDING_TIMEOUT_S
        )
        return is_there

    async def poll(self, replica: str, ingress_id: str, ack: int, timeout_s: float) -> PollReply:
        reply: PollReply = await self._call(
            replica, "poll", ingress_id, ack, timeout_s, deadline_s=timeout_s + POLL_SLACK_S
        )
        return reply

    async def heartbeat(self, ingress_id: str, replicas: Sequence[str]) -> None:
        """Send a heartbeat to controller, scheduler and replicas; those that are dead are skipped.

        A controller that hangs is restarted, and adopts what runs. An ingress without any answer
        ends its own process; see `HeartbeatMonitor`.
        """
        beats: list[tuple[str, tuple[str, ...]]] = [(self._controller, (ingress_id, self._actor))]
        beats += [(name, (ingress_id,)) for name in (self._scheduler, *replicas)]
        began_s = time.monotonic()
        results = await asyncio.gather(
            *(
                self._call(name, "ingress_heartbeat", *who, deadline_s=HEARTBEAT_TIMEOUT_S)
                for name, who in beats
            ),
            return_exceptions=True,
        )
        now_s = time.monotonic()
        answered = [not _is_lost(result) for result in results]
        verdict = self._monitor.judge(
            answered[0],
            any(answered),
            now_s=now_s,
            stood_still_s=event_loop_stall_s(began_s, now_s, HEARTBEAT_TIMEOUT_S),
        )
        if verdict is Liveness.END_ITSELF:
            self._end("no actor answers it")
        elif verdict is Liveness.RESTART_CONTROLLER:
            await self._restart(self._controller)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, PASSED_OVER):
                raise result

    def _end(self, reason: str) -> None:
        """End this process at once; Serve starts another one."""
        logger.error("this ingress ends: %s", reason)
        os._exit(1)

    async def _restart(self, name: str) -> None:
        from actors.rpc.ray_rpc import restart

        logger.warning("%s hangs; it is restarted", name)
        await restart(name)

    async def push_metrics(
        self, source: str, families: bytes, running: list[dict[str, Any]] | None = None
    ) -> None:
        await self._call(self._controller, "push_metrics", source, families, running)

    async def auto_reports(self, ingress_id: str, first: int, reports: list[AutoReport]) -> None:
        await self._call(self._controller, "auto_reports", ingress_id, first, reports)

    async def history(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self._call(self._controller, "history")
        return found

    async def operators_view(self) -> dict[str, Any]:
        """What scheduler and controller show; `missing` names those that do not answer, and why."""
        actors = (self._scheduler, self._controller)
        answers = await asyncio.gather(
            *(self._call(n, "operators_view", deadline_s=SCHEDULER_TIMEOUT_S) for n in actors),
            return_exceptions=True,
        )
        view: dict[str, Any] = {"at_unix_s": time.time(), "replicas": [], "missing": {}}
        for name, answer in zip(actors, answers, strict=True):
            if isinstance(answer, QuadrigaError):
                view["missing"][name] = answer.message
            elif isinstance(answer, BaseException):
                raise answer
            else:
                view |= answer
        await self._look_at(view.get("requests", []))
        return view

    async def _look_at(self, rows: list[dict[str, Any]]) -> None:
        """Add what replicas know of these sequences; of one that is silent nothing is new."""
        asked: dict[str, list[str]] = {}
        for row in rows:
            if row["replica"] is not None:
                asked.setdefault(row["replica"], []).append(row["sequence_id"])
        look = partial(self._call, deadline_s=LOOK_TIMEOUT_S)
        calls = (look(name, "look_at", ids) for name, ids in asked.items())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        news = [answer for answer in answers if isinstance(answer, dict)]
        for row, answer in product(rows, news):
            row.update(answer.get(row["sequence_id"], {}))

    async def moves(self, request_id: str) -> list[dict[str, Any]]:
        """What the scheduler decided lately about moving the sequences of a request."""
        found: list[dict[str, Any]] = await self._call(
            self._scheduler, "moves", request_id, deadline_s=SCHEDULER_TIMEOUT_S
        )
        return found

    async def ticks(self) -> str:
        """The scheduler's newest rescheduling decisions, with all they saw; JSON lines."""
        lines: str = await self._call(self._scheduler, "ticks", deadline_s=SCHEDULER_TIMEOUT_S)
        return lines

    async def kv_events(self, replica: str, after: int) -> dict[str, Any] | None:
        """What a replica's prefix cache has kept and let go; None where it has none."""
        found: dict[str, Any] | None = await self._call(replica, "kv_events", after)
        return found

    async def metrics(self) -> bytes:
        page: bytes = await self._call(self._controller, "metrics")
        return page

    async def _call(
        self, name: str, method: str, *args: object, deadline_s: float = CALL_TIMEOUT_S
    ) -> Any:
        from actors.rpc.ray_rpc import call

        return await call(name, method, *args, timeout_s=deadline_s)


class ClusterStateCache:
    """The last view of the replicas, and admission while the scheduler does not answer.

    Args:
        max_age_s: An older view does not show that the cluster is ready.
    """

    def __init__(self, cluster: ClusterClient, clock: Clock, *, max_age_s: float) -> None:
        self._cluster = cluster
        self._clock = clock
        self._max_age_s = max_age_s
        self._taken_s = float("-inf")
        self._is_scheduler_away = False
        self._lost: dict[str, float] = {}  # replica → when it was found to be gone
        self._starting: dict[Role, str] = {}
        self.view = ClusterView(0.0, [])

    async def refresh(self) -> None:
        """Ask the scheduler; while none serve, the controller why. Raises: ReplicaError; the old
        view stays."""
        try:
            self.view = await self._cluster.directory()
        except ReplicaError:
            self._is_scheduler_away = True
            raise
        self._is_scheduler_away = False
        self._taken_s = self._clock.now_s()
        self._starting = {}
        if not all(map(self._serving, PARTS)):
            with suppress(ReplicaError):
                status = await self._cluster.status()
                self._starting = {part: starting_text(status, part) for part in PARTS}

    @property
    def names(self) -> set[str]:
        return {s.info.name for s in self.view.snapshots}

    def forget(self, replica: str) -> None:
        """Remove a replica that is gone, until a newer view has it again."""
        now_s = self._clock.now_s()
        self._lost = {name: at_s for name, at_s in self._lost.items() if now_s - at_s < LOST_S}
        self._lost[replica] = now_s
        self.view.snapshots = [s for s in self.view.snapshots if s.info.name != replica]

    @property
    def is_old(self) -> bool:
        """Whether the view says nothing of the present: the scheduler is away."""
        return self._clock.now_s() - self._taken_s > self._max_age_s

    def check_ready(self) -> None:
        """Raises: Unavailable while a role has no replica that is known to serve."""
        if self.is_old:
            raise Unavailable("the cluster has not been heard of lately", retry_after_s=1.0)
        for role in PARTS:
            if not self._serving(role):
                doing = self._starting.get(role, "")
                text = f"no {role} replica is ready{doing and ': '}{doing}"
                raise Unavailable(text, retry_after_s=1.0)

    async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission]:
        """Ask the scheduler where the sequences of a request shall go first, all or none; without
        it, choose by the last view.

        Raises: Overloaded, UnknownModel, Unavailable, ContextTooLong.
        """
        try:
            if self._is_scheduler_away and self.view.snapshots:
                raise ReplicaDied("the scheduler did not answer lately")  # nor would it now
            admissions = await self._cluster.admit(requests)
        except ReplicaError:
            return [self._admit_by_view(request) for request in requests]
        for name in {admission.prefill_replica for admission in admissions}:
            lost_s = self._lost.get(name)
            if lost_s is not None and self._clock.now_s() - lost_s < LOST_S:
                # Sent there it would be lost again, and again, before its replica is replaced.
                raise Unavailable(f"{name} is gone", retry_after_s=1.0)
        return admissions

    def _admit_by_view(self, request: AdmitRequest) -> Admission:
        model = None if request.model == AUTO_MODEL else request.model
        serving = self._serving(Role.PREFILL, model)
        if not serving:
            raise Unavailable("the scheduler is away and no replica is known", retry_after_s=2.0)
        # Where none has the layers, they are loaded, or the replica refuses it.
        candidates = [s for s in serving if s.info.has_layers(request.needs_depth)] or serving
        queue = attrgetter("is_scout", "waiting_tokens", "num_waiting", "info.name")
        best = min(candidates, key=queue)
        best.waiting_tokens += request.num_prompt_tokens  # until the next view
        return Admission(best.info.name, best.info.depth_class)

    def _serving(self, role: Role, model: str | None = None) -> list[ReplicaSnapshot]:
        return [
            s
            for s in self.view.snapshots
            if s.info.role.does(role)
            and not s.draining
            and (model is None or s.info.depth_class.model == model)
        ]


class CancellationBatcher:
    """Sends cancellations to replicas and ended sequences to the scheduler, many at a time.

    Cancellations free rows and are sent at once; ended sequences are sent `ENDED_PAUSE_S` later.
    """

    def __init__(self, cluster: ClusterClient, tasks: Tasks, ingress_id: str) -> None:
        self._cluster = cluster
        self._ingress_id = ingress_id
        self._tasks = tasks
        self._timer: asyncio.TimerHandle | None = None
        self._to_cancel: dict[tuple[str, str | None], list[str]] = {}
        self._ended: list[str] = []
        self._lost: list[str] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()

    def cancel(self, replica: str, sequence_id: str, *, is_ours: bool = True) -> None:
        """Have `replica` free a sequence.

        Args:
            is_ours: Not if another ingress has adopted it meanwhile; else whichever owns it.
        """
        owner = self._ingress_id if is_ours else None
        self._to_cancel.setdefault((replica, owner), []).append(sequence_id)
        self._work.set()

    def ended(self, sequence_id: str, *, is_lost: bool = False) -> None:
        """A sequence is over, or was lost and goes on under another name."""
        (self._lost if is_lost else self._ended).append(sequence_id)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ENDED_PAUSE_S, self._work.set)

    async def report_ended_sequences(self) -> None:
        """Wait for something to report, and send it; a call without an answer delays no other."""
        await self._work.wait()
        self._work.clear()
        for call in self._calls():
            task = self._tasks.spawn(_send(call))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def flush(self) -> None:
        """Report all there is, and wait for the answers, those of earlier reports too."""
        await asyncio.gather(*self._sending, *(_send(call) for call in self._calls()))

    def _calls(self) -> list[Call]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        cancels, self._to_cancel = self._to_cancel, {}
        ended, self._ended = self._ended, []
        lost, self._lost = self._lost, []
        calls: list[Call] = [
            partial(self._cluster.cancel, replica, ids, owner)
            for (replica, owner), ids in cancels.items()
        ]
        if ended or lost:
            calls.append(partial(self._cluster.finished, ended, lost))
        return calls


async def _send(call: Call) -> None:
    """Make a call; a replica that cannot be reached is dead, or frees by itself."""
    with suppress(ReplicaError):
        await call()


def _is_lost(result: object) -> bool:
    """Whether a call had no answer that this process could read."""
    if isinstance(result, ReplicaError):
        return result.code == "timeout"
    return isinstance(result, MemoryError)


def starting_text(status: Mapping[str, Any], part: Role | None = None) -> str:
    """What replicas do that do not serve yet, in words; of many the first few.

    Args:
        part: Only those that will do this part of the work.
    """
    said = [
        f"{r['role']} {r['name'].split(':')[2]}: {r['doing']}"
        for r in status["replicas"]
        if r["phase"] in ("pending", "starting") and (part is None or Role(r["role"]).does(part))
    ]
    more = f"; {len(said) - SHOWN_STARTING} more" if len(said) > SHOWN_STARTING else ""
    return "; ".join(said[:SHOWN_STARTING]) + more


def own_actor() -> str:
    """Name of the Ray actor this process is; empty where it is none."""
    import ray

    return ray.get_runtime_context().get_actor_name() or ""


async def unowned(cluster: ClusterClient, sequences: Sequence[SequenceRequest]) -> list[str]:
    """Ask all owners for these sequences; return the ids of those that none has any more.

    Where a replica does not answer, it counts as having its sequences: `silent_replicas` judges
    its silence. A sequence with output while its owners were asked is owned.
    """
    asked: dict[str, list[str]] = {}
    # One without owners was lost meanwhile, and is being submitted to new ones.
    before = [(s, s.state.sequence_id, s.num_contacts) for s in sequences if s.owners]
    for sequence, sequence_id, _ in before:
        for name in sequence.owners:
            asked.setdefault(name, []).append(sequence_id)
    answers = await asyncio.gather(*(_held(cluster, name, ids) for name, ids in asked.items()))
    held = {sequence_id for answer in answers for sequence_id in answer}
    return [
        sequence_id
        for sequence, sequence_id, num_contacts in before
        if sequence_id not in held and sequence.num_contacts == num_contacts
    ]


async def _held(cluster: ClusterClient, replica: str, sequence_ids: list[str]) -> Sequence[str]:
    try:
        return await cluster.holding(replica, sequence_ids)
    except QuadrigaError as exc:
        return () if is_known_death(exc) else sequence_ids
