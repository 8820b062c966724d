"""The books are looked at when an engine falls idle, and a contradiction is not carried on."""

from __future__ import annotations

import pytest

from quadriga.clock import ManualClock
from quadriga.errors import InvariantViolation
from quadriga.scheduling.idle_check import IdleCheck, Leaks


def test_once_per_idle_spell_and_not_too_often() -> None:
    clock, looks = ManualClock(), []
    check = IdleCheck(lambda: bool(looks.append(clock.now_s())), clock, every_s=5.0)
    for is_idle in (True, True, False, True, True):
        check.step(is_idle=is_idle)
    assert len(looks) == 1, "the second spell came too soon"
    clock.advance(5.0)
    check.step(is_idle=False)
    assert len(looks) == 1, "never while there is work"
    for _ in range(3):
        check.step(is_idle=True)
        clock.advance(5.0)
    assert len(looks) == 2, "once per spell"


def test_a_check_may_ask_for_another_look() -> None:
    clock, looks = ManualClock(), []

    def look() -> bool:
        looks.append(clock.now_s())
        return len(looks) < 3

    check = IdleCheck(look, clock, every_s=1.0)
    for _ in range(10):
        check.step(is_idle=True)
        clock.advance(1.0)
    assert len(looks) == 3


def test_a_violation_goes_up() -> None:
    def look() -> bool:
        raise InvariantViolation("row 3 is not where its sequence thinks it is")

    with pytest.raises(InvariantViolation, match="row 3"):
        IdleCheck(look, ManualClock()).step(is_idle=True)


def test_a_slot_nobody_claims_is_a_leak_after_a_while() -> None:
    leaks = Leaks()
    assert not leaks.check(["a"], {"a", "b"}, now_s=0.0)
    assert leaks.check(["a", "b"], {"a"}, now_s=1.0), "b changes hands, maybe"
    assert leaks.check(["b"], set(), now_s=30.0)
    assert not leaks.check(["b"], {"b"}, now_s=40.0), "it was claimed after all"
    assert leaks.check(["b"], set(), now_s=41.0)
    assert leaks.check(["b"], set(), now_s=70.0)
    with pytest.raises(InvariantViolation, match=r"1 slots .* \['b'\]"):
        leaks.check(["b"], set(), now_s=71.0)
