"""Whatever comes, leaves and outranks whom: nobody is lost, starved, or says another word."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import KVCacheExhausted
from tests.crowded_replica import ROW, Replica, output_of


@dataclass(frozen=True)
class Arrival:
    """One sequence; `cancel_after` its arrival, in steps, or None."""

    prompt: int
    max_tokens: int
    priority: int
    at_step: int
    cancel_after: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        prompt=st.integers(1, 60),
        max_tokens=st.integers(2, ROW - 60),
        priority=st.integers(-1, 1),
        at_step=st.integers(0, 60),
        cancel_after=st.none() | st.integers(0, 80),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=40)
@given(
    arrivals=ARRIVALS,
    rows=st.integers(1, 6),
    pause_every=st.integers(0, 9),
    answer_tokens=st.sampled_from([1, 30, 200]),
    step_s=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_everybody_ends_with_their_own_words(
    arrivals: list[Arrival], rows: int, pause_every: int, answer_tokens: int, step_s: float
) -> None:
    replica = Replica(rows=rows, answer_tokens=answer_tokens, step_s=step_s)
    loop = replica.loop
    waiting: list[tuple[int, int, str, Arrival]] = []
    cancelled: set[str] = set()
    # One row, one token a step, everybody after everybody else: nobody may take longer than that,
    # pauses that are asked for included.
    patience = 120 + 2 * sum(a.max_tokens for a in arrivals)
    for step in range(patience):
        for i, arrival in enumerate(arrivals):
            if arrival.at_step == step:
                waiting.append((arrival.priority, i, f"s{i}", arrival))
            is_due = arrival.cancel_after is not None and (
                arrival.at_step + arrival.cancel_after == step
            )
            if is_due and f"s{i}" in replica.states:
                is_over = len(replica.states[f"s{i}"].output_ids) == arrival.max_tokens
                if not is_over:
                    assert loop.leave(f"s{i}") is not None
                    cancelled.add(f"s{i}")
        waiting.sort(key=lambda w: w[:2])
        while waiting:  # the head of the line first, and nobody past it
            priority, _, name, arrival = waiting[0]
            try:
                replica.take(
                    name, prompt=arrival.prompt, max_tokens=arrival.max_tokens, priority=priority
                )
            except KVCacheExhausted:
                break
            waiting.pop(0)
        replica.step()
        if pause_every and step % (3 * pause_every) == 0 and loop.running:
            loop.preemption.pause(loop.running[step % len(loop.running)].sequence_id)
        if step > 60 and not waiting and not loop.has_work:
            break
    assert not waiting, "somebody was never let in"
    for i, arrival in enumerate(arrivals):
        state = replica.states[f"s{i}"]
        length = len(state.output_ids)
        assert state.output_ids == output_of(state.prompt_ids, length)
        assert length == arrival.max_tokens or state.sequence_id in cancelled
    assert loop.slots.owners == []
    assert loop.slots.reserved_tokens == 0 and loop.suspended == []
