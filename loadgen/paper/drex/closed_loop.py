"""One decode replica's loop, driven directly: as many sequences as it has slots.

Prompts are computed outside the clock, as a prefill replica would; what is timed is decoding alone,
and only while all slots are taken, from when as many sequences have ended as there are slots: until
then policies learn. The last sequences are decoded to their end for their answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from loadgen.load.task_suite import TaskPrompt
from loadgen.model_costs.engine import sequence
from loadgen.paper.clocks import TurnClock
from loadgen.paper.native import held_bytes
from loadgen.paper.token_times import TokenTimes
from quadriga.checkpoint.exits import ExitCounters, ExitParams
from quadriga.clock import Clock
from quadriga.core.request import SamplingParams
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError
from quadriga.interfaces import ModelRunner
from quadriga.policies.rebatching import Rebatcher
from quadriga.scheduling.colocated import ColocatedLoop
from quadriga.scheduling.decode_loop import DecodeLoop

PROMPTS_A_SLOT = 3
"""At least: with fewer, most of a run is its beginning and its end."""
_BYTES_EVERY = 16  # steps between two looks at the memory held


@dataclass(slots=True)
class ClosedLoopRun:
    """What a run of the loop gave.

    Attributes:
        tokens, seconds, steps: Tokens, decoding time and passes with all slots taken.
        at_exit: Layers run → tokens, of these.
        gaps_s: Every time between two tokens of a sequence, of these, as its reader sees them.
        request_s: Per prompt that was done by then, from joining to its last token.
        outputs: Per prompt, output token ids.
        exit_layers: Per prompt, the layers run for each output token.
        peak_bytes: Most KV and kept hidden states at a time.
        filled_tokens: Positions × segments whose skipped KV was filled in.
        copied_bytes: Hidden states kept for that.
    """

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    at_exit: dict[int, int] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    exit_layers: dict[int, list[int]] = field(default_factory=dict)
    counters: ExitCounters = field(default_factory=ExitCounters)
    peak_bytes: int = 0
    filled_tokens: int = 0
    copied_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def early_share(self, num_layers: int) -> float:
        """Share of the tokens that left before layer `num_layers`."""
        tokens = self.at_exit
        return 1.0 - tokens.get(num_layers, 0) / max(1, sum(tokens.values()))


def check_prompts(num_prompts: int, slots: int) -> None:
    """Raises: ConfigError: There are too few prompts to fill the slots."""
    least = PROMPTS_A_SLOT * slots
    if num_prompts < least:
        raise ConfigError(
            f"--prompts: {num_prompts} are too few for {slots} slots; take {least} or more"
        )


def run_closed_loop(
    prompts: Sequence[TaskPrompt],
    *,
    runner: ModelRunner,
    native: NativeRunner,
    clock: Clock,
    make_rebatcher: Callable[[ExitCounters], Rebatcher | None],
    slots: int,
    exits: ExitParams,
    max_tokens: int,
    on_loop: Callable[[DecodeLoop], None] | None = None,
) -> ClosedLoopRun:
    """Decode every prompt with `slots` of them in flight; see `closed_loop`."""
    outcome, watch = ClosedLoopRun(), TurnClock(clock)
    steps = closed_loop(
        prompts,
        outcome,
        runner=runner,
        native=native,
        watch=watch,
        make_rebatcher=make_rebatcher,
        slots=slots,
        exits=exits,
        max_tokens=max_tokens,
        on_loop=on_loop,
    )
    with watch.turn():
        deque(steps, maxlen=0)
    return outcome


def closed_loop(
    prompts: Sequence[TaskPrompt],
    outcome: ClosedLoopRun,
    *,
    runner: ModelRunner,
    native: NativeRunner,
    watch: TurnClock,
    make_rebatcher: Callable[[ExitCounters], Rebatcher | None],
    slots: int,
    exits: ExitParams,
    max_tokens: int,
    on_loop: Callable[[DecodeLoop], None] | None = None,
) -> Generator[int]:
    """Decode every prompt with `slots` of them in flight, step by step, in turns of `watch`.

    Args:
        outcome: Filled in.
        runner: What the loop calls; `native` itself or something around it.
        on_loop: Called with the decode loop before its first step.

    Yields:
        New tokens, after each step.

    Raises:
        ConfigError: There are too few prompts to fill the slots.
    """
    check_prompts(len(prompts), slots)
    skipped = native.skipped
    before = (skipped.num_filled, skipped.copied_bytes) if skipped is not None else (0, 0)
    loop = ColocatedLoop(
        runner,
        native.spec,
        clock=watch,
        max_slots=slots,
        kv_capacity_tokens=slots * native.row_capacity_tokens,
        rebatcher=make_rebatcher(outcome.counters),
        counters=outcome.counters,
    )
    decode = loop.decode
    if on_loop is not None:
        on_loop(decode)
    queue = deque(enumerate(prompts))
    joined_s: dict[str, float] = {}
    times: dict[str, TokenTimes] = {}
    started_s, is_full, num_ended, warm_up = watch.now_s(), True, 0, dict[int, int]()
    while queue or loop.has_work or is_full:
        with watch.stopped():
            while queue and decode.num_running < slots:
                index, prompt = queue.popleft()
                sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
                loop.submit(sequence(str(index), prompt.token_ids, sampling, exits=exits))
                for first in loop.compute_prompts():
                    outcome.outputs[index] = list(first.token_ids)
                    outcome.exit_layers[index] = list(first.exit_layers)
                    joined_s[str(index)] = watch.now_s()
                    times[str(index)] = TokenTimes(joined_s[str(index)], exits.sla_tbt_s)
            if is_full and decode.num_running < slots:
                is_full, outcome.seconds = False, watch.now_s() - started_s
                tokens = outcome.counters.tokens
                outcome.at_exit = {k: n - warm_up.get(k, 0) for k, n in tokens.items()}
            if outcome.steps % _BYTES_EVERY == 0:
                rows = [sequence.row for sequence in decode.batch.decoding]
                outcome.peak_bytes = max(outcome.peak_bytes, held_bytes(native, rows))
        if not loop.has_work:
            continue  # the only slot's last sequence has ended
        emissions = loop.step()
        now_s = watch.now_s()
        outcome.steps += is_full
        for emission in emissions:
            key = emission.sequence_id
            outcome.outputs[int(key)].extend(emission.token_ids)
            outcome.exit_layers[int(key)].extend(emission.exit_layers)
            ends = emission.finish is not None
            gaps_s = times[key].came(len(emission.token_ids), now_s, ends=ends)
            if is_full:
                outcome.tokens += len(emission.token_ids)
                outcome.gaps_s += gaps_s
                if ends:
                    outcome.request_s.append(now_s - joined_s[key])
            num_ended += ends
        if num_ended >= slots and not warm_up:
            outcome.tokens = outcome.steps = 0
            outcome.gaps_s, outcome.request_s = [], []
            started_s, warm_up = now_s, dict(outcome.counters.tokens)
        yield sum([len(emission.token_ids) for emission in emissions])
    loop.check()
    if skipped is not None:
        outcome.filled_tokens = skipped.num_filled - before[0]
        outcome.copied_bytes = skipped.copied_bytes - before[1]
