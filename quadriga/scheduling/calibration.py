"""Measures what segments, exit heads and decode steps cost before the first sequence arrives."""

from __future__ import annotations

from statistics import median

from quadriga.checkpoint.exits import ExitParams
from quadriga.clock import Clock
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.interfaces import MAX_DRAFTED, DraftingRunner, DraftPlan, ModelRunner, PrefillChunk
from quadriga.policies.drex.costs import SegmentCosts
from quadriga.scheduling.forecasts import StepShape

_REPEATS = 3
_SHORT, _LONG = 2, 512  # tokens of context
_SKIPPED = (2, 12)  # tokens that leave early, to time what it takes to fill in their KV
_FILL_ROWS = 4
_TIMED_POSITIONS = 72  # 8 rows with all that they may draft


def calibrate(runner: ModelRunner, clock: Clock, *, max_rows: int) -> SegmentCosts:
    """Time every segment at batch sizes that double, at short and at long contexts.

    Uses the runner's rows 0..max_rows − 1, which must be free, and leaves them free. What is
    computed is garbage; only the time counts.
    """
    costs = SegmentCosts(len(runner.segment_ends), max_rows)
    if costs.num_segments == 1:
        return costs
    with Dummies(runner, max_rows, _SHORT):
        for count in costs.knots:
            _calibrate_batch(runner, clock, costs, count)
    context = _long_context(runner, max_rows)
    with Dummies(runner, max_rows, context):
        for segment in range(costs.num_segments):
            seconds = _time_s(runner, clock, segment, segment + 1, max_rows)
            known_s = costs.forecast_s(segment, segment + 1, max_rows, 0, tests=True)
            costs.set_slope(segment, (seconds - known_s) / (max_rows * (context - _SHORT)))
    if runner.row_capacity_tokens > _SHORT + max(_SKIPPED):
        _calibrate_fill(runner, clock, costs, min(_FILL_ROWS, max_rows))
    if isinstance(runner, DraftingRunner):
        _extend(runner, clock, costs)
    return costs


def _long_context(runner: ModelRunner, num_rows: int) -> int:
    """Tokens of context that so many rows can have at once."""
    shared = max(_SHORT + 1, runner.kv_capacity_tokens // num_rows)
    return min(_LONG, runner.row_capacity_tokens - 1, shared)


def _extend(runner: DraftingRunner, clock: Clock, costs: SegmentCosts) -> None:
    """Let the table reach up to the positions that all rows together can have to be verified.

    Small counts are timed, for the knee is there; beyond, it goes on as it did.
    """
    rows, last = costs.max_rows, costs.num_segments
    most = rows * (1 + MAX_DRAFTED)
    while costs.knots[-1] < most:
        before = costs.knots[-1]
        count = min(2 * before, most)
        before_s = costs.forecast_s(1, last, before, 0, tests=False)
        if count <= _TIMED_POSITIONS and runner.row_capacity_tokens > _SHORT + MAX_DRAFTED:
            after_s = _time_verify(runner, clock, rows, count)
        else:
            after_s = before_s + (count - before) * (
                before_s - costs.forecast_s(1, last, before // 2, 0, tests=False)
            ) / (before - before // 2)
        costs.extend(count, max(after_s / before_s, 1.0))
    if runner.row_capacity_tokens > _SHORT + MAX_DRAFTED:
        costs.spared_s = _time_spared(runner, clock, costs)


def _time_spared(runner: DraftingRunner, clock: Clock, costs: SegmentCosts) -> float:
    """Seconds by which a pass of drafts by a plan is shorter than one that is called for."""
    free = [[0.0, 0.0]] * MAX_DRAFTED
    plan = DraftPlan([1.0], [MAX_DRAFTED], frozenset(), (), (1.0,), 0.0, 1.0, free)
    times = []
    for _ in range(_REPEATS):
        with Dummies(runner, 1, _SHORT):
            runner.advance([0], 0, 1)
            started_s = clock.now_s()
            [drafted] = runner.draft([0], plan)
            if not drafted.confidences:
                return 0.0
            times.append((clock.now_s() - started_s) / len(drafted.confidences))
    return costs.forecast_s(0, 1, 1, _SHORT, tests=True) - median(times)


def _time_verify(runner: DraftingRunner, clock: Clock, num_rows: int, positions: int) -> float:
    """Seconds to verify so many positions, as evenly as may be over the rows."""
    times = []
    for _ in range(_REPEATS):
        with Dummies(runner, num_rows, _SHORT):
            rows, left = list(range(num_rows)), positions
            while left:
                some = rows[: min(left, num_rows)]
                runner.advance(some, 0, 1)
                left -= len(some)
                if left:
                    runner.draft(rows[: min(left, num_rows)])
            started_s = clock.now_s()
            runner.verify(rows)
            times.append(clock.now_s() - started_s)
    return median(times)


def _calibrate_fill(runner: ModelRunner, clock: Clock, costs: SegmentCosts, count: int) -> None:
    """Enter what filling in skipped KV takes: nothing where nothing is.

    After a few tokens that left early and after many, that gives what a row costs and what each
    position.
    """
    found = [_time_fill(runner, clock, costs.num_segments, count, skipped) for skipped in _SKIPPED]
    (few, few_s), (many, many_s) = found
    if many <= few:
        return
    entered = count * (costs.num_segments - 1)
    costs.fill_s = max(0.0, min((many_s - few_s) / (many - few), many_s / many))
    costs.fill_row_s = max(0.0, (many_s - costs.fill_s * many) / entered)


def _time_fill(
    runner: ModelRunner, clock: Clock, num_segments: int, count: int, skipped: int
) -> tuple[int, float]:
    """Positions × segments filled in after so many tokens left at the first exit, and seconds.

    The next token runs on; once more, it finds all there. The first segment runs before each, as in
    service: or the second time weights would be nearer.
    """
    found_s = []
    rows = list(range(count))
    filled = 0

    def deep_s() -> float:
        runner.advance(rows, 0, 1)
        started_s = clock.now_s()
        runner.advance(rows, 1, num_segments)
        return clock.now_s() - started_s

    for _ in range(_REPEATS):
        with Dummies(runner, count, _SHORT) as dummies:
            for _ in range(skipped):
                runner.advance(rows, 0, 1)
                for state, token in zip(dummies.states, runner.emit(rows), strict=True):
                    state.output_ids.append(token.token_id)
            before = runner.num_filled
            took_s, filled = deep_s(), runner.num_filled - before
            again_s = median(deep_s() for _ in range(_REPEATS))
        found_s.append(max(0.0, took_s - again_s))
    return filled, median(found_s)


def _calibrate_batch(runner: ModelRunner, clock: Clock, costs: SegmentCosts, count: int) -> None:
    """Enter the times at one batch size.

    Every pass ends in a head. The whole model in one pass has one, its segments one by one have one
    each; the difference is what a head costs. That of the last segment is counted with the segment,
    for nothing ever leaves it out.
    """
    last = costs.num_segments - 1
    parts_s = [_time_s(runner, clock, i, i + 1, count) for i in range(costs.num_segments)]
    whole_s = _time_s(runner, clock, 0, costs.num_segments, count)
    head_s = max((sum(parts_s) - whole_s) / last, 0.01 * min(parts_s))
    for segment, seconds in enumerate(parts_s):
        costs.set(segment, count, seconds - (head_s if segment < last else 0.0))
        costs.set(segment, count, head_s if segment < last else 0.0, head=True)


def _time_s(runner: ModelRunner, clock: Clock, first: int, stop: int, count: int) -> float:
    rows = list(range(count))
    times = []
    for _ in range(_REPEATS):
        started_s = clock.now_s()
        runner.advance(rows, first, stop)
        times.append(clock.now_s() - started_s)
    return median(times)


class Dummies:
    """Sequences of one length in the first rows, to time passes on; a context manager.

    All but the last token are prompt, and no KV is there: what is computed is garbage.
    """

    def __init__(self, runner: ModelRunner, count: int, num_tokens: int) -> None:
        self._runner = runner
        self.states = [
            SequenceState(
                sequence_id=f"calibration-{row}",
                request_id="calibration",
                model="",
                prompt_ids=[0] * (num_tokens - 1),
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                ingress_id="",
                arrival_unix_s=0.0,
                deadline_unix_s=float("inf"),
                exits=ExitParams(),
                output_ids=[0],
            )
            for row in range(count)
        ]

    def __enter__(self) -> Dummies:
        for row, state in enumerate(self.states):
            self._runner.attach(row, state)
        return self

    def __exit__(self, *_: object) -> None:
        for row in range(len(self.states)):
            self._runner.detach(row)

    def decode(self) -> None:
        """Run one token of each through all layers."""
        self._runner.decode(list(range(len(self.states))))

    def prefill(self) -> None:
        """Compute the first one's prompt."""
        self._runner.prefill([PrefillChunk(0, self.states[0].prompt_ids, 0, True)])


_STEP_REPEATS = 5
_LEAST_SHARE = 1e-4  # of a step, that a sequence or a long context is taken to add at least


def assumed_shape(kv_capacity_tokens: int) -> StepShape:
    """For runners that cannot be timed without sequences: a step over half of the KV memory takes
    half as long again as an empty one; the scale is found while serving."""
    return StepShape(base_s=1e-3, per_sequence_s=0.0, per_token_s=1e-3 / kv_capacity_tokens)


def measure_shape(runner: ModelRunner, clock: Clock, *, max_rows: int) -> StepShape:
    """Time full-depth steps: one row, all rows, all rows with long contexts.

    Uses the runner's rows 0..max_rows − 1, which must be free, and leaves them free. What is
    computed is garbage; only the time counts.
    """
    long = _long_context(runner, max_rows)
    one_s = _step_s(runner, clock, 1, _SHORT)
    all_s = _step_s(runner, clock, max_rows, _SHORT)
    long_s = _step_s(runner, clock, max_rows, long)
    more_tokens = max(1, max_rows * (long - _SHORT))
    per_token_s = max(long_s - all_s, _LEAST_SHARE * all_s) / more_tokens
    per_sequence_s = max(all_s - one_s, _LEAST_SHARE * one_s) / max(1, max_rows - 1)
    per_sequence_s = max(0.0, per_sequence_s - _SHORT * per_token_s)
    return StepShape(max(one_s - per_sequence_s, _LEAST_SHARE), per_sequence_s, per_token_s)


def _step_s(runner: ModelRunner, clock: Clock, count: int, num_tokens: int) -> float:
    rows = list(range(count))
    num_segments = len(runner.segment_ends)
    times = []
    with Dummies(runner, count, num_tokens):
        for _ in range(_STEP_REPEATS):
            started_s = clock.now_s()
            if num_segments == 1:
                runner.decode(rows)
            else:
                runner.advance(rows, 0, num_segments)
                runner.emit(rows)
            times.append(clock.now_s() - started_s)
    return median(times)
