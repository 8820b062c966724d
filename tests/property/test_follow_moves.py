"""An ingress follows a sequence through hand-offs, moves, failed moves and deaths, in any order.

The cluster is played: replicas say what the protocol makes them say, each into a mailbox of its
own; the ingress polls those it believes to hold something of the sequence, in any order, may lose
replies, and must hear everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SamplingParams, SequenceState
from quadriga.text import StopMatcher
from serve_app.request.sequence_request import SequenceRequest

LENGTH = 24
NAMES = ("a", "b", "c")


class NoText:
    """A detokeniser of tokens without text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def sequence() -> SequenceRequest:
    state = SequenceState("s", "r", "m", [1], SamplingParams(max_tokens=LENGTH), "i", 0.0, 1e18)
    made = SequenceRequest(0, state, NoText(), StopMatcher(()))
    made.replica = "prefill"
    return made


@dataclass
class Cluster:
    """One sequence and who owns it; `said` are the mailboxes, oldest first.

    Attributes:
        owner, epoch, count: Of the sequence now, and its tokens.
        read: How much of each mailbox is acknowledged.
        dead: Their mailboxes are gone.
        source, at_commit: Of a commit that was not answered.
    """

    owner: str = "prefill"
    epoch: int = 0
    count: int = 0
    said: dict[str, list[EngineOutput]] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    source: str = ""
    at_commit: int = 0

    def say(self, name: str, emission: EngineOutput) -> None:
        self.said.setdefault(name, []).append(emission)

    def speak(self, tokens: int) -> None:
        tokens = min(tokens, LENGTH - self.count)
        if tokens <= 0:
            return
        first, self.count = self.count, self.count + tokens
        finish = FinishReason.LENGTH if self.count == LENGTH else None
        ids = list(range(first, self.count))
        self.say(self.owner, EngineOutput("s", self.epoch, first, ids, [8] * tokens, finish=finish))

    def hand_over(self, peer: str) -> None:
        """After prefill."""
        self.say(self.owner, EngineOutput("s", self.epoch, self.count, moved_to=peer))
        self.speak(1)
        self.owner, self.epoch = peer, self.epoch + 1

    def begin(self, peer: str) -> None:
        self.say(self.owner, EngineOutput("s", self.epoch, self.count, moved_to=peer, move="begun"))

    def commit(self, peer: str, *, source_dies: bool) -> None:
        source, epoch = self.owner, self.epoch
        pending = self.said.get(source, [])[self.read.get(source, 0) :]
        self.owner, self.epoch = peer, epoch + 1
        for e in pending:
            if e.token_ids:
                self.say(
                    peer, EngineOutput("s", self.epoch, e.first_index, e.token_ids, e.exit_layers)
                )
        if source_dies:
            self.dead.add(source)
        else:
            self.say(source, EngineOutput("s", epoch, self.count, moved_to=peer, move="done"))

    def fail(self, peer: str) -> None:
        """The destination refused, or was cancelled there."""
        self.say(
            self.owner, EngineOutput("s", self.epoch, self.count, moved_to=peer, move="failed")
        )

    def take_over(self, peer: str, tokens: int) -> None:
        """The destination takes over and speaks; its answer does not come."""
        self.source, self.at_commit = self.owner, self.count
        self.owner, self.epoch = peer, self.epoch + 1
        self.speak(min(tokens, LENGTH - self.count - 1))

    def die(self, peer: str) -> None:
        """It dies, and the source goes on where it was."""
        self.dead.add(peer)
        self.owner, self.epoch, self.count = self.source, self.epoch + 1, self.at_commit
        self.fail(peer)


class Ingress:
    """Polls whom it must."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sequence = sequence()
        self.acks: dict[str, int] = {}
        self.told_dead: set[str] = set()

    def poll(self, name: str, *, is_lost: bool) -> None:
        """Fetch a mailbox from its acknowledged entry on; a lost reply is fetched again."""
        if self.sequence.done or name not in self.sequence.owners:
            self.acks.pop(name, None)  # the line is dropped, and with it what was acknowledged
            return
        if name in self.cluster.dead:
            if name not in self.told_dead:
                self.told_dead.add(name)
                assert not self.sequence.lose(name), "another owner still has it"
            return
        ack = self.acks.get(name, 0)
        self.cluster.read[name] = max(self.cluster.read.get(name, 0), ack)
        entries = self.cluster.said.get(name, [])[ack:]
        if is_lost:
            return
        for emission in entries:
            self.sequence.accept(name, emission)
        self.acks[name] = ack + len(entries)

    def catch_up(self) -> None:
        """Poll until nothing new can be heard."""
        for _ in range(2 * len(NAMES)):
            for name in ("prefill", *NAMES):
                self.poll(name, is_lost=False)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("speak"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("move"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("fail"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("die"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("poll"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("poll"), st.integers(0, 3), st.just(False)),
    ),
    max_size=60,
)


@settings(max_examples=400)
@given(steps)
def test_every_token_arrives_once_whoever_owned_it(actions: list[tuple[str, int, bool]]) -> None:
    cluster = Cluster()
    ingress = Ingress(cluster)
    names = ("prefill", *NAMES)
    cluster.hand_over("a")
    num_deaths = 0
    for action, number, flag in actions:
        others = [n for n in NAMES if n != cluster.owner and n not in cluster.dead]
        peer = others[number % len(others)] if others else None
        if action == "speak":
            cluster.speak(number)
        elif action == "poll":
            ingress.poll(names[number], is_lost=flag)
        elif peer is None or cluster.count >= LENGTH - 1:
            continue
        elif action == "move":
            cluster.begin(peer)
            dies = flag and not num_deaths
            num_deaths += dies
            if dies:  # what it announced was heard before: rounds of copying lie between
                ingress.catch_up()
            elif number > 1:
                ingress.poll(cluster.owner, is_lost=False)
            cluster.commit(peer, source_dies=dies)
        elif action == "fail":
            cluster.begin(peer)
            cluster.fail(peer)
        elif action == "die" and not num_deaths:
            num_deaths += 1
            cluster.begin(peer)
            ingress.catch_up()
            cluster.speak(number % 2)
            cluster.take_over(peer, number)
            if flag:  # its words are heard before its death is
                ingress.poll(peer, is_lost=False)
                ingress.poll(cluster.source, is_lost=False)
            cluster.die(peer)
    cluster.speak(LENGTH)
    ingress.catch_up()
    followed = ingress.sequence
    assert followed.error is None
    assert followed.finish is FinishReason.LENGTH
    assert followed.state.output_ids == list(range(LENGTH))
    assert followed.state.epoch == cluster.epoch
