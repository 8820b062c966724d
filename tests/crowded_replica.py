"""A decode loop over a fake runner whose memory is soon full."""

from __future__ import annotations

from quadriga.clock import ManualClock
from quadriga.core.replica import Reservation
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.policies.slot_reservation import WINDOW
from tests.fake_runner import FakeRunner, next_token
from tests.sequences import make_decode_loop, make_sequence, make_slots

ROW = 160
CAPACITY = 320  # newcomers are let in up to 288


def output_of(prompt: list[int], count: int) -> list[int]:
    """What a sequence alone would generate, end tokens ignored."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Replica:
    """One decode loop over a fake runner.

    Args:
        answer_tokens: Length of all answers it has seen so far.
        step_s: What every step takes.
    """

    def __init__(
        self,
        *,
        rows: int = 8,
        reservation: Reservation = "used",
        answer_tokens: int = 1,
        step_s: float = 0.0,
    ) -> None:
        self.runner = FakeRunner(rows)
        self.clock = ManualClock()
        self._step_s = step_s
        self.loop = make_decode_loop(
            self.runner, make_slots(rows, ROW, CAPACITY, reservation=reservation), self.clock
        )
        for _ in range(WINDOW):
            self.loop.answers.ended(answer_tokens)
        self.states: dict[str, SequenceState] = {}

    def take(
        self, name: str, *, prompt: int = 15, max_tokens: int = 100, priority: int = 0
    ) -> SequenceState:
        """Reserve, fill and join, as a hand-off does."""
        state = make_sequence(
            name,
            [3 + len(self.states) + i for i in range(prompt)],
            SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            arrival_unix_s=float(len(self.states)),
            priority=priority,
        )
        slot = self.loop.reserve(name, state.max_total_tokens, prompt, priority)
        state.output_ids += output_of(state.prompt_ids, 1)
        state.exit_layers.append(self.runner.num_layers)
        self.runner.write_kv(slot.row, 0, 0, list(state.prompt_ids))
        self.loop.join(state)
        self.states[name] = state
        return state

    def step(self) -> None:
        """One step, after which the books are right."""
        self.clock.advance(self._step_s)
        self.loop.step()
        self.loop.check()
        assert self.loop.slots.reserved_tokens <= self.loop.slots.kv_capacity_tokens

    def finish(self) -> None:
        for _ in range(5000):
            if not self.loop.has_work:
                break
            self.step()
        for state in self.states.values():
            wanted = output_of(state.prompt_ids, state.sampling.max_tokens)
            assert state.output_ids == wanted, state.sequence_id
        assert self.loop.slots.owners == []
        assert self.loop.suspended == []

    @property
    def paused(self) -> set[str]:
        running = {s.sequence_id for s in self.loop.running[: self.loop.num_running]}
        return {s.sequence_id for s in self.loop.running} - running
