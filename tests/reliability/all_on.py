"""`python -m loadgen soak --all-on`: every feature in use, with rescheduling on and off in turns.

Two loads run side by side. Requests to one model by name ask for the whole model's tokens, drafted
by an exit where that is faster; they must be those of the undisturbed run, whatever is moved,
resized, paused or killed meanwhile. Requests that leave the choice of the model to HELIOS let
tokens leave early, with a quality budget and gaps that cannot be kept, so that it is spent; their
thresholds are low and high in turns, so that HELIOS changes depths; and some ask for an answer of
a given form. Prompts begin alike.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.load.workload import RequestSpec
from loadgen.runner import now_s
from loadgen.wire.client_http import HttpClient
from quadriga.core.request import AUTO_MODEL
from quadriga.observability.metrics import parse_exposition
from tests.reliability.cluster.agent_client import AgentError
from tests.reliability.cluster.control import ClusterControl

EXACT_MODEL, FREE_MODEL = "quadriga-l", AUTO_MODEL
POOLS = """\
pools:
  - {model: quadriga-s, prefill_replicas: 1, decode_replicas: 1}
  - {model: quadriga-l, prefill_replicas: 1, decode_replicas: 2}
"""
"""The first is HELIOS's, and changes its model and depth; the second keeps them."""
SETTINGS = (
    "helios.enabled=true",
    # Looked at again after few requests, so that depths change within minutes.
    "helios.reassess_requests=20",
    "helios.profile_requests=2",
    "helios.breach_window_tokens=40",
    "helios.min_coverage=0.3",
    "helios.max_changed_share=1",
    "decode.max_slots=8",
    "engine.compile=wait",
    "engine.max_model_len=512",
    "engine.resources_cpus=0.05",
    "lifecycle.heartbeat_interval_s=0.5",
)
WEIGHTS = {"migrate": 16.0, "kill": 1.0}
"""Harms; depths are HELIOS's to change here."""
FREE_SHARE = 0.4
"""Of the clients."""
PREFIX = "Count from 3 to 40.\nSort: 7 3 9 1 4 8 2 6\n" * 3
QUESTIONS = ("Sort: 7 3 9 1 4 8 2 6\n", "Count from 3 to 40.\n", "Reverse: 5 6 7\n")
POLICIES = ("lossless", "off")
FORM = {"regex": "[a-z]{3,8}( [a-z]{3,8})*"}
EASY, HARD = 0.3, 0.999
"""Thresholds. With the first HELIOS loads a model in part, with the second most tokens are below
their threshold there, and it loads the rest."""
EASY_TURNS, HARD_TURNS = 2, 1
BUDGET: dict[str, Any] = {
    "exit_policy": "bounded",
    "exit_threshold": HARD,
    "quality_budget": 0.3,
    "sla_tbt_ms": 0.01,
}


def exact_streams(count: int, *, max_tokens: int, seed: int) -> list[RequestSpec]:
    """Greedy and seeded in turn, all of whose tokens are the whole model's."""
    rng = random.Random(seed)
    return [
        RequestSpec(
            index=index,
            arrival_s=0.0,
            prompt=PREFIX * (index % 3 == 0) + QUESTIONS[index % len(QUESTIONS)],
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0 if index % 2 == 0 else 0.9,
            seed=rng.randrange(1 << 30),
            extra={"exit_policy": POLICIES[index // 2 % len(POLICIES)]},
        )
        for index in range(count)
    ]


def free_streams(
    count: int, *, max_tokens: int, seed: int, threshold: float = HARD
) -> list[RequestSpec]:
    """Tokens leave early and below their thresholds; every fourth answer has a form."""
    asked = BUDGET | {"exit_threshold": threshold}
    rng = random.Random(seed)
    return [
        RequestSpec(
            index=index,
            arrival_s=0.0,
            prompt=QUESTIONS[index % len(QUESTIONS)],
            max_tokens=max_tokens,
            ignore_eos=index % 4 != 3,
            temperature=0.9,
            seed=rng.randrange(1 << 30),
            extra=asked | ({"structured_outputs": FORM} if index % 4 == 3 else {}),
        )
        for index in range(count)
    ]


@dataclass(slots=True)
class ReschedulingTurns:
    """Rescheduling on and off in turns, and the tokens that came in each.

    Attributes:
        tokens, seconds: By whether it was on.
    """

    tokens: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    seconds: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    async def run(
        self, control: ClusterControl, num_tokens: Callable[[], int], turn_s: float
    ) -> None:
        """Take turns, for ever; afterwards it is on."""
        is_on = False
        try:
            while True:
                is_on = not is_on
                if not await _switched(control, is_on):
                    is_on = not is_on  # the scheduler died meanwhile; its successor is asked
                    await asyncio.sleep(1.0)
                    continue
                before, began_s = num_tokens(), now_s()
                try:
                    await asyncio.sleep(turn_s)
                finally:
                    self.tokens[is_on] += num_tokens() - before
                    self.seconds[is_on] += now_s() - began_s
        finally:
            await _switched(control, True)

    @property
    def ratio(self) -> float | None:
        """Tokens/s with rescheduling over those without it; None before both had a turn."""
        if not all(self.tokens.values()):
            return None
        on, off = (self.tokens[way] / self.seconds[way] for way in (True, False))
        return round(on / off, 3)


async def take_turns(
    ask: Callable[[Sequence[RequestSpec]], None],
    easy: Sequence[RequestSpec],
    hard: Sequence[RequestSpec],
    turn_s: float,
) -> None:
    """Ask for low thresholds and for high ones in turns, for ever."""
    while True:
        for specs, num_turns in ((easy, EASY_TURNS), (hard, HARD_TURNS)):
            ask(specs)
            await asyncio.sleep(num_turns * turn_s)


async def _switched(control: ClusterControl, is_on: bool) -> bool:
    try:
        await control.agent.call("reschedule", is_on)
    except (AgentError, TimeoutError):
        return False
    return True


async def counted(http: HttpClient) -> dict[str, float]:
    """What the service counted so far: moves, resizes, and tokens below their thresholds.

    Raises: ConnectionError.
    """
    _, page = await http.fetch_text("/metrics")
    values = parse_exposition(page)
    return {
        "moves": _total(values, "quadriga_migrations_total", 'outcome="moved"'),
        "resizes": _total(values, "quadriga_resizes_total", 'outcome="resized"'),
        "lowered": _total(values, "quadriga_lowered_tokens_total"),
    }


def _total(values: Mapping[str, float], name: str, label: str = "") -> float:
    return sum(v for key, v in values.items() if key.split("{")[0] == name and label in key)
