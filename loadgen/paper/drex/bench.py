"""One model with so many slots: what each rebatching policy makes of the same prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

import numpy as np

from loadgen.load.task_suite import TaskSuite
from loadgen.paper.drex.closed_loop import PROMPTS_A_SLOT, ClosedLoopRun, run_closed_loop
from loadgen.paper.drex.judged import Decisions, JudgedRebatcher
from loadgen.paper.native import load_native
from quadriga.checkpoint.exits import ExitCounters, ExitParams, SkippedKV
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.clock import Clock, ManualClock
from quadriga.engine.model_runner import NativeRunner
from quadriga.interfaces import ModelRunner
from quadriga.policies.drex import SegmentCosts
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.policies.rebatching import Rebatcher
from quadriga.scheduling.calibration import calibrate
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.paced_runner import PacedRunner

CPU = "cpu"
NO_EXITS = "off"
_SEED = 4242
_CALIBRATIONS = 3
_SPARE_SHARE = 8  # one slot in so many is kept for equal bytes


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Time of a pass over a share of the model's layers: `share · (base_s + per_row_s · b)`.

    The passes are really run, for their tokens and confidences; the clock moves by this model.

    Attributes:
        head_s, head_row_s: Of a head: fixed, and per row.
        source: Where the shape comes from.
    """

    name: str
    base_s: float
    per_row_s: float
    head_s: float
    head_row_s: float
    source: str

    def pass_s(self, share: float, rows: int, num_tokens: int = 0) -> float:
        """Seconds for `rows` through this share of the layers and a head; context is free."""
        layers_s = share * (self.base_s + self.per_row_s * rows)
        return layers_s + self.head_s + self.head_row_s * rows


WEIGHT_BOUND = DeviceModel(
    name="modelled weight-bound GPU",
    base_s=15e-3,
    per_row_s=0.05e-3,
    head_s=0.3e-3,
    head_row_s=0.002e-3,
    source="15 ms of weights to read at 7B in bf16 and 1 TB/s, .05 ms a row of KV and attention, "
    "a head of 2 % of the weights",
)


Setting = tuple[str, float, int]
"""Policy, threshold, slots."""
Outcomes = dict[Setting, list[ClosedLoopRun]]
"""One of each round."""


@dataclass(frozen=True, slots=True)
class DrexSetting:
    """One row of the table, before it is measured.

    Attributes:
        device: "cpu", or the name of the cost model.
    """

    model: str
    batch: int
    threshold: float
    policy: str
    device: str


@dataclass(slots=True)
class DrexRow:
    """One row of the table: medians over the rounds, and what does not vary.

    Attributes:
        slots: More than `batch` where no exits got them for equal bytes.
        wanted_slots: Of no exits: that equal bytes would pay for, though rows or prompts lack.
        ceiling: Of the throughput, over no exits.
        rounds: Each figure that a ratio is taken of, by round.
    """

    setting: DrexSetting
    slots: int
    tokens_per_s: float
    gap_mean_s: float
    gap_p99_s: float
    request_s: float
    exact_match: float
    early_share: float
    involuntary_exits: int
    involuntary_stays: int
    peak_bytes: int
    ceiling: float | None = None
    decisions: Decisions | None = None
    wanted_slots: int = 0
    rounds: dict[str, list[float]] = field(default_factory=dict)


class DrexBench:
    """The engine, its prompts, and what its passes cost."""

    def __init__(
        self,
        native: NativeRunner,
        suite: TaskSuite,
        *,
        batch: int,
        max_tokens: int,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._native = native
        self._suite = suite
        self._batch = batch
        self._max_tokens = max_tokens
        self._say = say

    @classmethod
    def load(
        cls,
        model: str,
        batch: int,
        *,
        fill: SkippedKV | None,
        replay_newest: int | None = None,
        num_prompts: int,
        threads: int,
        max_tokens: int,
        clock: Clock,
        say: Callable[[str], None],
    ) -> DrexBench:
        """Load the engine and make the prompts; `clock` times the passes."""
        checkpoint = read_checkpoint(model)
        rows = batch + -(-batch // _SPARE_SHARE)
        native = load_native(
            checkpoint, num_rows=rows, threads=threads, skipped_kv=fill, replay_newest=replay_newest
        )
        suite = TaskSuite.make(checkpoint, num_prompts, seed=_SEED)
        return cls(native, suite, batch=batch, max_tokens=max_tokens, clock=clock, say=say)

    def measure(
        self, policies: Sequence[str], thresholds: Sequence[float], rounds: int
    ) -> list[DrexRow]:
        """Every policy at every threshold, in interleaved rounds; no exits know no threshold."""
        batch, full = self._batch, (NO_EXITS, thresholds[0], self._batch)
        settings = [(p, t, batch) for t in thresholds for p in policies if p != NO_EXITS]
        if NO_EXITS in policies:
            settings.insert(0, full)
        outcomes: Outcomes = {}
        for round_ in range(rounds):
            # Of each round the last: what equal bytes are is known when the first has run.
            for setting in chain(settings, self._at_equal_bytes(outcomes, full, thresholds)):
                outcome = self._run(*setting)
                outcomes.setdefault(setting, []).append(outcome)
                self._report(*setting[:2], f"round {round_ + 1}, {setting[2]} slots", outcome)
        costs = self._fresh_costs()
        rows = []
        for threshold in thresholds:
            for policy in policies:
                key, wanted = (policy, threshold, batch), 0
                if policy == NO_EXITS:
                    wanted, slots = self._equal_slots(outcomes, full, threshold)
                    key = (*full[:2], slots)
                row = self._row(policy, threshold, CPU, outcomes[key], key[2])
                row.wanted_slots = wanted
                if policy == "drex":
                    row.ceiling = self._ceiling(costs, outcomes[key][0].at_exit)
                    row.decisions = self._judge(threshold)
                rows.append(row)
        return rows

    def measure_modelled(self, policies: Sequence[str], threshold: float) -> list[DrexRow]:
        """The same in a weight-bound device's time; nothing varies, so once is enough."""
        rows = []
        device = WEIGHT_BOUND
        for policy in policies:
            clock = ManualClock()
            runner = PacedRunner(self._native, device, now_s=clock.now_s, sleep=clock.advance)
            costs = calibrate(runner, clock, max_rows=self._batch)
            outcome = self._loop(policy, threshold, runner, clock, costs)
            self._report(policy, threshold, device.name, outcome)
            row = self._row(policy, threshold, device.name, [outcome], self._batch)
            if policy == "drex":
                fresh = calibrate(runner, clock, max_rows=self._batch)
                row.ceiling = self._ceiling(fresh, outcome.at_exit)
            rows.append(row)
        return rows

    def _run(self, policy: str, threshold: float, slots: int) -> ClosedLoopRun:
        costs = calibrate(self._native, self._clock, max_rows=slots)
        return self._loop(policy, threshold, self._native, self._clock, costs, slots)

    def _loop(
        self,
        policy: str,
        threshold: float,
        runner: ModelRunner,
        clock: Clock,
        costs: SegmentCosts,
        slots: int = 0,
        make: Callable[[ExitCounters], Rebatcher] | None = None,
        on_loop: Callable[[DecodeLoop], None] | None = None,
    ) -> ClosedLoopRun:
        return run_closed_loop(
            self._suite.prompts,
            runner=runner,
            native=self._native,
            clock=clock,
            make_rebatcher=make
            or (lambda counters: make_rebatcher(policy, costs, counters, clock=clock)),
            slots=slots or self._batch,
            exits=ExitParams(threshold),
            max_tokens=self._max_tokens,
            on_loop=on_loop,
        )

    def _at_equal_bytes(
        self, outcomes: Outcomes, full: Setting, thresholds: Sequence[float]
    ) -> Iterator[Setting]:
        """Yield no exits with the slots that DREX's bytes pay for, where these are more."""
        if full in outcomes:
            slots = {self._equal_slots(outcomes, full, threshold)[1] for threshold in thresholds}
            yield from ((*full[:2], more) for more in sorted(slots - {self._batch}))

    def _equal_slots(self, outcomes: Outcomes, full: Setting, threshold: float) -> tuple[int, int]:
        """Slots that DREX's bytes would pay for without exits, and as many of them as there are."""
        batch, drex = self._batch, outcomes.get(("drex", threshold, self._batch), outcomes[full])
        wanted = max(batch, int(batch * drex[0].peak_bytes / outcomes[full][0].peak_bytes))
        most = min(self._native.num_rows, len(self._suite.prompts) // PROMPTS_A_SLOT)
        return wanted, max(batch, min(wanted, most))

    def _judge(self, threshold: float) -> Decisions:
        """Run DREX once more, with both branches of its decisions; its throughput is not used."""
        clock = self._clock
        costs = calibrate(self._native, clock, max_rows=self._batch)
        decisions = Decisions()
        loops: list[DecodeLoop] = []
        self._loop(
            "drex",
            threshold,
            self._native,
            clock,
            costs,
            make=lambda counters: JudgedRebatcher(
                costs,
                counters=counters,
                decisions=decisions,
                native=self._native,
                clock=clock,
                waiting_rows=lambda at: [s.row for s in loops[0].batch.groups()[at + 1]],
            ),
            on_loop=loops.append,
        )
        return decisions

    def _fresh_costs(self) -> SegmentCosts:
        """The machine's pass times: of several calibrations the one with the median full pass."""
        found = [
            calibrate(self._native, self._clock, max_rows=self._batch) for _ in range(_CALIBRATIONS)
        ]
        last = len(self._native.segment_ends)
        found.sort(key=lambda c: c.forecast_s(0, last, self._batch, 0, tests=False))
        return found[_CALIBRATIONS // 2]

    def _row(
        self,
        policy: str,
        threshold: float,
        device: str,
        outcomes: Sequence[ClosedLoopRun],
        slots: int,
    ) -> DrexRow:
        first = outcomes[0]
        gaps = [o.gaps_s for o in outcomes]
        rounds = {
            "tokens_per_s": [o.tokens_per_s for o in outcomes],
            "gap_p99_s": [float(np.percentile(g, 99)) for g in gaps],
            "request_s": [statistics.fmean(o.request_s) for o in outcomes],
        }
        right = self._suite.right(first.outputs)
        return DrexRow(
            setting=DrexSetting(
                self._native.spec.checkpoint.id, self._batch, threshold, policy, device
            ),
            slots=slots,
            tokens_per_s=statistics.median(rounds["tokens_per_s"]),
            gap_mean_s=statistics.median(statistics.fmean(g) for g in gaps),
            gap_p99_s=statistics.median(rounds["gap_p99_s"]),
            request_s=statistics.median(rounds["request_s"]),
            exact_match=sum(right) / len(right),
            early_share=first.early_share(self._native.num_layers),
            involuntary_exits=max(o.counters.involuntary_exits for o in outcomes),
            involuntary_stays=first.counters.involuntary_stays,
            peak_bytes=max(o.peak_bytes for o in outcomes),
            rounds=rounds,
        )

    def _ceiling(self, costs: SegmentCosts, at_exit: Mapping[int, int]) -> float:
        """t_f / (t_s + (1 − p) t_d) at this batch, for all exits: every stage at full batch size.

        The shares are those of the tokens that really left; the context is the prompts' mean.
        """
        ends, b = self._native.segment_ends, self._batch
        n = b * statistics.fmean(len(p.token_ids) for p in self._suite.prompts)
        last = len(ends) - 1
        full_s = costs.forecast_s(0, last + 1, b, n, tests=False)
        best_s = full_s
        total = max(1, sum(at_exit.values()))
        for exits in product((False, True), repeat=last):
            used = [i for i, is_used in enumerate(exits) if is_used]
            seconds, first, reach = 0.0, 0, 1.0
            for stop in [*(i + 1 for i in used), last + 1]:
                seconds += reach * costs.forecast_s(first, stop, b, n, tests=stop <= last)
                left = sum(at_exit.get(end, 0) for end in ends[:stop])
                reach, first = 1.0 - left / total, stop
            best_s = min(best_s, seconds)
        return full_s / best_s

    def _report(self, policy: str, threshold: float, which: str, outcome: ClosedLoopRun) -> None:
        self._say(
            f"{self._native.spec.checkpoint.id} batch {self._batch} τ {threshold:g} {policy} "
            f"{which}: {outcome.tokens_per_s:,.0f} tokens/s"
        )
