"""One decode replica's loop, driven directly: as many sequences as it has slots, always.

Prompts are computed outside the clock, as a prefill replica would; what is timed is decoding alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadgen.paper.judged import JudgedRebatcher
from quadriga.batching.decode_loop import DecodeLoop
from quadriga.batching.slots import SlotTable
from quadriga.clock import Clock
from quadriga.engine.runner import NativeRunner
from quadriga.exits import Criterion, ExitCounters, ExitParams
from quadriga.interfaces import ModelRunner, PrefillChunk
from quadriga.policies.rebatching import Rebatcher
from quadriga.training.tasks import Example
from quadriga.types import SamplingParams, SequenceState

_BYTES_EVERY = 16  # steps between two looks at the memory held


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task prompt as token ids, its prefill done once for all settings."""

    example: Example
    token_ids: list[int]


@dataclass(slots=True)
class Outcome:
    """What a run of the loop gave.

    Attributes:
        seconds: Decoding time.
        gaps_s: Every time between two tokens of a sequence.
        request_s: Per prompt, from joining to its last token.
        outputs: Per prompt, output token ids.
        peak_bytes: Most KV and kept hidden states at a time.
    """

    tokens: int = 0
    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    counters: ExitCounters = field(default_factory=ExitCounters)
    peak_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def run_closed_loop(
    prompts: Sequence[Prompt],
    *,
    runner: ModelRunner,
    native: NativeRunner,
    clock: Clock,
    make_rebatcher: Callable[[ExitCounters], Rebatcher | None],
    slots: int,
    threshold: float,
    max_tokens: int,
    criterion: Criterion,
) -> Outcome:
    """Decode every prompt with `slots` of them in flight.

    Args:
        runner: What the loop calls; `native` itself or something around it.
    """
    outcome = Outcome()
    rebatcher = make_rebatcher(outcome.counters)
    eos = native.spec.checkpoint.eos_token_ids
    loop = DecodeLoop(
        runner=runner,
        slots=SlotTable(
            num_rows=slots,
            row_capacity_tokens=native.row_capacity_tokens,
            kv_capacity_tokens=slots * native.row_capacity_tokens,
        ),
        eos_token_ids=eos,
        clock=clock,
        rebatcher=rebatcher,
        counters=outcome.counters,
        criterion=criterion,
    )
    if isinstance(rebatcher, JudgedRebatcher):
        rebatcher.waiting_rows = loop.rows_waiting_at
    queue = deque(enumerate(prompts))
    joined_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    started_s, paused_s, steps = clock.now_s(), 0.0, 0
    while queue or loop.has_work:
        if queue and loop.num_running < slots:
            before_s = clock.now_s()
            while queue and loop.num_running < slots:
                index, prompt = queue.popleft()
                _join(loop, runner, native, index, prompt, threshold, max_tokens, outcome, eos)
            spent_s = clock.now_s() - before_s
            paused_s += spent_s
            for state in loop.running:  # nobody waited for a token meanwhile: the clock stood
                key = state.sequence_id
                last_s[key] = last_s.get(key, before_s) + spent_s
                joined_s[key] = joined_s.get(key, before_s) + spent_s
        if steps % _BYTES_EVERY == 0:
            outcome.peak_bytes = max(outcome.peak_bytes, native.held_bytes(loop.rows))
        emissions = loop.step()
        steps += 1
        now_s = clock.now_s()
        for _, emission in emissions:
            key = emission.sequence_id
            outcome.gaps_s.append(now_s - last_s[key])
            last_s[key] = now_s
            outcome.outputs[int(key)].extend(emission.token_ids)
            outcome.tokens += len(emission.token_ids)
            if emission.finish is not None:
                outcome.request_s.append(now_s - joined_s[key])
    outcome.seconds = clock.now_s() - started_s - paused_s
    loop.check()
    return outcome


def _join(
    loop: DecodeLoop,
    runner: ModelRunner,
    native: NativeRunner,
    index: int,
    prompt: Prompt,
    threshold: float,
    max_tokens: int,
    outcome: Outcome,
    eos: tuple[int, ...],
) -> None:
    state = SequenceState(
        sequence_id=str(index),
        request_id=str(index),
        model=native.spec.checkpoint.id,
        prompt_ids=prompt.token_ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        ingress_id="",
        arrival_unix_s=time.time(),
        deadline_unix_s=float("inf"),
        exits=ExitParams(threshold),
    )
    slot = loop.reserve(state.sequence_id, state.max_total_tokens)
    runner.attach(slot.row, state)
    token = runner.prefill([PrefillChunk(slot.row, prompt.token_ids, 0, True)])[0]
    assert token is not None
    kv = runner.read_kv(slot.row, 0, runner.num_layers, 0, len(prompt.token_ids))
    runner.detach(slot.row)
    state.output_ids.append(token.token_id)
    state.exit_layers.append(token.exit_layer)
    outcome.outputs[index] = [token.token_id]
    if token.token_id in eos:
        loop.leave(state.sequence_id)
        return
    runner.write_kv(slot.row, 0, 0, kv)
    loop.join(state)
