"""A test that plays the ingress: admits, submits, polls, and keeps book of every stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.rpc.lookup import controller_name, forget_actor, get_actor, scheduler_name
from actors.rpc.ray_rpc import from_ray
from quadriga.checkpoint.exits import FULL_DEPTH, ExitParams
from quadriga.checkpoint.families import MAX_LAYERS
from quadriga.core.output import EngineOutput, PollReply
from quadriga.core.request import FinishReason, SamplingParams, SequenceState
from quadriga.core.routing import Admission, AdmitRequest
from quadriga.errors import QuadrigaError, ReplicaDied

RPC_TIMEOUT_S = 45.0
ORPHAN_S = 4.0


def call(name: str, method: str, *args: Any, timeout_s: float = RPC_TIMEOUT_S) -> Any:
    """Call a named actor and wait; raises our own errors."""
    try:
        return ray.get(getattr(get_actor(name), method).remote(*args), timeout=timeout_s)
    except (RayTaskError, RayActorError) as exc:
        raise from_ray(name, method, exc) from exc


@dataclass
class Stream:
    """What came of one sequence.

    Attributes:
        replica: Who owns it, as far as is known here; in a hand-off after prefill, who will.
        heirs: Replicas that may speak for it soon: destinations of a live migration that is under
            way, and sources that have not said how theirs ended; under which epoch they will.
        arrivals: When tokens came, and how many, monotonic.
    """

    state: SequenceState
    replica: str
    tokens: dict[int, int] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    moved_to: list[str] = field(default_factory=list)
    finish: FinishReason | None = None
    error: QuadrigaError | None = None
    first_token_s: float | None = None
    next_owners: dict[str, int] = field(default_factory=dict)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    orphaned: tuple[float, QuadrigaError] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing follows: the last token may overtake those of an earlier owner."""
        has_all = max(self.tokens, default=-1) + 1 == len(self.tokens)
        return self.error is not None or (self.finish is not None and has_all)

    @property
    def token_ids(self) -> list[int]:
        """The tokens in order. Raises: AssertionError when one is missing."""
        assert sorted(self.tokens) == list(range(len(self.tokens))), "a gap in the stream"
        return [self.tokens[i] for i in range(len(self.tokens))]

    def take(self, emission: EngineOutput, sender: str) -> None:
        if emission.move is not None:
            self._follow(emission, sender)
            return
        # A new owner's tokens may overtake the old one's last: they come by different polls.
        newest = max(self.epochs, default=-1)
        is_former_owner = emission.epoch < newest
        if emission.epoch > newest:
            self.replica, self.orphaned = sender, None
            self.next_owners = {
                name: at for name, at in self.next_owners.items() if at > emission.epoch
            }
        self.epochs.append(emission.epoch)
        for i, token_id in enumerate(emission.token_ids):
            index = emission.first_index + i
            assert self.tokens.setdefault(index, token_id) == token_id, "a token has changed"
        if emission.token_ids:
            self.arrivals.append((time.monotonic(), len(emission.token_ids)))
            self.first_token_s = self.first_token_s or self.arrivals[0][0]
        if emission.moved_to is not None:
            self.moved_to.append(emission.moved_to)
            self.replica = emission.moved_to
        if not is_former_owner:
            self.finish = emission.finish or self.finish
            self.error = emission.error or self.error

    def _follow(self, emission: EngineOutput, sender: str) -> None:
        """A live migration begins or ends; until its tokens come the source is the owner."""
        peer = emission.moved_to
        assert peer is not None
        if emission.move == "begun":
            self.next_owners |= {peer: emission.epoch + 1, sender: emission.epoch}
            return
        if self.next_owners.get(sender, emission.epoch) <= emission.epoch:
            self.next_owners.pop(sender, None)
        if emission.move == "done":
            self.moved_to.append(peer)
            if self.replica == sender:
                self.replica = peer
        elif emission.epoch >= max(self.epochs):
            self.next_owners.pop(peer, None)
            self.replica, self.orphaned = sender, None

    def lose(self, replica: str, error: QuadrigaError) -> None:
        """A replica is gone; the stream ends with it, unless somebody else soon speaks for it."""
        self.next_owners.pop(replica, None)
        if self.replica == replica and not self.is_over and self.orphaned is None:
            self.orphaned = (time.monotonic(), error)

    def end_if_orphaned(self, patience_s: float) -> None:
        """End in the owner's death where no heir is left, or none has spoken."""
        if self.orphaned is not None and not self.is_over:
            since_s, error = self.orphaned
            if not self.next_owners or time.monotonic() - since_s > patience_s:
                self.error = error


class Ingress:
    """One ingress of an application; everything it does has a deadline."""

    def __init__(self, app: str, model: str = "quadriga-s") -> None:
        self.app = app
        self.model = model
        self.ingress_id = uuid.uuid4().hex
        self.streams: dict[str, Stream] = {}
        self.patience_s = ORPHAN_S
        self._acks: dict[str, int] = {}
        self._polls: dict[str, Any] = {}
        self._beat_s = 0.0

    def submit(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Stream:
        """Admit and submit one sequence; see `submit_together`."""
        return self.submit_together([prompt], max_tokens, **options)[0]

    def submit_together(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        deadline_s: float = 60.0,
        priority: int = 0,
        exits: ExitParams = FULL_DEPTH,
        adapter: str = "",
        **sampling: Any,
    ) -> list[Stream]:
        """Admit sequences, and then submit them: so they are spread, however fast prompts are.

        They are greedy, and end tokens are ignored, unless told otherwise.
        """
        now = time.time()
        params = {"temperature": 0.0, "ignore_eos": True} | sampling
        states = [
            SequenceState(
                sequence_id=uuid.uuid4().hex,
                request_id=uuid.uuid4().hex,
                model=self.model,
                prompt_ids=list(prompt),
                sampling=SamplingParams(max_tokens=max_tokens, **params),
                ingress_id=self.ingress_id,
                arrival_unix_s=now,
                deadline_unix_s=now + deadline_s,
                priority=priority,
                exits=exits,
                adapter=adapter,
            )
            for prompt in prompts
        ]
        admissions = [self._admit(state) for state in states]
        for state, admission in zip(states, admissions, strict=True):
            for tries_left in (2, 1, 0):  # as the product's: it may have gone since its last report
                try:
                    call(admission.prefill_replica, "submit", state)
                    break
                except ReplicaDied:
                    if not tries_left:
                        raise
                    admission = self._admit(state)
            self.streams[state.sequence_id] = Stream(state, admission.prefill_replica)
        return [self.streams[state.sequence_id] for state in states]

    def _admit(self, state: SequenceState) -> Admission:
        request = AdmitRequest(
            state.sequence_id,
            self.model,
            len(state.prompt_ids),
            state.sampling.max_tokens,
            state.priority,
            state.deadline_unix_s,
            needs_depth=state.exits.max_depth or MAX_LAYERS if state.exits.is_strict else 0,
        )
        admissions: list[Admission] = call(scheduler_name(self.app), "admit", [request])
        return admissions[0]

    def cancel(self, *streams: Stream) -> None:
        """Cancel where the sequences are, as far as is known here; the scheduler hears of it."""
        by_replica: dict[str, list[str]] = {}
        for stream in streams:
            for name in {stream.replica, *stream.next_owners}:
                by_replica.setdefault(name, []).append(stream.state.sequence_id)
            self.streams.pop(stream.state.sequence_id, None)
        for replica, sequence_ids in by_replica.items():
            call(replica, "cancel", sequence_ids)
        given_up = [stream.state.sequence_id for stream in streams]
        call(scheduler_name(self.app), "finished", given_up)

    def poll(self, timeout_s: float = 0.05) -> None:
        """Poll every replica that holds a stream once; a dead one fails what it holds."""
        self.heartbeat()
        live = [s for s in self.streams.values() if not s.is_over]
        # A prefill replica may have said everything already; asking it once more is harmless.
        replicas = {name for s in live for name in (s.replica, *s.next_owners)} | set(self._acks)
        for name in replicas - self._polls.keys():
            try:
                ack = self._acks.setdefault(name, 0)
                self._polls[name] = get_actor(name).poll.remote(self.ingress_id, ack, timeout_s)
            except ReplicaDied as exc:
                self._lost(name, exc)
        # One that hangs is asked no more until it answers; the others go on.
        refs = list(self._polls.values())
        ready, _ = (
            ray.wait(refs, num_returns=len(refs), timeout=timeout_s + 0.1) if refs else ([], [])
        )
        for name, ref in list(self._polls.items()):
            if ref not in ready:
                continue
            del self._polls[name]
            try:
                reply: PollReply = ray.get(ref, timeout=RPC_TIMEOUT_S)
            except (RayTaskError, RayActorError) as exc:
                self._lost(name, from_ray(name, "poll", exc))
                continue
            self._acks[name] = reply.last_seq
            for emission in reply.emissions:
                stream = self.streams.get(emission.sequence_id)
                if stream is not None:
                    stream.take(emission, name)
        for stream in live:
            stream.end_if_orphaned(self.patience_s)

    def _lost(self, name: str, error: QuadrigaError) -> None:
        forget_actor(name)
        self._acks.pop(name, None)
        for stream in self.streams.values():
            stream.lose(name, error)

    def heartbeat(self) -> None:
        if time.monotonic() - self._beat_s > 0.5:
            self._beat_s = time.monotonic()
            try:
                call(controller_name(self.app), "ingress_heartbeat", self.ingress_id)
            except QuadrigaError:
                forget_actor(controller_name(self.app))

    def until(self, is_done: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Poll until something is the case. Raises: AssertionError when it is not in time."""
        give_up = time.monotonic() + timeout_s
        while not is_done():
            assert time.monotonic() < give_up, f"not in {timeout_s} s"
            self.poll()

    def finish(self, *streams: Stream, timeout_s: float = 60.0) -> None:
        """Poll until these streams are over."""
        self.until(lambda: all(s.is_over for s in streams), timeout_s)
