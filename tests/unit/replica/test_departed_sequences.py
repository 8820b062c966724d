"""A replica remembers whom it no longer has, so that cancellations reach them."""

from __future__ import annotations

from quadriga.replica.departed_sequences import MAX_REMEMBERED, DepartedSequences


def test_a_cancellation_is_remembered_for_a_sequence_that_is_not_here_yet() -> None:
    departed = DepartedSequences()
    assert not departed.is_cancelled("a")
    assert departed.cancel(["a"]) == {}
    assert departed.is_cancelled("a")


def test_a_cancellation_follows_a_sequence_to_its_new_owner_once() -> None:
    departed = DepartedSequences()
    assert departed.move("a", "d0")
    assert not departed.is_cancelled("a")
    assert departed.move("a", "d1"), "it came and went again"
    assert departed.cancel(["a", "b"]) == {"a": "d1"}
    assert departed.cancel(["a"]) == {}


def test_a_sequence_that_was_cancelled_has_no_new_owner() -> None:
    departed = DepartedSequences()
    departed.cancel(["a"])
    assert not departed.move("a", "d0")
    assert departed.is_cancelled("a")


def test_what_came_back_has_no_other_owner_and_what_was_cancelled_stays_so() -> None:
    departed = DepartedSequences()
    departed.move("a", "d0")
    departed.cancel(["b"])
    for sequence_id in ("a", "b", "c"):
        departed.come_back(sequence_id)
    assert departed.cancel(["a"]) == {}
    assert departed.is_cancelled("b")


def test_the_oldest_are_forgotten() -> None:
    departed = DepartedSequences()
    departed.cancel(["first"])
    for i in range(MAX_REMEMBERED - 1):
        departed.move(f"s{i}", "d0")
    assert departed.is_cancelled("first")
    departed.move("last", "d0")
    assert not departed.is_cancelled("first")
    assert departed.cancel(["last", "s0"]) == {"last": "d0", "s0": "d0"}
