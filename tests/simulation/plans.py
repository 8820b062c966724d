"""What a run does, decided before it begins: the cluster, its requests, its faults.

A plan is a value: it is kept as JSON, and shrunk by leaving out requests and faults. The seed of a
plan decides only how long things take; a seed alone names a plan only until the code changes.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quadriga.checkpoint.folder import read_checkpoint
from tests.fake_runner import next_token

APP = "sim"
MODEL = "quadriga-s"
REQUESTS_WITHIN_S = 5.0
TIMEOUT_S = 240.0
"""Of most requests; no fault lasts as long."""
SHORT_TIMEOUTS_S = (0.3, 2.0, 6.0)
MEMORY_OF_TWO_MODELS = 90 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        at_s: When it is sent, from the time on at which the cluster is up.
        leaves_s: When the client goes away again; None: it stays.
        timeout_s: The client's deadline.
        seed: Of its sampling; None: it is greedy.
    """

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    leaves_s: float | None = None
    timeout_s: float = TIMEOUT_S
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at_s: From the time on at which the cluster is up.
        seed: Decides whom it strikes, and how long.
    """

    at_s: float
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.at_s:.3f} {self.kind} ({self.seed})"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: all that is decided before it begins.

    Attributes:
        settings: Of the deployment.
        pace_s: Seconds a step of an engine takes.
        counts: All processes push their metrics, and the page is read every second.
        idle_s: Behind the requests nobody asks for so long; then they are sent once more.
    """

    seed: int
    settings: dict[str, Any]
    pace_s: float
    num_ingresses: int
    requests: tuple[Asked, ...]
    faults: tuple[Fault, ...]
    counts: bool = False
    idle_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        values = json.loads(text)
        requests = (Asked(**{**r, "prompt": tuple(r["prompt"])}) for r in values.pop("requests"))
        faults = (Fault(**f) for f in values.pop("faults"))
        return cls(requests=tuple(requests), faults=tuple(faults), **values)


def answer_token(token_ids: Sequence[int], seed: int | None) -> int:
    """The model's next token."""
    return next_token(token_ids if seed is None else [*token_ids, -1 - seed])


def expected(asked: Asked) -> list[int]:
    """What the model answers."""
    tokens = list(asked.prompt)
    for _ in range(asked.max_tokens):
        tokens.append(answer_token(tokens, asked.seed))
    return tokens[len(asked.prompt) :]


KINDS = (
    "kill prefill",
    "kill decode",
    "kill decode",
    "kill ingress",
    "kill ingress",
    "kill scheduler",
    "kill controller",
    "stop prefill",
    "stop decode",
    "stop ingress",
    "stop scheduler",
    "stop controller",
    "cut",
    "half-cut",
    "slow any",
    "lose any",
    "skew any",
    "drift any",
    "corrupt",
    "break",
    "fill decode",
    "fill prefill",
    "term decode",
    "term prefill",
    "drain node",
    "configure",
)
METHODS = (
    "admit",
    "place_now",
    "submit",
    "reserve",
    "commit",
    "abort",
    "cancel",
    "poll",
    "finished",
    "report",
    "adopt",
    "find_resumable",
    "claimed",
    "holding",
    "renew",
    "migrate",
    "heartbeat",
    "ingress_heartbeat",
    "replica_died",
    "configure",
    "drain",
    "hand_over",
    "directory",
)
COUNTS_SHARE = 0.1
MOVE_SHARE = 0.25
"""Of the faults that are orders to move what runs, at random."""

CHOOSES_SHARE = 0.1
"""Of the runs: HELIOS chooses the model. Requests come for so much longer, and controllers die."""
CHOOSES_TIMES, NUM_DEATHS = 4.0, 3
CHOOSES: dict[str, Any] = {
    "enabled": True,
    "slo": "response",
    "profile_requests": 1,
    "reassess_requests": 3,
    "profile_share": 1.0,
    "dwell_loads": 0.0,
    "margin": 0.0,
}
"""Looks again after three requests, so that models are switched within seconds."""

SHORT = ((1, 3, 6, 12, 24), (0.05, 0.15, 0.4))
LONG = ((1, 5, 20, 60, 120), (0.01, 0.03, 0.1))
"""Tokens of an answer, and seconds a step takes: one of each is chosen."""


def plan(seed: int, *, num_requests: int = 30, num_faults: int = 8) -> Plan:
    """Decide a run."""
    rng = random.Random(f"plan {seed}")
    # Most answers are short on slow engines: as many steps of the protocols in less of the model's.
    lengths, paces = rng.choice([SHORT, SHORT, SHORT, LONG])
    requests = sorted(
        (_request(rng, lengths) for _ in range(num_requests)), key=lambda r: (r.at_s, r.prompt)
    )
    faults = [
        Fault(rng.uniform(0.0, REQUESTS_WITHIN_S + 2.0), _kind(rng), rng.getrandbits(32))
        for _ in range(num_faults)
    ]
    often_s = rng.choice([0.25, 1.0, 1.0, 1.0])
    settings: dict[str, Any] = {
        "name": APP,
        "model": MODEL,
        "prefill_replicas": rng.randint(1, 2),
        "decode_replicas": rng.randint(2, 3),
        "engine": {
            "max_model_len": 256,
            "kv_memory_bytes": kv_bytes_of_a_token() * rng.choice([256, 512, 1024, 8192]),
        },
        "scheduler": {
            "snapshot_interval_s": often_s,
            "ares": {"interval_s": often_s},
            "max_wait_s": rng.choice([2.0, 30.0]),
        },
    }
    chooses = random.Random(f"chooses {seed}")
    if chooses.random() < CHOOSES_SHARE:
        settings["helios"] = CHOOSES
        settings["engine"]["kv_memory_bytes"] = MEMORY_OF_TWO_MODELS
        requests = [replace(r, at_s=CHOOSES_TIMES * r.at_s) for r in requests]
        until_s = CHOOSES_TIMES * REQUESTS_WITHIN_S
        for _ in range(NUM_DEATHS if num_faults else 0):
            at_s = chooses.uniform(0.0, until_s)
            faults.append(Fault(at_s, "kill controller", chooses.getrandbits(32)))
    return Plan(
        seed,
        settings,
        rng.choice(paces),
        rng.randint(1, 2),
        tuple(requests),
        tuple(sorted(faults, key=lambda f: f.at_s)),
        rng.random() < COUNTS_SHARE,
    )


def idle(one: Plan, idle_s: float) -> Plan:
    """A plan without faults whose requests come twice, with a long silence in between."""
    return replace(one, faults=(), counts=True, idle_s=idle_s)


def _request(rng: random.Random, lengths: Sequence[int]) -> Asked:
    length = rng.choice([3, 10, 40, 100])
    return Asked(
        rng.uniform(0.0, REQUESTS_WITHIN_S),
        _prompt(rng, length),
        rng.choice(lengths),
        rng.choice([0, 0, 0, 5]),
        rng.uniform(0.0, 3.0) if rng.random() < 0.1 else None,
        rng.choice(SHORT_TIMEOUTS_S) if rng.random() < 0.1 else TIMEOUT_S,
        rng.getrandbits(20) if rng.random() < 0.5 else None,
    )


def _prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    """Most begin as others do, as far as one of a few beginnings goes: KV is shared."""
    begin = random.Random(rng.randrange(3)).choices(
        range(3, 90), k=rng.choice([0, length // 2, 90])
    )
    rest = [rng.randrange(3, 90) for _ in range(length)]
    return tuple([*begin, *rest][:length])


def _kind(rng: random.Random) -> str:
    """A quarter moves sequences; of the others half strike one method's messages, half processes
    and links."""
    if rng.random() < MOVE_SHARE:
        return "move"
    if rng.random() < 0.5:
        return rng.choice(KINDS)
    return f"{rng.choice(['unanswered', 'late'])} {rng.choice(METHODS)}"


@functools.cache
def kv_bytes_of_a_token() -> int:
    """Of the model, in float32."""
    checkpoint = read_checkpoint(MODEL)
    return checkpoint.kv_bytes_per_token(checkpoint.num_layers, 4)
