"""Memory promised as it is used: who is let in, who makes room, and who comes back first."""

from __future__ import annotations

import contextlib
import math
from unittest.mock import patch

import pytest

from quadriga.core.forecast import LengthPrediction
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SampledToken, SamplingParams
from quadriga.errors import ContextTooLong, DeviceMemoryExhausted, KVCacheExhausted
from quadriga.policies.slot_reservation import (
    ASSUMED_TOKENS,
    WINDOW,
    AnswerLengths,
    promised_tokens,
)
from quadriga.scheduling.preemption import choose_victim
from quadriga.scheduling.sequence import SHOWN, RunningSequence, SequenceStatus
from quadriga.scheduling.slots import BLOCK_TOKENS
from tests.crowded_replica import Replica
from tests.sequences import make_sequence, make_slots


def test_many_fit_by_what_they_use_and_all_end() -> None:
    """By their longest, two would fit; ten run to their end, with pauses on the way."""
    replica = Replica(rows=10)
    for i in range(10):
        replica.take(f"s{i}", max_tokens=60 + 4 * i)
    assert replica.loop.num_running == 10
    replica.finish()
    assert replica.loop.preemption.num_pauses > 3
    assert replica.loop.preemption.num_resumes == replica.loop.preemption.num_pauses


def test_newcomers_are_let_in_up_to_the_mark() -> None:
    replica = Replica(rows=30)
    for i in range(288 // 16):
        replica.take(f"s{i}", max_tokens=10)
    with pytest.raises(KVCacheExhausted, match="up to 288 tokens"):
        replica.take("one too many")
    assert replica.loop.preemption.num_pauses == 0
    replica.finish()


def test_nothing_is_paused_by_the_longest() -> None:
    replica = Replica(reservation="longest")
    assert replica.take("a").priority == 0
    assert replica.loop.preemption.least_priority is None
    replica.take("b", max_tokens=140)
    with pytest.raises(KVCacheExhausted, match="tokens are free"):
        replica.take("important", priority=-9, max_tokens=140)
    replica.finish()
    assert replica.loop.preemption.num_pauses == 0


def test_the_important_take_the_place_of_the_least_important() -> None:
    """Of three in three rows: first by priority, then the longest remaining."""
    replica = Replica(rows=3)
    replica.take("first", priority=1, max_tokens=50)
    replica.take("least", priority=5, max_tokens=40)
    replica.take("long", priority=1, max_tokens=90)
    assert replica.loop.preemption.least_priority == 5
    with pytest.raises(KVCacheExhausted, match="0 of 3 rows"):
        replica.take("equal", priority=5)
    replica.take("important", priority=0)
    assert replica.paused == {"least"}
    replica.take("more important", priority=-1)
    assert replica.paused == {"least", "long"}
    assert replica.loop.preemption.least_priority == 1
    replica.finish()


def test_the_paused_come_before_newcomers_of_their_rank() -> None:
    replica = Replica()
    replica.take("a")
    for name, priority in (("d", 7), ("b", 5)):
        replica.take(name, priority=priority)
        assert replica.loop.preemption.pause(name)
        assert replica.loop.preemption.least_priority == priority
    with pytest.raises(KVCacheExhausted, match="2 paused sequences wait"):
        replica.take("c", priority=5)
    replica.take("urgent", priority=4)
    assert replica.paused == {"b", "d"}
    replica.finish()
    assert replica.loop.preemption.num_resumes == replica.loop.preemption.num_pauses >= 1


def test_a_sequence_that_cannot_be_paused_runs_on() -> None:
    replica = Replica(rows=1)
    replica.take("runs", priority=5, max_tokens=30)

    full = patch.object(replica.runner, "suspend", side_effect=MemoryError)
    with full, pytest.raises(MemoryError):
        replica.take("important", priority=0)
    assert replica.paused == set() and replica.loop.num_running == 1
    replica.finish()


def test_passes_that_lack_device_memory_are_halved_until_they_fit() -> None:
    """A pass of three fails; who was paused for it comes back a second later, to fail again."""
    replica = Replica(rows=6, step_s=0.1)
    decode, failed = replica.runner.decode, list[int]()

    def lacking(rows: list[int]) -> list[SampledToken]:
        if len(rows) > 2:
            failed.append(len(rows))
            raise DeviceMemoryExhausted("a pass needs more memory")
        return decode(rows)

    replica.runner.decode = lacking  # type: ignore[method-assign]
    for i in range(6):
        replica.take(f"s{i}", max_tokens=40)
    replica.finish()
    assert failed[:2] == [6, 3] and len(failed) <= 2 * (replica.clock.now_s() + 1)


def test_no_sequence_is_paused_in_vain() -> None:
    replica = Replica(rows=3)
    replica.take("important", prompt=150, max_tokens=5, priority=0)
    replica.take("other", prompt=60, max_tokens=5, priority=1)
    with pytest.raises(KVCacheExhausted):
        replica.take("large", prompt=140, max_tokens=10, priority=0)
    with pytest.raises(ContextTooLong):
        replica.take("larger than a row", prompt=150, max_tokens=11, priority=-1)
    assert replica.loop.preemption.num_pauses == 0
    replica.finish()


def test_an_engine_whose_room_is_all_promised_does_not_spin() -> None:
    """Who is paused for one on its way waits for it; until then there is nothing to do."""
    replica = Replica(rows=1)
    replica.take("low", max_tokens=20, priority=5)
    replica.loop.reserve("urgent", 160, 150, priority=-1)
    assert replica.paused == {"low"}
    assert not replica.loop.has_work
    replica.loop.leave("urgent")
    assert replica.loop.has_work
    replica.finish()
    assert replica.loop.preemption.num_resumes == 1


def test_a_newcomer_is_promised_what_answers_usually_add() -> None:
    replica = Replica(rows=8, answer_tokens=60)
    for i in range(6):
        replica.take(f"s{i}", max_tokens=100)
    assert replica.loop.slots.reserved_tokens == 80 + 48 + 48 + 32 + 32 + 32
    with pytest.raises(KVCacheExhausted, match="no room for 32 tokens"):
        replica.take("one too many", max_tokens=100)
    replica.take("short", prompt=5, max_tokens=10)  # its own limit is nearer
    replica.finish()


def test_where_every_row_fits_at_its_longest_all_of_the_memory_is_promised() -> None:
    """Two rows of 160 in 320 tokens: nobody can lack memory."""
    replica = Replica(rows=2, answer_tokens=200)
    for name in ("a", "b"):
        replica.take(name, prompt=20, max_tokens=140)
    assert replica.loop.slots.reserved_tokens == 160 + 112
    with pytest.raises(KVCacheExhausted, match="0 of 2 rows"):
        replica.take("c")
    replica.finish()
    assert replica.loop.preemption.num_pauses == 0


def test_a_known_length_counts_instead_of_the_usual_one() -> None:
    replica = Replica(rows=8, answer_tokens=60)
    replica.take("a")
    slot = replica.loop.reserve("s", 115, 15, 0, LengthPrediction(3.0, 1.0, 9.5))
    assert slot.reserved_tokens == 32
    replica.loop.leave("s")
    replica.finish()


def test_what_is_promised_and_not_used_is_taken_back_before_anybody_is_paused() -> None:
    replica = Replica(rows=8, answer_tokens=100)
    replica.take("promised much", prompt=60, max_tokens=100)
    replica.take("outlives its promise", max_tokens=140)
    replica.take("outgrows it together with that one", prompt=28, max_tokens=55)
    assert replica.loop.slots.reserved_tokens == 160 + 64 + 64
    replica.finish()
    assert replica.loop.preemption.num_pauses == 0


def test_answers_that_end_teach_what_to_promise() -> None:
    lengths = AnswerLengths()
    assert lengths.upper_tokens == ASSUMED_TOKENS
    for _ in range(4):
        lengths.ended(500)
    assert lengths.upper_tokens == 500  # more than a tenth of all it knows
    for i in range(WINDOW):
        lengths.ended(i % 10)
    assert lengths.upper_tokens == 9
    for _ in range(WINDOW):
        lengths.ended(0)
    assert lengths.upper_tokens == 1


def running(
    name: str,
    *,
    total: float | None = None,
    prompt: int = 10,
    pauses: int = 0,
    stays_until: int = 0,
    priority: int = 0,
) -> RunningSequence:
    """A running sequence of 20 tokens, predicted to come to so many in all."""
    state = make_sequence(
        name,
        [0] * prompt,
        SamplingParams(max_tokens=1000),
        priority=priority,
        output_ids=[0] * (20 - prompt),
    )
    if total is not None:
        state.prediction, state.predicted_at = LengthPrediction(total - 20, 0.0, total), 20 - prompt
    return RunningSequence(state, num_tokens=20, num_pauses=pauses, stays_until=stays_until)


def victims(*candidates: RunningSequence) -> list[str]:
    """All of them, in the order in which they are paused."""
    left, order = list(candidates), []
    while (victim := choose_victim(left)) is not None:
        left.remove(victim)
        order.append(victim.state.sequence_id)
    return order


def test_the_largest_predicted_total_is_paused_first_however_often_it_was_paused() -> None:
    short, long = running("short", total=100), running("long", total=500, pauses=3)
    longer_answer = running("longer answer", total=450, prompt=1)
    assert victims(short, long, longer_answer) == ["long", "longer answer", "short"]
    unimportant = running("unimportant", total=30, priority=1)
    assert victims(long, unimportant) == ["unimportant", "long"]


def test_one_that_came_back_overdue_is_paused_last_until_it_has_a_block() -> None:
    kept = running("kept", total=900, pauses=1, stays_until=21)
    had_its_block = running("had its block", total=800, pauses=1, stays_until=20)
    often = running("kept, paused often", total=300, pauses=4, stays_until=36)
    short, important = running("short", total=100), running("important", total=50, priority=-1)
    assert victims(important, often, kept, short, had_its_block) == [
        "had its block",
        "short",
        "important",
        "kept",
        "kept, paused often",
    ]


def test_without_predictions_the_sequence_paused_least_often_is_paused_first() -> None:
    assert victims(running("once", pauses=1), running("never")) == ["never", "once"]


def test_the_longest_of_all_is_paused_again_and_again_and_ends_all_the_same() -> None:
    """Newcomers that are shorter come without end, and memory is always full."""
    replica = Replica(rows=6, step_s=0.25)
    state = replica.take("longest", max_tokens=120)
    for i in range(600):
        if len(state.output_ids) == 120:
            break
        with contextlib.suppress(KVCacheExhausted):
            replica.take(f"short {i}", max_tokens=60)
        replica.step()
    assert len(state.output_ids) == 120
    assert state.num_pauses > 2
    replica.finish()


def test_one_that_was_paused_for_long_comes_before_the_more_important() -> None:
    """More important sequences come without end: the patience of the paused one has one."""
    replica = Replica(rows=1, step_s=0.25)
    replica.take("low", max_tokens=30, priority=5)
    refusals: list[str] = []
    for i in range(200):
        if len(replica.states["low"].output_ids) == 30:
            break
        try:
            replica.take(f"important {i}", max_tokens=10, priority=0)
        except KVCacheExhausted as exc:
            refusals.append(exc.message)
        replica.step()
    assert len(replica.states["low"].output_ids) == 30
    assert any("paused sequences wait" in refusal for refusal in refusals)
    assert sum(name.startswith("important") for name in replica.states) > 3
    replica.finish()


def test_the_last_token_says_what_became_of_a_sequence() -> None:
    """Pauses of each, and its length as first predicted; a new prediction is told at once."""
    replica = Replica(rows=10)
    states = [replica.take(f"s{i}", max_tokens=60 + 4 * i) for i in range(10)]
    told: dict[str, list[EngineOutput]] = {state.sequence_id: [] for state in states}
    predictions = {4: LengthPrediction(40.0, 20.0, 80.0), 8: LengthPrediction(30.0, 25.0, 50.0)}
    for step in range(5000):
        if not replica.loop.has_work:
            break
        if step in predictions:
            states[0].prediction = predictions[step]
            states[0].predicted_at = len(states[0].output_ids)
        for _, emission in replica.loop.step():
            if emission.progress is not None:
                told[emission.sequence_id].append(emission)
    lasts = {name: emissions[-1] for name, emissions in told.items()}
    assert all(emission.finish is FinishReason.LENGTH for emission in lasts.values())
    pauses = {name: e.progress["num_pauses"] for name, e in lasts.items() if e.progress is not None}
    assert sum(pauses.values()) == replica.loop.preemption.num_pauses > 3
    first, second, last = (e.progress for e in told["s0"])
    assert first is not None and second is not None and last is not None
    assert all(e["expected"] == LengthPrediction(45.0, 25.0, 85.0) for e in (first, second, last))
    assert (first["predicted_at"], second["predicted_at"]) == (5, 9)
    assert last["prediction"] == predictions[8]
    assert all(len(told[f"s{i}"]) == 1 for i in range(1, 10)), "nothing new, nothing said"


def test_a_long_prediction_is_promised_no_more_than_answers_usually_add() -> None:
    """It would wait until a replica is nearly empty, and everybody behind it with it."""
    promised = [
        promised_tokens(
            10, 700, upper_tokens=100, num_held=0, prediction=LengthPrediction(upper, 1.0, upper)
        )
        for upper in (5.5, 99.0, 100.0, 101.0, 600.0)
    ]
    assert promised == [16, 109, 110, 110, 110]
    assert promised_tokens(10, 700, upper_tokens=100, num_held=0) == 110


def test_n_sequences_are_promised_what_answers_add_by_the_root_of_n() -> None:
    """Who is longer is made up for by who is shorter: the spread of a sum grows with the root."""
    upper_tokens, num_tokens = 800, 16
    slots = make_slots(400, 4_096, 1_000_000, reservation="used")
    for n in range(400):
        slots.reserve(str(n), 4_096, num_tokens, upper_tokens=upper_tokens)
        ahead = slots.reserved_tokens - num_tokens * (n + 1)
        together = upper_tokens * math.sqrt(n + 1)
        assert together <= ahead <= together + BLOCK_TOKENS * (n + 1)


def test_under_overload_nothing_is_promised_beyond_what_a_sequence_comes_with() -> None:
    """Whether there will be room for it, the scheduler's forecast says."""
    prediction = LengthPrediction(90.0, 60.0, 120.0)
    for num_held in (0, 9):
        promised_now = promised_tokens(
            10, 160, upper_tokens=50, num_held=num_held, prediction=prediction, by_forecast=True
        )
        assert promised_now == 11
    promised = {}
    for is_overloaded in (False, True):
        loop = Replica().loop
        loop.is_overloaded = is_overloaded
        loop.answers.upper_tokens = 64
        foreseen = loop.promise("foreseen", 160, 16, 0, prediction)
        unforeseen = loop.promise("unforeseen", 160, 16)
        promised[is_overloaded] = foreseen.reserved_tokens, unforeseen.reserved_tokens
    assert promised == {False: (80, 48), True: (32, 48)}


def test_operators_see_that_a_sequence_is_paused() -> None:
    replica = Replica(rows=2)
    replica.take("s", max_tokens=60)
    found = replica.loop.find("s")
    assert found is not None and found.shown["status"] == "running"
    said = {SHOWN.get(status, status.value) for status in SequenceStatus}
    assert said == {"waiting", "prefilling", "running", "paused", "moving", "finished"}
    assert replica.loop.preemption.pause("s")
    assert found.shown == {"status": "paused", "migrations": 0, "pauses": 1, "breaches": 0}
    replica.loop.batch.num_paused -= 1
    replica.loop.batch.change(found, SequenceStatus.MOVING)
    assert replica.loop.suspended == [found]
