"""Prompts go where their beginnings went, unless too much waits there."""

from __future__ import annotations

import pytest

from quadriga.config.engine import PrefillConfig
from quadriga.config.scheduling import SchedulerConfig
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import AdmitRequest
from quadriga.policies.admission import admit
from quadriga.scheduling.prefixes import affinity
from quadriga.scheduling.prefixes.affinity import PrefixAffinity, prefix_marks

CLASS = DepthClass("m", 8)


def replica(name: str, role: Role, waiting_tokens: int = 0) -> ReplicaSnapshot:
    info = ReplicaInfo(name, role, CLASS, "node", name, num_slots=8, kv_capacity_tokens=100_000)
    return ReplicaSnapshot(info, taken_unix_s=0.0, waiting_tokens=waiting_tokens)


def chosen(
    known: PrefixAffinity, prompt: list[int], *waiting: int, weight: float = 2.0, salt: str = ""
) -> str:
    """Where a prompt goes, with so many tokens waiting at prefill replicas a, b, …; notes it."""
    marks = prefix_marks(prompt, salt)
    request = AdmitRequest("s", "m", len(prompt), 10, 0, 1e9, prefix_marks=marks)
    prefills = [replica(n, Role.PREFILL, w) for n, w in zip("abc", waiting, strict=False)]
    admission = admit(
        request,
        [*prefills, replica("d", Role.DECODE)],
        now_unix_s=0.0,
        scheduler=SchedulerConfig(prefix_weight=weight),
        prefill=PrefillConfig(max_queued_tokens=5000),
        cached_tokens=known.cached_tokens(marks),
    )
    known.sent(marks, admission.prefill_replica)
    return admission.prefill_replica


def test_marks_are_of_whole_beginnings() -> None:
    prompt = list(range(700))
    marks = prefix_marks(prompt, "")
    assert [tokens for tokens, _ in marks] == [64, 128, 256, 512, 640]
    assert prefix_marks(prompt[:300] + [0] * 400, "")[:3] == marks[:3]
    assert prefix_marks(prompt[:300] + [0] * 400, "")[3] != marks[3]
    assert not set(prefix_marks(prompt, "another")) & set(marks)
    assert prefix_marks(prompt[:63], "") == ()


def test_a_prompt_follows_its_beginning_until_too_much_waits_there() -> None:
    known, prompt = PrefixAffinity(), list(range(640))
    assert chosen(known, prompt, 10, 0, 0) == "b"
    assert chosen(known, [*prompt, 1, 2], 0, 640, 0) == "b", "its copies wait for the first"
    assert chosen(known, prompt[:256] + [9] * 100, 0, 511, 0) == "b"
    assert chosen(known, prompt[:256] + [8] * 100, 0, 513, 0) == "a"
    assert chosen(known, prompt, 0, 5000, 0, weight=100) == "a", "its queue is full"


def test_other_salts_and_no_weight_follow_nobody() -> None:
    known, prompt = PrefixAffinity(), list(range(640))
    assert chosen(known, prompt, 10, 0) == "b"
    assert chosen(known, prompt, 0, 1, salt="x") == "a"
    assert chosen(known, prompt, 0, 1, weight=0.0) == "a"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "MAX_MARKS", 5)
    known = PrefixAffinity()
    prompts = [[i] * 256 for i in range(3)]
    for prompt in prompts:
        known.sent(prefix_marks(prompt, ""), "a")
    assert [known.cached_tokens(prefix_marks(p, "")) for p in prompts] == [
        {},
        {"a": 256},
        {"a": 256},
    ]
