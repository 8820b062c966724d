"""`python -m loadgen soak --all-on`: every feature in use, with rescheduling on and off in turns.

Two loads run side by side. Requests to one model by name ask for the whole model's tokens, drafted
by an exit where that is faster; they must be those of the undisturbed run, whatever is moved,
resized, paused or killed meanwhile. Requests that leave the choice of the model to HELIOS let
tokens leave early, with a quality budget and gaps that cannot be kept, so that it is spent; their
thresholds are low and high in turns, so that HELIOS changes depths; some ask for an answer of a
given form, and some are strict: none of their tokens may be below its threshold. Prompts begin
alike.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.comparison.pairs import PairedRatio, paired_ratio
from loadgen.load.workload import RequestSpec
from loadgen.wire.capture import now_s
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
    "helios.profile_share=0.3",
    "helios.profile_requests=2",
    "helios.breach_window_tokens=40",
    "helios.min_coverage=0.3",
    "helios.max_changed_share=1",
    "helios.scaling.enabled=true",
    "helios.scaling.max_replicas=2",
    "helios.scaling.utilisation=0.3",
    "helios.scaling.down_after_s=20",
    "decode.max_slots=8",
    "engine.compile=wait",
    "engine.max_model_len=512",
    "engine.resources_cpus=0.05",
    "lifecycle.heartbeat_interval_s=0.5",
)
WEIGHTS = {"migrate": 16.0, "pause": 4.0, "kill": 1.0}
"""Harms; depths are HELIOS's to change here, and memory holds all that runs."""
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
LOOK_EVERY_S = 1.0
FEWEST_TOKENS = 0.5
"""That count for a turn without any, so that its pair has a ratio."""
COUNTED = {
    "moves": ("quadriga_migrations_total", 'outcome="moved"'),
    "resizes": ("quadriga_resizes_total", 'outcome="resized"'),
    "scaled": ("quadriga_helios_events_total", 'kind="scaled"'),
    "lowered": ("quadriga_lowered_tokens_total",),
    "pauses": ("quadriga_pauses_total",),
}
"""Of the last line, and by which metric it is counted."""
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
            max_tokens=max_tokens,
            ignore_eos=True,
            prompt=PREFIX * (index % 3 == 0) + QUESTIONS[index % len(QUESTIONS)],
            temperature=0.0 if index % 2 == 0 else 0.9,
            seed=rng.randrange(1 << 30),
            extra={"exit_policy": POLICIES[index // 2 % len(POLICIES)]},
        )
        for index in range(count)
    ]


def free_streams(
    count: int, *, max_tokens: int, seed: int, threshold: float = HARD
) -> list[RequestSpec]:
    """Tokens leave early and below their thresholds; every fourth answer has a form, and every
    fourth is strict."""
    asked = BUDGET | {"exit_threshold": threshold}
    strict = {"exit_policy": "strict", "exit_threshold": threshold}
    rng = random.Random(seed)
    return [
        RequestSpec(
            index=index,
            arrival_s=0.0,
            max_tokens=max_tokens,
            ignore_eos=index % 4 != 3,
            prompt=QUESTIONS[index % len(QUESTIONS)],
            temperature=0.9,
            seed=rng.randrange(1 << 30),
            extra=(asked, strict, asked, asked | {"structured_outputs": FORM})[index % 4],
        )
        for index in range(count)
    ]


Span = tuple[float, float]


@dataclass(slots=True)
class ReschedulingTurns:
    """ARES on and off in turns.

    A turn in which the scheduler dies, or is configured anew, is taken again.

    Attributes:
        pairs: A turn with it and one without it, side by side: when each began and ended.
    """

    pairs: list[tuple[Span, Span]] = field(default_factory=list)

    async def run(self, control: ClusterControl, turn_s: float) -> None:
        """Take turns, for ever, each way first in every second pair; afterwards it is on."""
        is_first = True
        try:
            while True:
                spans = {}
                for is_on in (is_first, not is_first):
                    spans[is_on] = await self._turn(control, is_on, turn_s)
                self.pairs.append((spans[True], spans[False]))
                is_first = not is_first
        finally:
            await _switched(control, True)

    async def _turn(self, control: ClusterControl, is_on: bool, turn_s: float) -> Span:
        """A turn that one scheduler lived through."""
        while True:
            scheduler = control.pids("scheduler")
            if await _switched(control, is_on) is not None:
                began_s = now_s()
                while (took_s := now_s() - began_s) < turn_s:
                    await asyncio.sleep(min(LOOK_EVERY_S, turn_s - took_s))
                    if control.pids("scheduler") != scheduler:
                        break
                else:
                    if await _switched(control, is_on) is is_on:
                        return began_s, began_s + took_s
            await asyncio.sleep(min(LOOK_EVERY_S, turn_s))

    def ratio(self, tokens_between: Callable[[float, float], int]) -> PairedRatio | None:
        """Tokens/s with ARES over those without it, counted when they came; None: no pair."""

        def rate(span: Span) -> float:
            return max(tokens_between(*span), FEWEST_TOKENS) / (span[1] - span[0])

        return paired_ratio([(rate(on), rate(off)) for on, off in self.pairs])


async def take_turns(
    ask: Callable[[Sequence[RequestSpec]], None],
    easy: Sequence[RequestSpec],
    hard: Sequence[RequestSpec],
    turn_s: float,
) -> None:
    """Ask for high thresholds, which short runs need too, and for low ones, for ever."""
    while True:
        for specs, num_turns in ((hard, HARD_TURNS), (easy, EASY_TURNS)):
            ask(specs)
            await asyncio.sleep(num_turns * turn_s)


async def _switched(control: ClusterControl, is_on: bool) -> bool | None:
    """Have the scheduler place and move by forecast, or place by least work and move nothing.

    Returns:
        Which it did until now; None where it did not answer.
    """
    try:
        return bool(await control.agent.call("reschedule", is_on))
    except (AgentError, TimeoutError):
        return None


async def counted(http: HttpClient) -> dict[str, float]:
    """What the service counted so far: moves, resizes, pauses, and tokens below their thresholds.
    Moves and pauses that were done to it are among them.

    Raises: ConnectionError.
    """
    _, page = await http.fetch_text("/metrics")
    values = parse_exposition(page)
    return {name: _total(values, *series) for name, series in COUNTED.items()}


def _total(values: Mapping[str, float], name: str, label: str = "") -> float:
    return sum(v for key, v in values.items() if key.split("{")[0] == name and label in key)
