"""One sequence of a request, with all that is needed to rebuild it elsewhere."""

from __future__ import annotations

from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, ResumableSequence, SequenceState, TokenLogprob
from quadriga.errors import (
    Cancelled,
    InvariantViolation,
    QuadrigaError,
    ReplicaError,
    Unavailable,
)
from quadriga.text import Detokenizer, StopMatcher


def outlives(error: QuadrigaError) -> bool:
    """Whether a sequence can go on elsewhere after a replica gave it up in this error.

    Only what befell the replica, or the way there, is no verdict on the request. `Cancelled` comes
    from replicas that had not heard of this ingress for long; but here it is.
    """
    return isinstance(error, ReplicaError | Unavailable | Cancelled)


class SequenceRequest:
    """One sequence of a request: its whole state, its text, and where it lives now.

    Attributes:
        state: All that is needed to rebuild the sequence elsewhere.
        pieces: Text that became visible with each output token.
        tail: Text that became visible with the end.
        replica: Who owns it now: took its submission, or sent the newest tokens. None before.
        heirs: Replicas it is being handed to, with the epoch under which they will speak.
        staying: Replicas that hand it over live and have not said yet how that ended: should the
            heir die, they may speak again.
        heard_s: When a replica last spoke of it, or accepted it, monotonic; None while it is being
            launched.
        num_heard: How often one spoke.
        failure: A replica gave it up in this error, which is not its own: it can go on elsewhere.
        lost_s: When it was lost, monotonic; None once it has a new token.
        num_rebuilds: How often it was begun anew after a loss.
        num_stalled: How often since its last new token.
        visitor: By what it is known again when it was refused and comes back.
        is_ours: Its replica knows it for this ingress's; not while it is being adopted.
        is_auto: Its model is chosen by the cluster, anew whenever it is begun anew.
        may_begin: Whether it may be begun from its prompt. False where the client has a part of it
            already, and could not tell another answer from the same.
        profile: The replica whose profile it is part of.
        spans: (model, layers loaded, tokens) one after the other, where depths change.
        nll, num_scored: Sum of −log p, over so many tokens, where the cluster asked for it.
    """

    def __init__(
        self, index: int, state: SequenceState, detokenizer: Detokenizer, stops: StopMatcher
    ) -> None:
        self.index = index
        self.state = state
        self.replica: str | None = None
        self.next_owners: dict[str, int] = {}
        self.staying: set[str] = set()
        self.heard_s: float | None = None
        self.num_heard = 0
        self.failure: QuadrigaError | None = None
        self.lost_s: float | None = None
        self.num_rebuilds = 0
        self.num_stalled = 0
        self.pieces: list[str] = []
        self.tail = ""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.finish: FinishReason | None = None
        self.error: QuadrigaError | None = None
        self.accepted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.visitor = ""
        self.is_ours = True
        self.is_auto = False
        self.may_begin = True
        self.profile: str | None = None
        self.spans: list[tuple[str, int, int]] = []
        self.nll = 0.0
        self.num_scored = 0
        self._shows_logprobs = state.sampling.num_logprobs is not None
        self._detokenizer = detokenizer
        self._stops = stops
        # Emissions of a new owner that overtook the last tokens of the one before.
        self._early: list[tuple[str, EngineOutput]] = []
        self._has_asked = False
        self._first_name = state.sequence_id
        self._num_names = 1

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def holders(self) -> set[str]:
        """Replicas that may hold something of it."""
        owners = set() if self.replica is None else {self.replica}
        return owners | self.next_owners.keys() | self.staying

    def lose(self, replica: str) -> bool:
        """A holder is gone. Returns whether the sequence is, too: nobody else may speak for it."""
        self.next_owners.pop(replica, None)
        self.staying.discard(replica)
        if self.replica == replica:
            self.replica = None
        return not self.holders

    def is_called(self, name: str) -> bool:
        """Whether it goes on under this name: it has not ended, nor been renamed."""
        return self.state.sequence_id == name and not self.done

    def rename(self) -> str:
        """Begin anew, with all that was emitted; returns the new name.

        Nothing that is said under the old name is listened to any more, whoever says it.
        """
        self.state.sequence_id = f"{self._first_name}.{self._num_names}"
        self._num_names += 1
        self.state.epoch += 1
        self.replica, self.next_owners, self.staying = None, {}, set()
        self.heard_s, self.failure, self._early = None, None, []
        self._has_asked, self.is_ours = False, True
        return self.state.sequence_id

    def adopt(self, resumable_sequence: ResumableSequence) -> None:
        """Be the sequence that runs there; all it has said is to be heard again."""
        self.state.sequence_id = (
            resumable_sequence.sequence_id
        )  # begun anew, it gets a name of its own
        self.state.epoch = resumable_sequence.epoch
        self.replica = resumable_sequence.replica
        self.is_ours = False

    def take_gap(self) -> ResumableSequence | None:
        """Who goes on without the tokens before, if those died with their owner; told once."""
        if self.replica is not None or not self._early or self._has_asked or self.done:
            return None
        self._has_asked = True
        sender, emission = self._early[0]
        return ResumableSequence(self.state.claim, sender, self.state.sequence_id, emission.epoch)

    @property
    def is_reported(self) -> bool:
        """Whether more is wanted of its tokens than replicas keep: their log-probabilities."""
        sampling = self.state.sampling
        return sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None

    @property
    def is_unknown(self) -> bool:
        """Whether to begin it anew could show the client another answer than it had."""
        return not self.may_begin and not self.state.output_ids

    def fail(self, error: QuadrigaError) -> None:
        """End in an error, unless it already ended."""
        if not self.done:
            self.error = error

    def accept(self, replica: str, emission: EngineOutput) -> int:
        """Take an emission of `replica`; return how many new tokens it brought.

        Duplicates change nothing, nor do emissions of former owners, or of a second one under the
        same epoch. Who says again what is here, and says it differently, has another sequence: that
        is a `failure` of the replica's. A gap that nobody can fill any more ends the choice in an
        `InvariantViolation`. A stop string ends it with `finish` set and no word from the replica.
        """
        if self.done or self.failure is not None:
            return 0
        self.num_heard += 1
        if emission.move is not None:
            self._follow(replica, emission)
            return 0
        if emission.epoch < self.state.epoch:
            return 0
        if emission.epoch == self.state.epoch and self.replica not in (replica, None):
            return 0  # an epoch has one speaker: what others go on from need not be the same
        if emission.first_index > len(self.state.output_ids) and emission.moved_to is None:
            self._note_gap(replica, emission)
            return 0
        num_new = self._apply(replica, emission)
        if num_new and self._early:
            early, self._early = self._early, []
            for sender, late in early:
                num_new += self.accept(sender, late)
        return num_new

    def _follow(self, replica: str, emission: EngineOutput) -> None:
        """Note how far a live migration is; its source's tokens up to then are all here."""
        is_old = emission.epoch < self.state.epoch
        peer = emission.moved_to or ""
        if emission.move == "begun":
            if not is_old:
                self.next_owners[peer] = emission.epoch + 1
                self.staying.add(replica)
            return
        self.staying.discard(replica)
        if emission.move == "done":
            if not is_old and self.replica == replica:
                self.replica = peer
        elif not is_old:
            self.next_owners.pop(peer, None)
            self._take_over(replica, emission.epoch)

    def _take_over(self, replica: str, epoch: int) -> None:
        self.state.epoch = epoch
        self.replica = replica
        self.next_owners = {name: at for name, at in self.next_owners.items() if at > epoch}

    def _note_gap(self, replica: str, emission: EngineOutput) -> None:
        """Keep what overtook an older owner's tokens; within one epoch nothing overtakes."""
        if emission.epoch > self.state.epoch:
            if (replica, emission) not in self._early:
                self._early.append((replica, emission))
            return
        self.error = InvariantViolation(
            f"tokens {len(self.state.output_ids)} to {emission.first_index - 1} of a sequence "
            "never arrived"
        )

    def _apply(self, replica: str, emission: EngineOutput) -> int:
        if emission.moved_to is not None:
            self.next_owners[emission.moved_to] = emission.epoch + 1
            return 0
        if emission.epoch > self.state.epoch:
            self._take_over(replica, emission.epoch)
        if self._contradicts(emission):
            self.failure = ReplicaError(
                f"{replica} goes on from another answer than the client has", code="contradicted"
            )
            return 0
        if emission.prompt_logprobs is not None:
            self.prompt_logprobs = emission.prompt_logprobs
        num_new = self._append(emission)
        if self.finish is None and emission.error is not None:
            if outlives(emission.error):
                self.failure = emission.error
            else:
                self.error = emission.error
        elif self.finish is None and emission.finish is not None:
            self._finish(emission.finish)
        return num_new

    def _contradicts(self, emission: EngineOutput) -> bool:
        """Whether it tells differently what the client has already, or ends before that does."""
        first, count = emission.first_index, len(emission.token_ids)
        again = self.state.output_ids[first : first + count]
        if again != emission.token_ids[: len(again)]:
            return True
        return emission.finish is not None and first + count < len(self.state.output_ids)

    def _append(self, emission: EngineOutput) -> int:
        known = len(self.state.output_ids)
        skip = known - emission.first_index
        if not emission.token_ids or skip >= len(emission.token_ids):
            return 0
        count = len(emission.token_ids)
        # The token that ended the sequence (end token or stop id) counts but is not shown.
        hidden = count - 1 if emission.finish is FinishReason.STOP else count
        for i in range(skip, count):
            token_id = emission.token_ids[i]
            self.state.output_ids.append(token_id)
            if i < len(emission.exit_layers):
                self.state.exit_layers.append(emission.exit_layers[i])
            if emission.logprobs is not None:
                self._note_logprob(emission.logprobs[i])
            if emission.depth:
                self._note_depth(emission.depth)
            piece = self._detokenizer.push(token_id) if i < hidden else ""
            shown, met = self._stops.push(piece)
            self.pieces.append(shown)
            if met:
                self.finish = FinishReason.STOP
                return i + 1 - skip
        return count - skip

    def _note_logprob(self, said: TokenLogprob) -> None:
        if self._shows_logprobs:
            self.logprobs.append(said)
        if self.is_auto and said.logprob is not None:
            self.nll -= said.logprob
            self.num_scored += 1

    def _note_depth(self, depth: int) -> None:
        model = self.state.model
        if self.spans and self.spans[-1][:2] == (model, depth):
            self.spans[-1] = (model, depth, self.spans[-1][2] + 1)
        else:
            self.spans.append((model, depth, 1))

    def _finish(self, reason: FinishReason) -> None:
        shown, met = self._stops.push(self._detokenizer.flush())
        self.tail = shown if met else shown + self._stops.flush()
        self.finish = FinishReason.STOP if met else reason
