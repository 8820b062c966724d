"""One sequence of a request, and the rules by which it takes its replicas' output."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from quadriga.checkpoint.exits import MAX_LAYERS
from quadriga.core.forecast import LengthPrediction
from quadriga.core.output import EngineOutput
from quadriga.core.request import (
    AUTO_MODEL,
    FinishReason,
    ResumableSequence,
    SequenceState,
    TokenLogprob,
    remaining_of,
)
from quadriga.core.routing import AdmitRequest
from quadriga.errors import Cancelled, InvariantViolation, QuadrigaError, ReplicaError, Unavailable
from quadriga.scheduling.prefixes.affinity import prefix_marks
from quadriga.scheduling.transfer.rebuild import num_prefill_tokens
from quadriga.text import Detokenizer, StopMatcher


def is_recoverable(error: QuadrigaError) -> bool:
    """Whether a sequence can go on elsewhere after a replica ended it in this error.

    That is so where the replica failed, or the connection to it, and not the request. A replica
    sends `Cancelled` when it had no heartbeat of this ingress for long; the ingress still runs.
    """
    return isinstance(error, ReplicaError | Unavailable | Cancelled)


@dataclass(frozen=True, slots=True)
class SequenceEta:
    """When a sequence is predicted to end.

    Attributes:
        tokens: Still to come.
        token_s: Seconds a token so far; None before the second, or the next one after an adoption.
    """

    tokens: LengthPrediction
    token_s: float | None

    def plain(self) -> dict[str, float]:
        """As answers name it: tokens, and seconds where a pace is known."""
        said = self.tokens
        fields = {"tokens": said.mean, "lower": said.lower, "upper": said.upper}
        fields = {name: round(value, 1) for name, value in fields.items()}
        if self.token_s is not None:
            fields["seconds"] = round(said.mean * self.token_s, 3)
            fields["upper_seconds"] = round(said.upper * self.token_s, 3)
        return fields


class SequenceRequest:
    """One sequence of a request: its state, its text, and the replicas that run it.

    Attributes:
        state: All that is needed to rebuild the sequence elsewhere; what is begun anew counts on
            from what it was, and has spent what it has spent of its quality budget.
        pieces: Text that became visible with each output token.
        tail: Text that became visible with the end.
        replica: The owner: it accepted the submission, or sent the newest tokens. None before.
        next_owners: Replicas it is being handed to, with the epoch under which they will send.
        handing_over: Replicas whose live migration of it has not been reported as ended: if the
            destination dies, they may send again.
        last_contact_s: When a replica last sent something of it, or accepted it, monotonic; None
            while it is being submitted.
        num_contacts: How often a replica sent something of it.
        failure: An error of a replica, and not of the sequence: it can go on elsewhere.
        lost_s: When it was lost, monotonic; None once it has a new token.
        num_rebuilds: How often it was begun anew after a loss.
        num_stalled: How often since its last new token.
        caller_fingerprint: The same when its caller sends the same request again.
        is_ours: Its replica knows it as this ingress's; not while it is being adopted.
        was_adopted: It was another ingress's, which knows what its tokens took.
        is_auto: Its model is chosen by the cluster, anew whenever it is begun anew.
        may_begin: Whether it may be begun from its prompt. False where the client has a part of it
            already, and could not notice that the answer is another one.
        num_at_first: Tokens that count as its first: one, or all that it had when it was adopted.
        profile: The replica whose profile it is part of.
        spans: (model, layers loaded, tokens) one after the other, where depths change.
        num_cached: Prompt tokens that were not computed for its first token.
        embedding: Of the prompt, where that is what was asked for: float32 [hidden].
        nll, num_scored: Sum of −log p, over so many tokens, where the cluster asked for it.
        sure_layers: See `EngineOutput`; where the cluster chooses the model.
    """

    def __init__(
        self,
        index: int,
        state: SequenceState,
        detokenizer: Detokenizer,
        stops: StopMatcher | None,
    ) -> None:
        self.index = index
        self.state = state
        self.replica: str | None = None
        self.next_owners: dict[str, int] = {}
        self.handing_over: set[str] = set()
        self.last_contact_s: float | None = None
        self.num_contacts = 0
        self.failure: QuadrigaError | None = None
        self.lost_s: float | None = None
        self.num_rebuilds = 0
        self.num_cached = 0
        self.embedding: array[float] | None = None
        self.num_stalled = 0
        self.pieces: list[str] = []
        self.tail = ""
        self.finish: FinishReason | None = None
        self.error: QuadrigaError | None = None
        self.accepted_s: float | None = None
        self.first_token_s: float | None = None
        self.num_at_first = 1
        self.last_token_s = 0.0
        self.caller_fingerprint = ""
        self.is_ours = True
        self.was_adopted = False
        self.is_auto = False
        self.may_begin = True
        self.profile: str | None = None
        self.spans: list[tuple[str, int, int]] = []
        self.nll = 0.0
        self.num_scored = 0
        self.sure_layers: list[int] = []
        self._shows_logprobs = state.sampling.num_logprobs is not None
        self._detokenizer = detokenizer
        self._stops = stops
        # Output of a new owner that overtook the last tokens of the one before.
        self._early: list[tuple[str, EngineOutput]] = []
        self._has_asked = False
        self._first_name = state.sequence_id
        self._num_names = 1

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def owners(self) -> set[str]:
        """Replicas that may own it, now or soon."""
        owners = set() if self.replica is None else {self.replica}
        if self.next_owners or self.handing_over:  # most are asked for with each token
            owners.update(self.next_owners, self.handing_over)
        return owners

    @property
    def status(self) -> str:
        """Where it is now, as far as its ingress knows; see `RunningSequence.shown`."""
        if self.replica is None:
            return "waiting"
        if self.first_token_s is None or self.lost_s is not None:
            return "prefilling"
        return "moving" if self.next_owners or self.handing_over else "running"

    def lose(self, replica: str) -> bool:
        """Remove an owner that is gone. Returns whether no other is left."""
        self.next_owners.pop(replica, None)
        self.handing_over.discard(replica)
        if self.replica == replica:
            self.replica = None
        return not self.owners

    def is_named(self, name: str) -> bool:
        """Whether it runs under this name: it has not ended, nor been renamed."""
        return self.state.sequence_id == name and not self.done

    def rename(self) -> str:
        """Begin anew, with all that was generated; returns the new name.

        Output under the old name is ignored from now on, whichever replica sends it.
        """
        self.state.sequence_id = f"{self._first_name}.{self._num_names}"
        self._num_names += 1
        self.state.epoch += 1
        self.replica, self.next_owners, self.handing_over = None, {}, set()
        self.last_contact_s, self.failure, self._early = None, None, []
        self._has_asked, self.is_ours = False, True
        return self.state.sequence_id

    def adopt(self, resumable: ResumableSequence) -> None:
        """Become the sequence that runs there; its output is sent again from the first token."""
        self.state.sequence_id = resumable.sequence_id  # begun anew, it gets a name of its own
        self.state.epoch = resumable.epoch
        self.state.model = resumable.model
        self.replica = resumable.replica
        self.is_ours = False
        self.was_adopted = True

    def take_gap(self) -> ResumableSequence | None:
        """The owner that goes on after tokens lost with its predecessor; returned once."""
        if self.replica is not None or not self._early or self._has_asked or self.done:
            return None
        self._has_asked = True
        sender, output = self._early[0]
        state = self.state
        return ResumableSequence(state.claim, sender, state.sequence_id, output.epoch, state.model)

    @property
    def is_unknown(self) -> bool:
        """Whether beginning it anew could show the client another answer than it had."""
        return not self.may_begin and not self.state.output_ids

    def admit_request(self) -> AdmitRequest:
        """What the scheduler needs to know to choose its prefill replica."""
        state, exits = self.state, self.state.exits
        num_tokens = num_prefill_tokens(state)
        needs_depth = exits.max_depth or MAX_LAYERS if exits.is_strict else 0
        if state.sampling.pooling is not None:
            needs_depth = MAX_LAYERS
        return AdmitRequest(
            sequence_id=state.sequence_id,
            model=AUTO_MODEL if self.is_auto else state.model,
            num_prompt_tokens=num_tokens,
            max_tokens=state.max_total_tokens - num_tokens,
            priority=state.priority,
            deadline_unix_s=state.deadline_unix_s,
            needs_depth=needs_depth,
            is_rebuild=self.num_rebuilds > 0,
            visitor=self.caller_fingerprint,
            prefix_marks=prefix_marks(state.prompt_ids, state.prefix_salt),
        )

    def fail(self, error: QuadrigaError) -> None:
        """End in an error, unless it already ended."""
        if not self.done:
            self.error = error

    def accept(self, replica: str, output: EngineOutput) -> int:
        """Take output of `replica`; return how many new tokens it brought.

        Duplicates change nothing, nor does output of former owners, or of a second one under the
        same epoch. A replica that repeats tokens which are here with other values has another
        sequence: that is a `failure` of the replica. A gap within an epoch ends the sequence in an
        `InvariantViolation`. A stop string ends it with `finish` set before the replica knows.
        """
        if self.done or self.failure is not None:
            return 0
        self.num_contacts += 1
        if output.move is not None:
            self._follow(replica, output)
            return 0
        if output.epoch < self.state.epoch:
            return 0
        if output.epoch == self.state.epoch and self.replica not in (replica, None):
            return 0  # an epoch has one sender: what others go on from need not be the same
        if output.first_index > len(self.state.output_ids) and output.moved_to is None:
            self._note_gap(replica, output)
            return 0
        num_new = self._apply(replica, output)
        if num_new and self._early:
            early, self._early = self._early, []
            for sender, late in early:
                num_new += self.accept(sender, late)
        return num_new

    def _follow(self, replica: str, output: EngineOutput) -> None:
        """Note the state of a live migration.

        The source's tokens up to then are all here, or kept until those before them are.
        """
        is_old = output.epoch < self.state.epoch
        peer = output.moved_to or ""
        if output.move == "begun":
            if not is_old:
                self.next_owners[peer] = output.epoch + 1
                self.handing_over.add(replica)
            return
        self.handing_over.discard(replica)
        if output.move == "done":
            if not is_old and self.replica == replica:
                self.replica = peer
        elif not is_old:
            self.next_owners.pop(peer, None)
            if output.first_index <= len(self.state.output_ids):
                self._take_over(replica, output.epoch)

    def _take_over(self, replica: str, epoch: int) -> None:
        self.state.epoch = epoch
        self.replica = replica
        self.next_owners = {name: at for name, at in self.next_owners.items() if at > epoch}

    def _note_gap(self, replica: str, output: EngineOutput) -> None:
        """Keep output that overtook an older owner's tokens; within an epoch there is no gap."""
        if output.epoch > self.state.epoch:
            if (replica, output) not in self._early:
                self._early.append((replica, output))
            return
        self.error = InvariantViolation(
            f"tokens {len(self.state.output_ids)} to {output.first_index - 1} of a sequence "
            "never arrived"
        )

    def _apply(self, replica: str, output: EngineOutput) -> int:
        if output.moved_to is not None:
            self.next_owners[output.moved_to] = output.epoch + 1
            return 0
        if output.epoch > self.state.epoch:
            self._take_over(replica, output.epoch)
        if self._contradicts(output):
            self.failure = ReplicaError(
                f"{replica} goes on from another answer than the client has", code="contradicted"
            )
            return 0
        if output.prompt_logprobs is not None:
            self.state.prompt_logprobs = output.prompt_logprobs
        if output.embedding is not None:
            self.embedding = output.embedding
        if output.cached_tokens and not self.state.output_ids:
            self.num_cached = output.cached_tokens
        num_new = self._append(output)
        if output.progress is not None:
            self.state.note_progress(output.progress)
        if self.finish is None and output.error is not None:
            if is_recoverable(output.error):
                self.failure = output.error
            else:
                self.error = output.error
        elif self.finish is None and output.finish is not None:
            self._finish(output.finish)
        return num_new

    def _contradicts(self, output: EngineOutput) -> bool:
        """Whether it has other tokens than the client has already, or ends before them."""
        first, count = output.first_index, len(output.token_ids)
        again = self.state.output_ids[first : first + count]
        if again != output.token_ids[: len(again)]:
            return True
        return output.finish is not None and first + count < len(self.state.output_ids)

    def _append(self, output: EngineOutput) -> int:
        known = len(self.state.output_ids)
        skip = known - output.first_index
        if not output.token_ids or skip >= len(output.token_ids):
            return 0
        count = len(output.token_ids)
        if self.is_auto and output.sure_layers is not None and skip == 0:
            self.sure_layers += output.sure_layers
        # The token that ended the sequence (end token or stop id) counts but is not shown.
        hidden = count - 1 if output.finish is FinishReason.STOP else count
        for i in range(skip, count):
            token_id = output.token_ids[i]
            self.state.output_ids.append(token_id)
            if i < len(output.exit_layers):
                self.state.exit_layers.append(output.exit_layers[i])
            if output.logprobs is not None:
                self._note_logprob(output.logprobs[i])
            if output.depth:
                self._note_depth(output.depth)
            piece, met = self._detokenizer.push(token_id) if i < hidden else "", False
            if self._stops is not None:
                piece, met = self._stops.push(piece)
            self.pieces.append(piece)
            if met:
                self.finish = FinishReason.STOP
                return i + 1 - skip
        return count - skip

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended it; None where the end token or nothing did."""
        if self.finish is not FinishReason.STOP:
            return None
        if self._stops is not None and self._stops.met:
            return self._stops.met
        last = self.state.output_ids[-1:]
        return last[0] if last and last[0] in self.state.sampling.stop_token_ids else None

    @property
    def eta(self) -> SequenceEta | None:
        """Tokens and seconds to go, by the last prediction and its own pace; None without one."""
        said, first_s = remaining_of(self.state), self.first_token_s
        num_after = len(self.state.output_ids) - self.num_at_first
        if said is None or first_s is None or self.done:
            return None
        token_s = (self.last_token_s - first_s) / num_after if num_after > 0 else None
        return SequenceEta(said, token_s)

    def _note_logprob(self, logprob: TokenLogprob) -> None:
        if self._shows_logprobs:
            self.state.logprobs.append(logprob)
        if self.is_auto and logprob.logprob is not None:
            self.nll -= logprob.logprob
            self.num_scored += 1

    def _note_depth(self, depth: int) -> None:
        model = self.state.model
        if self.spans and self.spans[-1][:2] == (model, depth):
            self.spans[-1] = (model, depth, self.spans[-1][2] + 1)
        else:
            self.spans.append((model, depth, 1))

    def _finish(self, reason: FinishReason) -> None:
        self.tail, self.finish = self._detokenizer.flush(), reason
        if self._stops is not None:
            self.tail, met = self._stops.push(self.tail)
            if met:
                self.finish = FinishReason.STOP
            else:
                self.tail += self._stops.flush()
