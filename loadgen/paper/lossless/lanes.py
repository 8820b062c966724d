"""Contestants side by side: each decodes the same prompts on an engine of its own, in short turns.

What others do to the machine while one has its turn, they do to the next as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from loadgen.load.task_suite import TaskSuite
from loadgen.paper.clocks import TurnClock
from loadgen.paper.drex.closed_loop import ClosedLoopRun, closed_loop, run_closed_loop
from loadgen.paper.native import load_native
from quadriga.checkpoint.exits import NEVER, ExitParams
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import Clock
from quadriga.interfaces import DraftPlan
from quadriga.policies.drafting import DraftAction, DraftChoice, Drafter
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.scheduling.calibration import calibrate
from quadriga.scheduling.decode_loop import DecodeLoop

OFF, LOSSLESS, DRAFTS, BOUNDED, SMOOTH = "off", "lossless", "drafts", "bounded", "smooth"
ASKED = "asked"
_SEED = 4242
_TURN_TOKENS = 24  # a slot
SMOOTH_GAP = 1.5  # of a full pass: what `smooth` asks for


class AlwaysDrafts(Drafter):
    """Every round drafts."""

    def choose(
        self,
        fresh: int,
        pending: int,
        positions: int,
        survivals: Sequence[float],
        num_tokens: int,
        now_s: float,
        budget_s: float = float("inf"),
    ) -> DraftChoice:
        choice = super().choose(fresh, pending, positions, survivals, num_tokens, now_s, budget_s)
        return choice if pending else DraftChoice(DraftAction.DRAFT)


class AsksAfterEachToken(Drafter):
    """Decides after each drafted token, as runners without a kernel that drafts have it."""

    def plan(
        self,
        survivals: Sequence[float],
        rooms: Sequence[int],
        ends: frozenset[int],
        positions: int,
        budget_s: float = float("inf"),
    ) -> DraftPlan:
        return super().plan(survivals, [0] * len(rooms), ends, positions, budget_s)


def race(
    model: str,
    names: Sequence[str],
    *,
    slots: int,
    num_prompts: int,
    max_tokens: int,
    threads: int,
    clock: Clock,
    say: Callable[[str], None],
) -> tuple[TaskSuite, dict[str, ClosedLoopRun]]:
    """Let contestants take turns until each has done all prompts.

    Returns:
        The prompts, and what each has done.
    """
    checkpoint = read_checkpoint(model)
    suite = TaskSuite.make(checkpoint, num_prompts, seed=_SEED)
    lanes = {name: ClosedLoopRun() for name in names}
    full_s, under_way = 0.0, {}
    for name in names:
        native = load_native(checkpoint, num_rows=slots, threads=threads)
        watch = TurnClock(clock)
        with watch.turn():
            calibrate(native, watch, max_rows=slots)  # touches all rows: no page faults later
            costs = calibrate(native, watch, max_rows=slots)
        policy = "drex" if name == BOUNDED else "off"

        if name == OFF and SMOOTH in names:
            alone = run_closed_loop(
                suite.prompts[: 3 * slots],
                runner=native,
                native=native,
                clock=clock,
                make_rebatcher=partial(make_rebatcher, "off", costs),
                slots=slots,
                exits=ExitParams(NEVER, "off"),
                max_tokens=max_tokens,
            )
            full_s = statistics.median(alone.gaps_s)

        def start(loop: DecodeLoop, name: str = name) -> None:
            if name == DRAFTS:
                loop.batch.drafter = AlwaysDrafts(loop.batch.rebatcher.costs)
            elif name == ASKED:
                loop.batch.drafter = AsksAfterEachToken(loop.batch.rebatcher.costs)

        steps = closed_loop(
            suite.prompts,
            lanes[name],
            runner=native,
            native=native,
            watch=watch,
            make_rebatcher=partial(make_rebatcher, policy, costs),
            slots=slots,
            exits=_exits(name, checkpoint.exits.threshold, full_s),
            max_tokens=max_tokens,
            on_loop=start,
        )
        under_way[name] = (watch, steps)
    goal, order = 0, list(names)
    done = dict.fromkeys(names, 0)
    while under_way:
        goal += _TURN_TOKENS * slots
        order.append(order.pop(0))
        for name in order:
            if name not in under_way:
                continue
            watch, steps = under_way[name]
            with watch.turn():
                while done[name] < goal:
                    news = next(steps, None)
                    if news is None:
                        del under_way[name]
                        break
                    done[name] += news
    for name, run in lanes.items():
        say(f"{model} {slots} slots {name}: {run.tokens_per_s:,.0f} tokens/s")
    return suite, lanes


def _exits(name: str, threshold: float, full_s: float) -> ExitParams:
    if name == BOUNDED:
        return ExitParams(threshold, "bounded")
    if name == OFF:
        return ExitParams(NEVER, "off")
    return ExitParams(NEVER, "lossless", 0, SMOOTH_GAP * full_s if name == SMOOTH else 0.0)


def gap_p99_s(run: ClosedLoopRun) -> float:
    """The 99th percentile of the times between two deliveries of a sequence."""
    return float(np.percentile(run.gaps_s, 99))
