"""The acknowledged log between a replica and its ingresses."""

from __future__ import annotations

from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason
from quadriga.scheduling.output_buffer import OutputBuffer


def token(sequence_id: str, index: int, token_id: int = 7) -> EngineOutput:
    return EngineOutput(
        sequence_id, epoch=0, first_index=index, token_ids=[token_id], exit_layers=[4]
    )


def test_a_lost_reply_is_given_again() -> None:
    output_buffer = OutputBuffer("r1")
    output_buffer.put("i", token("a", 0), now_s=0)
    lost = output_buffer.collect("i", 0, now_s=1)
    again = output_buffer.collect("i", 0, now_s=2)
    assert again == lost
    assert output_buffer.collect("i", again.last_seq, now_s=3).emissions == []


def test_unsent_tokens_are_put_together_and_sent_ones_never_change() -> None:
    output_buffer = OutputBuffer("r1")
    output_buffer.put("i", token("a", 0, 10), now_s=0)
    output_buffer.put("i", token("b", 0, 20), now_s=0)
    output_buffer.put("i", token("a", 1, 11), now_s=0)
    first = output_buffer.collect("i", 0, now_s=0)
    assert [(e.sequence_id, e.token_ids) for e in first.emissions] == [("a", [10, 11]), ("b", [20])]
    output_buffer.put("i", token("a", 2, 12), now_s=0)
    second = output_buffer.collect("i", 0, now_s=0)
    assert [e.token_ids for e in second.emissions] == [[10, 11], [20], [12]]


def test_a_finish_is_merged_and_nothing_after_it() -> None:
    output_buffer = OutputBuffer("r1")
    output_buffer.put("i", token("a", 0), now_s=0)
    last = token("a", 1)
    last.finish = FinishReason.STOP
    output_buffer.put("i", last, now_s=0)
    output_buffer.put("i", EngineOutput("a", epoch=1, moved_to="r2"), now_s=0)
    emissions = output_buffer.collect("i", 0, now_s=0).emissions
    assert [e.finish for e in emissions] == [FinishReason.STOP, None]
    assert emissions[1].moved_to == "r2"


def test_a_gap_an_epoch_and_a_move_are_not_merged() -> None:
    output_buffer = OutputBuffer("r1")
    output_buffer.put("i", token("a", 0), now_s=0)
    output_buffer.put("i", token("a", 2), now_s=0)
    later_epoch = token("a", 3)
    later_epoch.epoch = 1
    output_buffer.put("i", later_epoch, now_s=0)
    assert len(output_buffer.collect("i", 0, now_s=0).emissions) == 3


def test_a_partial_acknowledgement_keeps_the_rest() -> None:
    output_buffer = OutputBuffer("r1")
    output_buffer.put("i", token("a", 0), now_s=0)
    first = output_buffer.collect("i", 0, now_s=0)
    output_buffer.put("i", token("a", 1), now_s=0)
    output_buffer.collect("i", 0, now_s=0)
    rest = output_buffer.collect("i", first.last_seq, now_s=0)
    assert [e.first_index for e in rest.emissions] == [1]
    assert output_buffer.num_pending == 1


def test_an_acknowledgement_of_what_was_never_sent_drops_nothing() -> None:
    output_buffer = OutputBuffer("r1")
    output_buffer.put("i", token("a", 0), now_s=0)
    assert len(output_buffer.collect("i", 99, now_s=0).emissions) == 1


def test_silence_is_noticed_and_a_dropped_ingress_forgotten() -> None:
    output_buffer = OutputBuffer("r1")
    output_buffer.put("gone", token("a", 0), now_s=0)
    output_buffer.put("here", token("b", 0), now_s=0)
    output_buffer.collect("here", 0, now_s=29)
    assert output_buffer.silent(now_s=31, longer_than_s=30) == ["gone"]
    output_buffer.drop("gone")
    assert output_buffer.num_pending == 1


def test_what_an_ingress_may_not_know_of_a_sequence() -> None:
    output_buffer = OutputBuffer("r1")
    assert output_buffer.unacknowledged("i", "a") == []
    output_buffer.put("i", token("a", 0, 10), now_s=0)
    output_buffer.put("i", token("b", 0, 20), now_s=0)
    first = output_buffer.collect("i", 0, now_s=0)
    output_buffer.put("i", token("a", 1, 11), now_s=0)
    output_buffer.put("i", EngineOutput("a", epoch=0, moved_to="r2", move="begun"), now_s=0)
    output_buffer.put("i", token("a", 2, 12), now_s=0)
    assert [e.token_ids for e in output_buffer.unacknowledged("i", "a")] == [[10], [11], [12]]
    output_buffer.collect("i", first.last_seq, now_s=0)
    assert [e.token_ids for e in output_buffer.unacknowledged("i", "a")] == [[11], [12]]
    assert output_buffer.unacknowledged("another", "a") == []
