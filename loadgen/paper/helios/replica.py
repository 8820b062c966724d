"""One decode replica on one processor: it prefills, decodes, changes its depth and its model.

The parts are the service's own (engine, decode loop, slots, DREX), without processes in between.
Only the layers that are loaded are read, computed and held; memory that weights leave free is KV.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from loadgen.model_costs.engine import sequence
from loadgen.paper.clocks import TurnClock
from loadgen.paper.helios.record import ServedRequest
from loadgen.paper.native import VALUE_BYTES, held_bytes, load_native
from quadriga.checkpoint.exits import NEVER, ExitCounters, ExitParams
from quadriga.checkpoint.folder import Checkpoint
from quadriga.clock import Clock
from quadriga.core.output import EngineOutput
from quadriga.core.replica import DepthClass
from quadriga.core.request import SamplingParams, SequenceState, TokenLogprob
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.policies.drex import SegmentCosts
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.scheduling.calibration import calibrate
from quadriga.scheduling.colocated import ColocatedLoop

MAX_TOKENS = 400
_LOAD_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """What one replica has, and how it uses its exits.

    Attributes:
        num_rows: Sequences in a batch, at most.
        memory_bytes: For weights and KV together; None where nothing limits.
        is_adaptive: DREX leaves exits out that do not pay; else every token is tested at every
            exit and leaves where it passes, whatever the load.
        drafts: Where the whole model is loaded its exits draft, and all layers verify: answers are
            those of full depth. A partial depth is as ever.
    """

    num_rows: int
    memory_bytes: int | None = None
    is_adaptive: bool = False
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class TimedModel:
    """A model of the pair, and what its passes cost here.

    Attributes:
        threshold: That requests ask for.
    """

    checkpoint: Checkpoint
    costs: SegmentCosts
    threshold: float

    @property
    def full(self) -> DepthClass:
        return DepthClass(self.checkpoint.id, self.checkpoint.num_layers)

    @classmethod
    def measure(
        cls, checkpoint: Checkpoint, *, num_rows: int, threads: int, clock: Clock
    ) -> TimedModel:
        """Time the passes once at full depth, before anything is served."""
        native = load_native(checkpoint, num_rows=num_rows, threads=threads)
        costs = calibrate(native, clock, max_rows=num_rows)
        return cls(checkpoint, costs, checkpoint.exits.threshold)


def weight_bytes(native: NativeRunner) -> int:
    """Bytes of all tensors that a runner's weights are made of, each counted once."""
    return sum({t.data_ptr(): t.nbytes for t in _tensors(native.weights)}.values())


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "data_ptr"):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif is_dataclass(value):
        items = (getattr(value, f.name) for f in fields(value))
    for item in items:
        yield from _tensors(item)


class LocalReplica:
    """A decode replica in this process: it holds one engine at a time.

    Attributes:
        decoded: (model, layers run) → tokens after the first ones.
        breaches: Of these, below the threshold at the deepest loaded exit.
        held: (class, tokens decoded while it was loaded).
        peak_running: Most sequences in the batch.
        weight_bytes: Of all weights loaded: layers, embedding, heads, maps for skipped KV.
    """

    def __init__(
        self,
        models: Iterable[TimedModel],
        first: DepthClass,
        limits: ReplicaLimits,
        clock: TurnClock,
        threads: int,
    ) -> None:
        self._models = {m.checkpoint.id: m for m in models}
        self._limits = limits
        self._clock = clock
        self._threads = threads
        self.decoded: Counter[tuple[str, int]] = Counter()
        self.held: Counter[DepthClass] = Counter()
        self.breaches = 0
        self.peak_running = 0
        self._running: dict[str, ServedRequest] = {}
        self._open(first)

    def _open(self, depth_class: DepthClass) -> None:
        """Load an engine; there is none. Raises: ConfigError: The memory is too small for it."""
        model = self._models[depth_class.model]
        checkpoint = model.checkpoint
        native = load_native(
            checkpoint,
            depth=depth_class.depth,
            num_rows=self._limits.num_rows,
            threads=self._threads,
        )
        full_ends = (*checkpoint.exits.layers, checkpoint.num_layers)
        self._model, self._native = model, native
        self.weight_bytes = weight_bytes(native)
        self._counters = ExitCounters()
        self._loop = ColocatedLoop(
            native,
            native.spec,
            clock=self._clock,
            max_slots=self._limits.num_rows,
            kv_capacity_tokens=self._capacity_tokens(),
            rebatcher=make_rebatcher(
                "drex",
                model.costs.resized(full_ends, native.segment_ends),
                self._counters,
                deterministic=not self._limits.is_adaptive,
                clock=self._clock,
            ),
            counters=self._counters,
            is_partial=depth_class.depth < checkpoint.num_layers,
        )

    # What it is

    @property
    def depth_class(self) -> DepthClass:
        """What is loaded."""
        return self._native.spec.depth_class

    @property
    def is_whole(self) -> bool:
        """Whether all layers of its model are loaded."""
        return self._native.num_layers == self._model.checkpoint.num_layers

    @property
    def kv_bytes(self) -> int:
        """KV, hidden states kept and those that wait, as far as they are in use."""
        rows = [sequence.row for sequence in self._loop.decode.batch.decoding]
        return held_bytes(self._native, rows)

    @property
    def num_running(self) -> int:
        return self._loop.decode.num_running

    @property
    def used_tokens(self) -> int:
        return self._loop.decode.used_tokens

    @property
    def has_work(self) -> bool:
        return self._loop.has_work

    @property
    def max_batch(self) -> int | None:
        """Sequences it can hold, at the length promised now."""
        slots = self._loop.decode.slots
        if not slots.num_held:
            return None
        each = slots.reserved_tokens / slots.num_held
        return min(self._limits.num_rows, int(slots.kv_capacity_tokens / each))

    def _capacity_tokens(self) -> int:
        """Tokens of KV that fit beside the weights. Raises: ConfigError."""
        checkpoint, rows = self._model.checkpoint, self._limits.num_rows
        longest = rows * self._native.row_capacity_tokens
        if self._limits.memory_bytes is None:
            return longest
        left = self._limits.memory_bytes - self.weight_bytes
        per_token = checkpoint.kv_bytes_per_token(self._native.num_layers, VALUE_BYTES)
        if left < per_token * self._native.row_capacity_tokens:
            needed = self.weight_bytes + per_token * self._native.row_capacity_tokens
            raise ConfigError(
                f"--memory-mib: {self.depth_class} and one sequence take {needed / 2**20:.1f} MiB, "
                f"there are {self._limits.memory_bytes / 2**20:.1f}; give it more"
            )
        return int(min(longest, left // per_token))

    # Serving

    def admit(self, request: ServedRequest) -> bool:
        """Compute the prompt and let it take part from the next step on; False: no room now."""
        state = self._state(
            request,
            request.prompt.token_ids,
            SamplingParams(
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                num_logprobs=0 if request.is_scored else None,
            ),
        )
        first = self._compute(state)
        if first is None:
            return False
        request.classes.append(self.depth_class)
        request.first_s = request.last_s = self._clock.now_s()
        logprob = first.logprobs[0] if first.logprobs else None
        _append(request, first.token_ids[0], first.exit_layers[0], 0.0, logprob)
        if first.finish is None:
            self._running[state.sequence_id] = request
            self.peak_running = max(self.peak_running, self.num_running)
        return True

    def read_again(self, request: ServedRequest) -> list[int] | None:
        """What it says now in the place of each token of an answer; None: no room to ask."""
        prompt_ids = request.prompt.token_ids
        asked = SamplingParams(0, temperature=0.0, num_prompt_logprobs=1)
        read = self._compute(self._state(request, [*prompt_ids, *request.token_ids], asked))
        if read is None:
            return None
        assert read.prompt_logprobs is not None  # asked for
        return [said.top[0][0] for said in read.prompt_logprobs[len(prompt_ids) :]]

    def _state(
        self, request: ServedRequest, prompt_ids: list[int], sampling: SamplingParams
    ) -> SequenceState:
        exits = ExitParams(self._model.threshold, "bounded")
        if self._limits.drafts and self.is_whole:
            exits = ExitParams(NEVER, "lossless")
        return sequence(str(request.index), prompt_ids, sampling, exits=exits)

    def _compute(self, state: SequenceState) -> EngineOutput | None:
        """Compute a prompt; returns what it says, or None where there is no room for it now."""
        self._loop.submit(state)
        said = next(iter(self._loop.compute_prompts()), None)
        if said is None:
            self._loop.release(state.sequence_id)
        elif said.error is not None:
            raise said.error
        return said

    def is_over(self, request: ServedRequest) -> bool:
        """Whether an admitted request is served."""
        return str(request.index) not in self._running

    def step(self) -> list[ServedRequest]:
        """Run one step; return the requests that are done."""
        before, running = self._counters.breaches, self.num_running
        return self._take(self._loop.step(), self._counters.breaches - before, running)

    def _take(
        self, emissions: list[EngineOutput], breaches: int, running: int
    ) -> list[ServedRequest]:
        now_s, ended, here = self._clock.now_s(), [], self.depth_class
        deepest = sum(e.exit_layers[0] == here.depth for e in emissions if e.exit_layers)
        share = breaches / deepest if deepest else 0.0
        self.breaches += breaches
        for emission in emissions:
            if emission.error is not None:
                raise emission.error
            request = self._running[emission.sequence_id]
            logprobs: Sequence[TokenLogprob | None]
            logprobs = emission.logprobs or [None] * len(emission.token_ids)
            for token_id, layers, logprob in zip(
                emission.token_ids, emission.exit_layers, logprobs, strict=True
            ):
                is_deepest = layers == here.depth
                _append(request, token_id, layers, share if is_deepest else 0.0, logprob)
                self.decoded[here.model, layers] += 1
                self.held[here] += 1
            request.batch_sum += running
            request.last_s = now_s
            if emission.finish is not None:
                ended.append(self._running.pop(emission.sequence_id))
        return ended

    # Changing

    def resize(self, depth: int) -> tuple[float, list[ServedRequest]]:
        """Load more layers, or drop some, with all requests in flight.

        Returns:
            Seconds that reading took, and the requests that got a last token on the way.

        Raises:
            ConfigError: It cannot be done; nothing has changed.
        """
        ended: list[ServedRequest] = []
        load_s = 0.0
        if depth > self._native.num_layers:
            with self._native.prepare_depth(depth, timeout_s=_LOAD_TIMEOUT_S) as prepared:
                load_s = prepared.load_s
                self._loop.decode.take_depth(prepared)
        else:
            before, running = self._counters.breaches, self.num_running
            shrunk = self._loop.decode.drop_to(depth)
            if shrunk.blocked_by:
                raise ConfigError(f"{len(shrunk.blocked_by)} sequences need the layers")
            emissions = [e for _, e in shrunk.emissions]
            ended = self._take(emissions, self._counters.breaches - before, running)
            self._native.wait_freed(_LOAD_TIMEOUT_S)
        self.weight_bytes = weight_bytes(self._native)
        self._loop.decode.slots.resize(self._capacity_tokens())
        for request in self._running.values():
            if self.depth_class not in request.classes:
                request.classes.append(self.depth_class)
        return load_s, ended

    def switch(self, depth_class: DepthClass) -> float:
        """Hold another model instead; no request is in flight. Returns the seconds it took."""
        if self._running:
            raise InvariantViolation(f"{len(self._running)} sequences are in flight at a switch")
        before, began_s = self.depth_class, self._clock.now_s()
        self._close()
        try:
            self._open(depth_class)
        except ConfigError:
            self._open(before)
            raise
        return self._clock.now_s() - began_s

    def _close(self) -> None:
        self._loop.check()
        self._native.close()
        del self._loop, self._native  # their memory is free before the next one's is taken
        with self._clock.stopped():  # where the service ends a process, Python collects garbage
            gc.collect()

    def check(self) -> None:
        """Verify the books. Raises: InvariantViolation."""
        self._loop.check()


def _append(
    request: ServedRequest,
    token_id: int,
    layers: int,
    breached: float,
    logprob: TokenLogprob | None,
) -> None:
    request.token_ids.append(token_id)
    request.exit_layers.append(layers)
    request.breached.append(breached)
    if logprob is not None and logprob.logprob is not None:
        request.nll -= logprob.logprob
        request.num_scored += 1
