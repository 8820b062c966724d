"""`python -m loadgen bench depth-forecast`: layers and work that were forecast, against what came.

Seeded tasks are answered in one batch, with early exits, in this process. While they run, what the
replica's forecast says of each sequence is written down now and then: its remaining tokens, the
layers that each will run, and their product, its work. When all have ended it is compared with
what came, by tenths of what was forecast: a forecast is calibrated where both columns agree.

Beside it stand the two simplest forecasts of the layers: what tokens ran so far on average, and
what the sequence's own tokens did.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.load.task_suite import TaskSuite
from loadgen.model_costs.engine import sequence
from loadgen.options import number, whole
from loadgen.report.experiment import print_line, show
from quadriga.checkpoint.exits import ExitParams
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import ConfigError
from quadriga.policies.ares.expected_depth import ExpectedDepth
from quadriga.scheduling.forecasts import Asking, hold

if TYPE_CHECKING:
    from quadriga.llm import LLM

TENTHS = 10
LEAST_LEFT = 4
"""Tokens still to come, where a forecast is judged: fewer are chance."""


@dataclass(frozen=True, slots=True)
class Said:
    """What was forecast of one sequence at one moment, and what came.

    Attributes:
        layers, of_all, of_own: A token's, as forecast; by the mean of all tokens so far, and of the
            sequence's own.
        tokens: Still to come, as forecast; None where nothing was predicted.
        came_layers, came_tokens: What came.
    """

    layers: float
    of_all: float
    of_own: float
    tokens: float | None
    came_layers: float
    came_tokens: int


@dataclass(frozen=True, slots=True)
class _Note:
    """A forecast whose sequence still runs."""

    state: SequenceState
    produced: int
    layers: float
    of_all: float
    tokens: float | None

    def judged(self) -> Said | None:
        """What came of it; None where hardly anything did."""
        exits = self.state.exit_layers
        came = exits[self.produced :]
        if len(came) < LEAST_LEFT:
            return None
        own = exits[1 : self.produced]
        return Said(
            self.layers,
            self.of_all,
            sum(own) / len(own) if own else self.of_all,
            self.tokens,
            sum(came) / len(came),
            len(came),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", default="quadriga-l", help="bundled id or folder, with exits")
    parser.add_argument("--prompts", type=whole(20), default=400, help="tasks to answer")
    parser.add_argument("--slots", type=whole(1), default=32, help="sequences at once")
    parser.add_argument("--every", type=whole(1), default=20, help="passes between two looks")
    parser.add_argument("--max-tokens", type=whole(8), default=200, help="of an answer")
    parser.add_argument("--threshold", type=number(0, 1), help="default: the checkpoint's")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the tasks")


def run(args: argparse.Namespace) -> int:
    """Measure; prints two tables and one JSON line."""
    from quadriga.llm import LLM

    llm = LLM(args.model, engine={"compile": "wait"}, decode={"max_slots": args.slots})
    spec = llm.runner.spec
    if len(llm.runner.segment_ends) < 2:
        raise ConfigError(f"model: {args.model} has no early exits; nothing is to be forecast")
    threshold = spec.exits.threshold if args.threshold is None else args.threshold
    suite = TaskSuite.make(spec.checkpoint, args.prompts, seed=args.seed)
    states = [
        sequence(
            f"s{index}",
            prompt.token_ids,
            SamplingParams(args.max_tokens, temperature=0.0),
            exits=ExitParams(threshold, "bounded"),
        )
        for index, prompt in enumerate(suite.prompts)
    ]
    said = forecasts_of(llm, states, every=args.every)
    llm.close()
    if len(said) < TENTHS:
        raise ConfigError(f"prompts: {len(said)} forecasts came to be judged; ask for more")
    of_layers = tenths(said, lambda s: s.layers, lambda s: s.came_layers)
    predicted = [s for s in said if s.tokens is not None]
    of_work = tenths(
        predicted, lambda s: s.layers * (s.tokens or 0.0), lambda s: s.came_layers * s.came_tokens
    )
    of_depth = tenths(
        said, lambda s: s.layers * s.came_tokens, lambda s: s.came_layers * s.came_tokens
    )
    tables = {
        "layers a token": of_layers,
        "work, by the tokens that came": of_depth,
        "work, by the tokens that were forecast": of_work,
    }
    for title, parts in tables.items():
        show(
            parts,
            {
                "forecast": lambda p: f"{p[0]:.2f}",
                "came": lambda p: f"{p[1]:.2f}",
                "came/forecast": lambda p: f"{p[1] / p[0]:.2f}",
            },
            title=f"{title}, by tenths of the forecast",
        )
    print_line(
        "depth-forecast",
        headline={
            "worst_tenth_of_layers": worst(of_layers),
            "worst_tenth_of_work_by_tokens_that_came": worst(of_depth),
            "worst_tenth_of_work": worst(of_work) if of_work else None,
            "error_layers": mean_error(said, lambda s: s.layers),
            "error_layers_by_mean_of_all": mean_error(said, lambda s: s.of_all),
            "error_layers_by_own_past": mean_error(said, lambda s: s.of_own),
        },
        model=args.model,
        threshold=threshold,
        forecasts=len(said),
        layers=[[round(a, 3), round(b, 3)] for a, b in of_layers],
        work=[[round(a, 1), round(b, 1)] for a, b in of_work],
        early=round(share_early(states, spec.depth), 3),
    )
    return 0


def forecasts_of(llm: LLM, states: Sequence[SequenceState], *, every: int) -> list[Said]:
    """Answer everything, and return what was forecast on the way with what came."""
    from quadriga.replica.forecasting import load_lengths

    loop, spec = llm.loop.decode, llm.runner.spec
    lengths = load_lengths(llm.runner, spec)
    asking = Asking(lengths, every) if lengths is not None else None
    depths, notes = ExpectedDepth(spec.depth), list[_Note]()
    num_tokens, num_layers = 0, 0
    for index, outputs in enumerate(llm.loop.run(states)):
        decoded = [o for o in outputs if o.first_index and o.token_ids]
        count = sum(len(o.exit_layers) for o in decoded)
        num_tokens += count
        num_layers += sum(sum(o.exit_layers) for o in decoded)
        if asking is not None and decoded:
            asking.stepped(count, len(decoded), loop.num_running)
        if index % every or not num_tokens:
            continue
        running = loop.running
        held = hold(running, (), num_running=len(running), depths=depths)
        for state, share, mean in zip(running, held.share, held.mean, strict=True):
            notes.append(
                _Note(
                    state,
                    len(state.output_ids),
                    share * spec.depth,
                    num_layers / num_tokens,
                    mean if state.prediction is not None else None,
                )
            )
    # The first tenth is said before much was seen; it counts all the same.
    return [said for note in notes if (said := note.judged()) is not None]


def tenths(
    said: Sequence[Said], forecast: Callable[[Said], float], came: Callable[[Said], float]
) -> list[tuple[float, float]]:
    """Means of what was forecast and of what came, by tenths of the forecasts, ascending."""
    ordered = sorted(said, key=forecast)
    parts = []
    for tenth in range(TENTHS if len(said) >= TENTHS else 0):
        part = ordered[tenth * len(said) // TENTHS : (tenth + 1) * len(said) // TENTHS]
        parts.append((sum(map(forecast, part)) / len(part), sum(map(came, part)) / len(part)))
    return parts


def worst(parts: Sequence[tuple[float, float]]) -> float:
    """The ratio of what came to what was forecast that is furthest from 1."""
    ratios = [b / a for a, b in parts]
    far = [max(ratio, 1.0 / max(ratio, 1e-9)) for ratio in ratios]
    return round(ratios[far.index(max(far))], 3)


def mean_error(said: Sequence[Said], forecast: Callable[[Said], float]) -> float:
    """Layers a token by which a forecast was wrong, on average."""
    return round(sum(abs(forecast(s) - s.came_layers) for s in said) / len(said), 3)


def share_early(states: Sequence[SequenceState], depth: int) -> float:
    """Share of the tokens behind the prompts' own that ran fewer than `depth` layers."""
    layers = [layer for s in states for layer in s.exit_layers[1:]]
    return sum(layer < depth for layer in layers) / max(1, len(layers))
