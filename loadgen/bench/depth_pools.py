"""`python -m loadgen bench depth-pools`: shallow and deep sequences in one batch, and each alone.

Two replicas have the same number of sequences: half of them let tokens leave early, the others run
all layers. Mixed, each replica has half of either; apart, one has those and the other these. Each
of the three batches has an engine of its own in this process, with its own plan for the exits, and
they take turns. A token's time is the processor's, from a sequence's second token to its last, on
average over all sequences. Beside it stands what the scheduler's model says of the same sequences,
by the layers that they ran.
"""

from __future__ import annotations

import argparse
import math
import time
from statistics import mean, median
from typing import TYPE_CHECKING

import numpy as np

from loadgen.load.task_suite import TaskSuite
from loadgen.options import number, whole
from loadgen.report.experiment import print_line, show
from quadriga.checkpoint.exits import NEVER, ExitParams
from quadriga.clock import SystemClock
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.errors import ConfigError
from quadriga.policies.ares.depth_pools import StepModel
from quadriga.scheduling.calibration import measure_shape

if TYPE_CHECKING:
    from quadriga.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", default="quadriga-l", help="bundled id or folder, with exits")
    parser.add_argument("--slots", type=whole(2), default=16, help="sequences of a replica")
    parser.add_argument("--rounds", type=whole(1), default=7, help="turns of mixed and apart")
    parser.add_argument(
        "--warm-up", type=whole(1), default=4, help="turns before them: what exits bring is learned"
    )
    parser.add_argument("--max-tokens", type=whole(8), default=100, help="of an answer")
    parser.add_argument("--threshold", type=number(0, 1), help="default: the checkpoint's")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the tasks")


def run(args: argparse.Namespace) -> int:
    """Measure; prints a table and one JSON line."""
    from quadriga.llm import LLM

    llms = {
        name: LLM(
            args.model,
            engine={"compile": "wait", "threads": 1},
            decode={"max_slots": args.slots},
            exits={"mode": "bounded"},
        )
        for name in ("mixed", "shallow", "deep")
    }
    llm = llms["shallow"]
    spec = llm.runner.spec
    ends = llm.runner.segment_ends
    if len(ends) < 2:
        raise ConfigError(f"model: {args.model} has no early exits; all its sequences are deep")
    shape = measure_shape(llm.runner, SystemClock(), max_rows=args.slots)
    threshold = spec.exits.threshold if args.threshold is None else args.threshold
    suite = TaskSuite.make(spec.checkpoint, 2 * args.slots, seed=args.seed)
    early, whole_depth = ExitParams(threshold, "bounded"), ExitParams(NEVER, "off")

    def states(num_early: int, num_deep: int) -> list[SequenceState]:
        asked = [early] * num_early + [whole_depth] * num_deep
        return [
            SequenceState(
                f"s{index}",
                f"s{index}",
                spec.checkpoint.id,
                prompt.token_ids,
                SamplingParams(args.max_tokens, temperature=0.0, ignore_eos=True),
                "",
                0.0,
                math.inf,
                exits,
            )
            for index, (prompt, exits) in enumerate(zip(suite.prompts, asked, strict=False))
        ]

    half = args.slots // 2
    batches = {"mixed": (half, half), "shallow": (2 * half, 0), "deep": (0, 2 * half)}
    times: dict[str, list[float]] = {name: [] for name in batches}
    shares: list[float] = []
    fronts: list[float] = []
    for turn in range(-args.warm_up, args.rounds):
        for name, counts in batches.items():
            batch = states(*counts)
            token_s = _token_s(llms[name], batch)
            if turn >= 0:
                times[name].append(token_s)
            if name == "shallow":
                shares = [mean(s.exit_layers[1:]) / spec.depth for s in batch]
                fronts.append(llm.loop.decode.front_share)
    front_share = min(fronts)
    for one in llms.values():
        one.close()
    apart = [(a + b) / 2.0 for a, b in zip(times["shallow"], times["deep"], strict=True)]
    gain = median(1.0 - a / m for a, m in zip(apart, times["mixed"], strict=True))
    model = StepModel(front_share, shape.base_s, shape.per_sequence_s, shape.per_token_s)
    modelled = _modelled(model, shares, args.slots, mean(len(p.token_ids) for p in suite.prompts))
    rows = [{"batch": name, "ms": 1e3 * median(found)} for name, found in times.items()]
    show(
        rows,
        {"batch": lambda r: r["batch"], "ms a token": lambda r: f"{r['ms']:.3f}"},
        title=f"{args.model}, {2 * half} sequences, threshold {threshold:g}",
    )
    print_line(
        "depth-pools",
        headline={"gain": round(gain, 3), "modelled_gain": round(modelled, 3)},
        model=args.model,
        slots=args.slots,
        threshold=threshold,
        share_of_layers=round(mean(shares), 3),
        front_share=round(model.front_share, 3),
        step=[shape.base_s, shape.per_sequence_s, shape.per_token_s],
        token_s={name: [round(t, 6) for t in found] for name, found in times.items()},
    )
    return 0


def _token_s(llm: LLM, states: list[SequenceState]) -> float:
    """Answer everything; the processor's seconds of a token, on average over the sequences."""
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for outputs in llm.loop.run(states):
        at_s = time.process_time()
        for output in outputs:
            if output.token_ids and output.first_index:
                began.setdefault(output.sequence_id, at_s)
                ended[output.sequence_id] = at_s
    counts = {s.sequence_id: len(s.output_ids) - 2 for s in states}
    return mean((ended[name] - began[name]) / counts[name] for name in began)


def _modelled(model: StepModel, shares: list[float], slots: int, tokens: float) -> float:
    """What the scheduler's model says that two replicas save by running them apart."""
    if model.front_share >= 1.0:
        return 0.0
    stays = np.array([float(model.stays(np.array(shares)).mean()), 1.0])
    context, num = np.full(2, tokens), np.full(2, float(slots))
    mixed_s = model.token_s(stays, context, num, 2)
    apart_s = sum(
        model.token_s(stays[i : i + 1], context[:1], num[:1], 1) for i in range(len(stays))
    )
    return float(1.0 - apart_s / mixed_s)
