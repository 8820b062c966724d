"""What steps cost, summed: from one beginning to the next, and not while nothing is to do."""

from __future__ import annotations

from quadriga.scheduling.meters import StepMeter, StepTotals
from tests.unit.scheduling.test_loops import Harness, decode_loop, hand_off, sequence


def test_what_lies_between_two_steps_belongs_to_the_first() -> None:
    meter = StepMeter()
    meter.begin(10.0)
    meter.ran(2, 80)  # ranges that are run in one step are one step
    meter.ran(1, 40)
    assert meter.totals == StepTotals()  # not over yet
    meter.begin(10.5)
    meter.ran(2, 80)
    assert meter.totals == StepTotals(steps=1, busy_s=0.5, sequences=3, tokens=120)
    meter.rest(10.75)
    assert meter.totals == StepTotals(steps=2, busy_s=0.75, sequences=5, tokens=200)


def test_waiting_for_work_costs_nothing() -> None:
    meter = StepMeter()
    for now_s in (1.0, 2.0, 3.0):
        meter.begin(now_s)
        meter.rest(now_s + 0.5)
    assert meter.totals == StepTotals()
    meter.begin(4.0)
    meter.ran(1, 7)
    meter.rest(4.25)
    meter.begin(9.0)
    assert meter.totals == StepTotals(steps=1, busy_s=0.25, sequences=1, tokens=7)


def test_the_decode_loop_counts_its_batches() -> None:
    loop, runner, clock = decode_loop()
    hand_off(loop, runner, sequence("a", [1, 2, 3], 4))
    hand_off(loop, runner, sequence("b", [4], 3))
    for _ in range(6):
        loop.step()
        clock.advance(0.02)
    # Sizes as they attend: 4 and 2, then 5 and 3; b has its 3 tokens, and a goes on alone.
    assert loop.meter.totals.steps == 3
    assert loop.meter.totals.sequences == 5
    assert loop.meter.totals.tokens == (4 + 2) + (5 + 3) + 6
    assert loop.meter.totals.busy_s == 0.04, "the last step was followed by nothing"


def test_the_prefill_loop_counts_prompts_and_their_tokens() -> None:
    h = Harness(chunk=8)
    for name in "abc":
        h.submit(sequence(name, [1, 2, ord(name)]))
    h.step()
    h.clock.advance(0.5)
    h.step()
    totals = h.loop.meter.totals
    assert (totals.steps, totals.tokens, totals.busy_s) == (2, 9, 0.5)
    assert totals.sequences == 4, "the third prompt is computed in two chunks"
