"""A decode replica that makes every step, sequence by sequence: what the fast one must equal."""

from __future__ import annotations

import math
from collections.abc import Callable

from quadriga.core.forecast import LengthPrediction
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.policies.slot_reservation import AnswerLengths
from quadriga.scheduling.preemption import choose_return, choose_victim, is_overdue
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.slots import BLOCK_TOKENS
from quadriga.sim.profiles import CostProfile
from quadriga.sim.records import Gaps, Happened, MemoryRules, Sequence
from tests.sequences import make_sequence


class StepwiseReplica:
    """The interface of `DecodeReplica`; one event a step, no sums, no closed forms."""

    def __init__(
        self, name: str, profile: CostProfile, rules: MemoryRules, on_gaps: Callable[[Gaps], None]
    ) -> None:
        self.name, self.profile, self.rules, self._on_gaps = name, profile, rules, on_gaps
        self.steps = 0
        self.anchor_s = 0.0
        self.running: dict[int, Sequence] = {}
        self.waiting: list[tuple[float, Sequence]] = []
        self.halted_at: dict[int, tuple[float, Sequence]] = {}
        self.leaving: dict[int, float] = {}
        self.promised: dict[int, int] = {}
        self.size: dict[int, int] = {}  # KV tokens of the running, counted one by one
        self.answers = AnswerLengths()
        self.predict: Callable[[int, int], LengthPrediction | None] = lambda index, tokens: None

    @property
    def tokens(self) -> int:
        return sum(self.size.values())

    front_share = 1.0

    def _share(self, sequence: Sequence) -> float:
        return self.front_share + (1.0 - self.front_share) * sequence.stays

    @property
    def work(self) -> float:
        return sum(self._share(s) for s in self.running.values())

    @property
    def modelled_step_s(self) -> float:
        step = self.profile.step
        tokens = sum(self._share(s) * self.size[i] for i, s in self.running.items())
        nobody = math.prod(1.0 - s.stays for s in self.running.values()) if self.running else 0.0
        read = 1.0 - nobody * (1.0 - self.front_share)
        return read * step.base_s + step.per_sequence_s * self.work + step.per_token_s * tokens

    @property
    def held_tokens(self) -> int:
        paused = sum(s.tokens for _, s in self.halted_at.values())
        return self.tokens + paused + sum(self.promised.values())

    def spare_tokens(self) -> list[int]:
        if self.rules.reservation == "longest":
            return []
        spare = [s.promised_tokens - self.size[i] for i, s in self.running.items()]
        return [tokens for tokens in spare if tokens > 0]

    held_up_s = num_lowered = 0.0

    @property
    def first_step_s(self) -> float:
        return self.modelled_step_s

    @property
    def slope_s(self) -> float:
        return self.profile.step.per_token_s * self.work

    @property
    def num_halted(self) -> int:
        return len(self.halted_at)

    @property
    def num_held(self) -> int:
        return len(self.running) + len(self.halted_at) + len(self.promised)

    def join(self, sequence: Sequence, *, ready_s: float) -> None:
        self.promised.setdefault(sequence.index, max(sequence.tokens, sequence.promised_tokens))
        self.waiting.append((ready_s, sequence))

    def leave(self, index: int, *, from_s: float) -> None:
        self.leaving[index] = from_s

    def release(self, index: int) -> Sequence:
        return self.halted_at.pop(index)[1]

    def stay(self, index: int) -> None:
        self.leaving.pop(index, None)

    def kill(self, now_s: float) -> list[Sequence]:
        while self.running and self.anchor_s + self.modelled_step_s <= now_s:
            self._step()
        for index, sequence in self.running.items():
            sequence.tokens = self.size[index]
        lost = [*self.running.values(), *(s for _, s in self.halted_at.values())]
        lost += [s for _, s in sorted(self.waiting, key=lambda w: (w[0], w[1].index))]
        for held in (self.running, self.size, self.halted_at, self.promised, self.leaving):
            held.clear()
        self.waiting.clear()
        self.anchor_s = now_s
        return lost

    def next_event_s(self) -> float:
        if self.running:
            wanted = [s for s, _ in self.waiting] + list(self.leaving.values())
            if any(s <= self.anchor_s for s in wanted):
                return self.anchor_s
            return self.anchor_s + self.modelled_step_s
        if self.halted_at and not self.waiting:
            return self.anchor_s
        return max(min((s for s, _ in self.waiting), default=math.inf), self.anchor_s)

    def run_to_event(self, now_s: float) -> Happened:
        wanted = [s for s, _ in self.waiting] + list(self.leaving.values())
        if self.running and not any(s <= self.anchor_s for s in wanted):
            self._step()
        self.anchor_s = max(self.anchor_s, now_s)
        happened = Happened()
        for index in sorted(self.running):
            if self.size[index] == self.running[index].final_tokens:
                done = self.running[index]
                self.answers.ended(done.final_tokens - done.prompt_tokens)
                happened.finished.append(self._out(index))
        for index in sorted(i for i, s in self.leaving.items() if s <= now_s):
            del self.leaving[index]
            if index in self.running:
                happened.left.append(self._out(index))
        for item in sorted(self.waiting, key=lambda w: (w[0], w[1].index)):
            if item[0] <= self.anchor_s:
                self.waiting.remove(item)
                del self.promised[item[1].index]
                self._in(item[1])
                happened.joined[item[1].index] = item[1]
        capacity = self.profile.kv_capacity_tokens
        limit = math.floor(self.rules.high * capacity)
        is_full = self.tokens > capacity
        if is_full:
            for sequence in self.running.values():
                sequence.promised_tokens = 0
        while is_full and self.tokens > (limit if len(self.running) > 1 else capacity):
            victim = choose_victim(
                [
                    RunningSequence(
                        self._state(s),
                        num_tokens=self.size[s.index],
                        num_pauses=s.num_pauses,
                        stays_until=s.stays_until,
                    )
                    for s in self.running.values()
                ]
            )
            assert victim is not None
            sequence = self._out(int(victim.state.sequence_id))
            sequence.num_pauses += 1
            self.halted_at[sequence.index] = (self.anchor_s, sequence)
            happened.preempted.append(sequence)
        self._resume(happened)
        return happened

    def _resume(self, happened: Happened) -> None:
        while self.halted_at:
            first = choose_return(
                (RunningSequence(self._state(s), since_s=at) for at, s in self.halted_at.values()),
                self.anchor_s,
            )
            assert first is not None
            sequence = self.halted_at[int(first.state.sequence_id)][1]
            coming = sum(s.tokens for _, s in self.waiting)
            room = self.rules.low * self.profile.kv_capacity_tokens
            busy = bool(self.running or self.waiting)
            if busy and self.tokens + coming + sequence.tokens + 1 > room:
                return
            if is_overdue(first, self.anchor_s):
                sequence.stays_until = sequence.tokens + BLOCK_TOKENS
            del self.halted_at[sequence.index]
            if self.rules.on_full == "pause":
                num_bytes = sequence.tokens * self.profile.kv_bytes_per_token
                back_s = num_bytes / self.profile.host_bandwidth_bytes_per_s
                self.join(sequence, ready_s=self.anchor_s + back_s)
                happened.resumed.append(sequence)
            else:
                self.anchor_s += self.profile.prefill_s([sequence.tokens])
                self._in(sequence)
                happened.joined[sequence.index] = sequence

    def _step(self) -> None:
        self.anchor_s += self.modelled_step_s
        self.steps += 1
        for index in self.size:
            self.size[index] += 1

    def _in(self, sequence: Sequence) -> None:
        self.running[sequence.index] = sequence
        self.size[sequence.index] = sequence.tokens

    def _out(self, index: int) -> Sequence:
        sequence = self.running.pop(index)
        sequence.tokens = self.size.pop(index)
        return sequence

    def _state(self, sequence: Sequence) -> SequenceState:
        tokens = self.size.get(sequence.index, sequence.tokens)
        return make_sequence(
            str(sequence.index),
            [0] * sequence.prompt_tokens,
            SamplingParams(max_tokens=self.profile.max_tokens),
            arrival_unix_s=sequence.arrival_s,
            output_ids=[0] * (tokens - sequence.prompt_tokens),
            prediction=self.predict(sequence.index, tokens),
            predicted_at=tokens - sequence.prompt_tokens,
        )
