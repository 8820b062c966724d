"""`ModelRunner` over a natively implemented model: KV rows, forward passes, sampling."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quadriga.engine.compiled import CompiledDecoder, KernelSwap
from quadriga.engine.cuda.decoder import PagedDecoder
from quadriga.engine.cuda.loading import find_gpu, load_paged
from quadriga.engine.depth import (
    PreparedLayers,
    check_depth,
    layer_bytes,
    let_go,
    prepare,
    repay,
    resizable,
    shallower,
    spec_at,
)
from quadriga.engine.host_tensor import HostTensor
from quadriga.engine.kv_cache import KVCache
from quadriga.engine.left import Left
from quadriga.engine.models.config import read_model_config
from quadriga.engine.models.decoder import AnyDecoder, Candidates, Decoder, top_two
from quadriga.engine.models.layers import Span
from quadriga.engine.prompt_scores import PromptScores, wants_scores
from quadriga.engine.rebuild import RecordedPass, recorded_depths
from quadriga.engine.row_engine import kept_at_end, load_rows
from quadriga.engine.row_parts import RowRest, SuspendedRow
from quadriga.engine.sampler import RowSampler, choose, process, sample
from quadriga.engine.skipped_kv import SkippedKVStore
from quadriga.engine.weights import ModelWeights
from quadriga.engine_spec import EngineSpec
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.interfaces import LayersDone, PrefillChunk
from quadriga.types import KVExtent, SampledToken, SequenceState

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Exit:
    """The exit that was run last, until the next pass.

    Attributes:
        index: Row → its place in `found`, `samplers` and `hidden`.
        samplers: Of the rows.
        is_plain: All of the samplers are.
        hidden: [n, hidden], as the rows reached the exit.
    """

    depth: int
    segment: int
    index: dict[int, int]
    found: Candidates
    samplers: list[RowSampler]
    is_plain: bool
    hidden: torch.Tensor


class NativeRunner:
    """One model at one depth on one device; see `quadriga.interfaces.ModelRunner`.

    One thread calls everything except `read_kv` and `write_kv`, which other threads may call for
    rows that no pass is working on, and `prepare_depth`.

    Attributes:
        spec: What is loaded now.
    """

    def __init__(
        self,
        spec: EngineSpec,
        decoder: Decoder | PagedDecoder,
        cache: KVCache,
        skipped: SkippedKVStore | None = None,
    ) -> None:
        self.spec = spec
        self._started = spec
        self._config = decoder.config
        self._eager = decoder
        self._decoder: AnyDecoder = decoder
        self._swap = KernelSwap(spec, decoder) if isinstance(decoder, Decoder) else None
        self._cache = cache
        self._samplers: list[RowSampler | None] = [None] * cache.num_rows
        self._scores = PromptScores()
        self._ends = (*spec.exits.layers, spec.depth)
        self._skipped = skipped
        # Each row's current token: where it is, and the hidden state with which it left its last
        # segment. Nothing moves when a token waits: whoever runs it next finds it by its row.
        self._positions = np.zeros(cache.num_rows, dtype=np.int64)
        embed = decoder.weights.embed
        self._device = embed.device
        self._hidden = torch.zeros(
            cache.num_rows, decoder.config.hidden_size, dtype=embed.dtype, device=embed.device
        )
        self._exit: _Exit | None = None
        self._left: Left | None = None
        self._freeing: threading.Event | None = None

    @classmethod
    def load(cls, spec: EngineSpec) -> NativeRunner:
        """Read the weights and reserve the KV rows.

        Raises:
            ConfigError: The checkpoint or the spec cannot be served.
        """
        torch.set_num_threads(spec.threads)
        config = read_model_config(spec.checkpoint.path)
        if config.rope is None and spec.row_capacity_tokens > config.max_positions:
            raise ConfigError(
                f"engine.max_model_len: {spec.row_capacity_tokens} is beyond the "
                f"{config.max_positions} learned positions of {spec.checkpoint.id}",
                param="engine.max_model_len",
            )
        if spec.device == "cuda":
            engine = load_paged(spec, config, find_gpu())
            return cls(engine.spec, engine.decoder, engine.cache, engine.skipped)
        loaded = load_rows(spec, config)
        return cls(spec, loaded.decoder, loaded.cache, loaded.skipped)

    @property
    def left(self) -> Left | None:
        """Who left in the last pass; None where nobody did, or before the first."""
        return self._left

    @property
    def skipped(self) -> SkippedKVStore | None:
        """What early tokens left behind; None without exits."""
        return self._skipped

    @property
    def segment_ends(self) -> tuple[int, ...]:
        """See `ModelRunner.segment_ends`."""
        return self._ends

    @property
    def num_layers(self) -> int:
        return self._decoder.num_layers

    @property
    def num_rows(self) -> int:
        return self._cache.num_rows

    @property
    def row_capacity_tokens(self) -> int:
        return self._cache.capacity

    @property
    def is_compiled(self) -> bool:
        """Whether the next pass runs on the compiled kernels; on GPUs, as a graph."""
        if isinstance(self._decoder, PagedDecoder):
            return self._decoder.graphs is not None
        return self._swap is None or self._swap.take() is not None

    def wait_compiled(self, timeout_s: float) -> bool:
        """Wait for a compilation under way; return `is_compiled`."""
        if self._swap is not None:
            self._swap.wait(timeout_s)
        return self.is_compiled

    def attach(self, row: int, state: SequenceState) -> None:
        """See `ModelRunner.attach`. Raises: InvariantViolation when the row is taken or absent."""
        if not 0 <= row < self.num_rows:
            raise InvariantViolation(f"row {row} is outside the {self.num_rows} rows")
        if self._samplers[row] is not None:
            raise InvariantViolation(f"row {row} is taken: {state.sequence_id} cannot attach")
        self._samplers[row] = RowSampler(
            state, self._config.vocab_size, self.spec.checkpoint.eos_token_ids
        )
        self._positions[row] = -1
        if self._skipped is not None:
            self._skipped.start(row, state.num_tokens - 1)

    def detach(self, row: int) -> None:
        """See `ModelRunner.detach`; a free row may be detached again."""
        self._samplers[row] = None
        self._scores.take(row)
        self._cache.release(row)
        if self._skipped is not None:
            self._skipped.release(row)

    @torch.inference_mode()
    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None = None
    ) -> list[SampledToken | None]:
        """See `ModelRunner.prefill`; all chunks go through the layers together."""
        if not chunks:
            return []
        spans: list[Span] = []
        token_ids: list[int] = []
        for chunk in chunks:
            begin = len(token_ids)
            token_ids.extend(chunk.token_ids)
            spans.append(Span(chunk.row, begin, len(token_ids), chunk.start))
            if spans[-1].stop > self.row_capacity_tokens or begin == len(token_ids):
                raise InvariantViolation(
                    f"prefill chunk of row {chunk.row} covers positions {chunk.start}.."
                    f"{spans[-1].stop}; must be non-empty and within {self.row_capacity_tokens}"
                )
        decoder = self._fastest()
        batch = decoder.plan(spans)
        x = decoder.embed(token_ids, batch)
        depths = recorded_depths(chunks, self._ends, self.spec.skipped_kv)
        if depths is None:
            for layer in range(self.num_layers):
                x = decoder.run_layers(x, batch, layer, layer + 1)
                if on_layers is not None:
                    on_layers(layer, 1)
        else:
            recorded = RecordedPass(decoder, self._cache, self.spec.skipped_kv, spans, depths)
            x = recorded.run(x, batch, self._ends, on_layers)
        if self._skipped is not None:
            for span in spans:
                self._skipped.start(span.row, span.stop)
        return self._finish_prefill(x, chunks, spans)

    @torch.inference_mode()
    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.decode`."""
        if not rows:
            return []
        samplers = self._samplers_of(rows)
        x = self._pass(rows, samplers, 0, len(self._ends))
        self._left = Left(self.num_layers, samplers, x)
        if self._skipped is not None and self._skipped.keeps_last:
            indices = np.array(rows, dtype=np.int64)
            self._skipped.leave(indices, self._positions[indices], len(self._ends) - 1, x)
        if all(s.is_plain for s in samplers):
            return [
                SampledToken(t, self.num_layers) for t in self._decoder.best(x, self.num_layers)
            ]
        return sample(self._decoder.logits(x, self.num_layers), samplers, self.num_layers)

    @torch.inference_mode()
    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        """See `ModelRunner.advance`."""
        samplers = self._samplers_of(rows)
        self._left = None
        x = self._pass(rows, samplers, first, stop)
        depth = self._ends[stop - 1]
        found = self._decoder.candidates(x, depth)
        probs = found.probs
        is_plain = all(s.is_plain for s in samplers)
        if not is_plain and process(found.logits, samplers):
            # Of these rows alone: what a row is sure of does not depend on its company.
            changed = [i for i, sampler in enumerate(samplers) if not sampler.is_plain]
            probs[changed] = top_two(found.logits[changed])
        index = dict(zip(rows, range(len(rows)), strict=True))
        self._exit = _Exit(depth, stop - 1, index, found, samplers, is_plain, x)
        if self.spec.exits.criterion == "margin":
            confidences: list[float] = (probs[:, 0] - probs[:, 1]).tolist()
        else:
            confidences = probs[:, 0].tolist()
        return confidences

    @torch.inference_mode()
    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.emit`. Raises: InvariantViolation for a row that is not at the exit."""
        at = self._exit
        try:
            chosen = [at.index[row] for row in rows] if at is not None else None
        except KeyError:
            chosen = None
        if at is None or chosen is None:
            raise InvariantViolation(f"rows {list(rows)} are not all at the exit just run")
        self._left = Left(at.depth, at.samplers, at.hidden, chosen)
        some = np.array(chosen, dtype=np.int64)
        if self._skipped is not None and (at.depth < self.num_layers or self._skipped.keeps_last):
            indices = np.array(rows, dtype=np.int64)
            places = torch.from_numpy(some).to(self._device, non_blocking=True)
            states = at.hidden.index_select(0, places)
            self._skipped.leave(indices, self._positions[indices], at.segment, states)
        if at.is_plain:
            return [SampledToken(token, at.depth) for token in at.found.best[some].tolist()]
        return choose(at.found.logits[chosen], [at.samplers[i] for i in chosen], at.depth)

    def _pass(
        self, rows: Sequence[int], samplers: Sequence[RowSampler], first: int, stop: int
    ) -> torch.Tensor:
        """Run segments [first, stop) for the current token of each row: [n, hidden]."""
        decoder = self._fastest()
        indices = np.array(rows, dtype=np.int64)
        at_rows = torch.from_numpy(indices).to(self._device, non_blocking=True)
        if first == 0:
            token_ids = []
            positions = []
            for sampler in samplers:
                state = sampler.state
                token_ids.append((state.output_ids or state.prompt_ids)[-1])
                positions.append(len(state.prompt_ids) + len(state.output_ids) - 1)
            where = np.array(positions, dtype=np.int64)
            self._positions[indices] = where
        else:
            where = self._positions[indices]
        if self._skipped is not None:
            if self._skipped.may_owe:
                self._repay_before(rows, stop)
        batch = decoder.plan_tokens(indices, where)
        x = decoder.embed(token_ids, batch) if not first else self._hidden.index_select(0, at_rows)
        if self._skipped is None:
            x = decoder.run_layers(x, batch, *self._layers_of(first, stop))
        else:
            for stretch in self._skipped.stretches(indices, where, first, stop):
                x = self._run_stretch(self._skipped, x, batch, indices, where, *stretch)
        if stop < len(self._ends) or self._may_deepen:
            self._hidden.index_copy_(0, at_rows, x)
        return x

    def _run_stretch(
        self,
        skipped: SkippedKVStore,
        x: torch.Tensor,
        batch: Any,
        rows: Ints,
        positions: Ints,
        first: int,
        stop: int,
    ) -> torch.Tensor:
        """Run segments [first, stop) for tokens, and for what they carry along: [n, hidden]."""
        decoder, count = self._decoder, len(x)
        went = skipped.enter(decoder, rows, positions, first, stop)
        if went is not None:
            batch = decoder.plan_tokens(
                np.concatenate([rows, went.rows]), np.concatenate([positions, went.positions])
            )
            x = torch.cat([x, went.states])
        x = decoder.run_layers(x, batch, *self._layers_of(first, stop))
        if went is not None:
            skipped.carried(went, x[count:], stop)
            x = x[:count]
        return x

    def _layers_of(self, first: int, stop: int) -> tuple[int, int]:
        """Layers [begin, end) of segments [first, stop)."""
        return self._ends[first - 1] if first else 0, self._ends[stop - 1]

    @property
    def num_filled(self) -> int:
        """See `ModelRunner.num_filled`."""
        return 0 if self._skipped is None else self._skipped.num_filled

    @property
    def exit_rows(self) -> list[int]:
        """Rows at the exit of the last `advance`."""
        return list(self._exit.index) if self._exit is not None else []

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Let passes be run for their time alone: afterwards all is as it was.

        Between two segments of a token only; KV that such a pass writes is either what the real
        pass will write again, or is marked as missing again.
        """
        exit_, hidden, positions = self._exit, self._hidden.clone(), self._positions.copy()
        with self._skipped.rehearsal() if self._skipped is not None else nullcontext():
            yield
        self._exit, self._hidden, self._positions = exit_, hidden, positions

    def held_bytes(self, rows: Sequence[int]) -> int:
        """Bytes of KV, of hidden states that wait and of kept ones, as far as they are in use."""
        ends = np.array([0, *self._ends])
        layers = np.diff(ends)
        unit = 2 * self._config.kv_size * self._hidden.element_size()
        total = 0
        for row in rows:
            tokens = self._sampler(row).state.num_tokens - 1
            if self._skipped is None:
                total += tokens * self.num_layers * unit
            else:
                total += int((self._skipped.computed(row, tokens) * layers).sum()) * unit
        if self._skipped is None:
            return total
        staged = len(rows) * self._hidden.shape[1] * self._hidden.element_size()
        return total + staged + self._skipped.kept_bytes()

    @torch.inference_mode()
    def suspend(self, row: int) -> SuspendedRow:
        """See `ModelRunner.suspend`."""
        extents = self.extents(row)
        kv = [
            self._cache.read(
                row, e.first_layer, e.stop_layer - e.first_layer, 0, e.num_tokens
            ).cpu()
            for e in extents
        ]
        suspended = SuspendedRow(extents, kv, self.read_rest(row))
        self.detach(row)
        return suspended

    @torch.inference_mode()
    def restore(self, row: int, state: SequenceState, suspended: SuspendedRow) -> None:
        """See `ModelRunner.restore`."""
        for extent, kv in zip(suspended.extents, suspended.kv, strict=True):
            if extent.first_layer < self.num_layers:
                self.write_kv(row, extent.first_layer, 0, kv)
        self.resume(row, state, suspended.rest)

    def extents(self, row: int) -> list[KVExtent]:
        """See `ModelRunner.extents`; one for each segment."""
        state = self._sampler(row).state
        # The newest token has KV where it was run already and waits at an exit.
        is_run = int(self._positions[row]) == state.num_tokens - 1
        num_tokens = state.num_tokens if is_run else state.num_tokens - 1
        tokens = [num_tokens] * len(self._ends)
        if self._skipped is not None:
            tokens = self._skipped.computed(row, num_tokens).tolist()
        begins = (0, *self._ends[:-1])
        return [KVExtent(*e) for e in zip(begins, self._ends, tokens, strict=True)]

    @torch.inference_mode()
    def read_rest(self, row: int) -> RowRest:
        """See `ModelRunner.read_rest`."""
        num_tokens = self._sampler(row).state.num_tokens
        return RowRest(
            position=int(self._positions[row]),
            hidden=HostTensor.of(self._hidden[row]),
            skipped=None if self._skipped is None else self._skipped.suspend(row, num_tokens),
        )

    @torch.inference_mode()
    def resume(
        self, row: int, state: SequenceState, rest: RowRest, depth: int | None = None
    ) -> None:
        """See `ModelRunner.resume`."""
        if (rest.skipped is None) != (self._skipped is None):
            raise InvariantViolation("a row with exits cannot go on in one without, nor one back")
        if self._skipped is not None and rest.skipped is not None:
            self._skipped.check_segments(rest.skipped, depth)
        self.attach(row, state)
        self._positions[row] = rest.position
        self._hidden[row] = rest.hidden.tensor(self._device)
        if self._skipped is not None and rest.skipped is not None:
            self._skipped.restore(row, rest.skipped, self._fastest(), depth)

    def read_kv(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `ModelRunner.read_kv`."""
        return self._cache.read(row, first_layer, num_layers, start, stop)

    def write_kv(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """See `ModelRunner.write_kv`; layers of the model that are not loaded are left out."""
        cache = self._cache
        num_layers = max(0, min(kv.shape[0], cache.num_layers - first_layer))
        if num_layers < kv.shape[0] <= self.full_depth - first_layer:
            kv = kv[:num_layers]
        if len(kv):
            cache.write(row, first_layer, start, kv)

    # Changing the depth: see `quadriga.engine.depth`.

    @property
    def weights(self) -> ModelWeights:
        """What is loaded."""
        return self._eager.weights

    @property
    def full_depth(self) -> int:
        """See `ResizableRunner.full_depth`."""
        return self.spec.checkpoint.num_layers

    @property
    def kv_capacity_tokens(self) -> int:
        """See `ResizableRunner.kv_capacity_tokens`."""
        return self.spec.kv_capacity_tokens

    @property
    def depths(self) -> tuple[int, ...]:
        """See `ResizableRunner.depths`."""
        return self.spec.depths

    def prepare_depth(self, depth: int, *, timeout_s: float = 600.0) -> PreparedLayers:
        """Load layers up to `depth`, beside what runs; the caller waits and closes them.

        Any thread but the engine's.

        Raises:
            ConfigError: No such depth, weights that are missing or damaged, no room for KV.
            DeadlineExceeded: It took longer than `timeout_s`.
        """
        spec = self.spec
        eager = resizable(spec, self._eager, depth)
        check_depth(spec, depth, deeper=True)
        per_layer = layer_bytes(eager.weights.layers[0])
        spec = spec_at(spec, self._started, depth, per_layer)
        compiled = self._decoder if isinstance(self._decoder, CompiledDecoder) else None
        return prepare(spec, eager, compiled, timeout_s=timeout_s)

    def take_depth(self, prepared: PreparedLayers) -> None:
        """Run the layers that were loaded from the next pass on.

        Raises:
            ConfigError: They were made for another depth than is loaded now, or are closed.
            InvariantViolation: Rows are in use, and the engine has no segments.
        """
        if prepared.before != self.num_layers or prepared.eager is None:
            state = "closed" if prepared.eager is None else f"made for {prepared.before} layers"
            raise ConfigError(
                f"depth: the layers prepared are {state}; this engine holds {self.num_layers}: "
                "prepare them again",
                param="depth",
            )
        self._change(prepared.spec, prepared.eager, prepared.compiled)

    def check_drop(self, depth: int) -> None:
        """See `ResizableRunner.check_drop`."""
        resizable(self.spec, self._eager, depth)
        check_depth(self.spec, depth, deeper=False)

    def drop_to(self, depth: int) -> None:
        """Let the layers behind the first `depth` go; tokens that wait behind them are lost.

        Raises:
            ConfigError: The engine cannot hold so many.
            InvariantViolation: Rows are in use, and the engine has no segments.
        """
        self.check_drop(depth)
        eager = resizable(self.spec, self._eager, depth)
        per_layer = layer_bytes(eager.weights.layers[0])
        spec = spec_at(self.spec, self._started, depth, per_layer)
        left = shallower(eager, depth)
        del eager  # so that its memory is given back on another thread than this
        self._change(spec, left, None)

    def _change(self, spec: EngineSpec, eager: Decoder, compiled: CompiledDecoder | None) -> None:
        """Run another number of layers from the next pass on."""
        used = {row: s.state.num_tokens - 1 for row, s in enumerate(self._samplers) if s}
        if used and self._skipped is None:
            raise InvariantViolation(
                f"{len(used)} rows are in use; without exits the depth changes between sequences"
            )
        fastest = self._fastest()
        old: list[object] = [self._eager, fastest]
        if isinstance(fastest, CompiledDecoder):
            self._decoder = compiled or fastest.over(eager)
        else:
            self._decoder = eager
        if self._swap is not None:
            self._swap.follow(eager)
        self.spec, self._eager, self._cache = spec, eager, eager.cache
        self._ends = (*spec.exits.layers, spec.depth)
        self._exit = self._left = None
        if self._skipped is not None:
            self._skipped.resize(self._ends, eager.cache, kept_at_end(spec), used)
        del fastest
        self._freeing = let_go(old, spec.depth)

    def wait_freed(self, timeout_s: float) -> bool:
        """Wait until layers that were let go have given their memory back; False: not yet."""
        return self._freeing is None or self._freeing.wait(timeout_s)

    def set_depth_of(self, row: int, depth: int) -> None:
        """See `ResizableRunner.set_depth_of`."""
        if self._skipped is not None and depth < self.num_layers:
            self._skipped.start(row, self._sampler(row).state.num_tokens - 1, depth)

    def depth_of(self, row: int) -> int:
        """See `ResizableRunner.depth_of`."""
        return self.num_layers if self._skipped is None else self._skipped.depth_of(row)

    @torch.inference_mode()
    def repay(self, row: int, max_tokens: int) -> int:
        """See `ResizableRunner.repay`."""
        if self._skipped is None:
            return 0
        state = self._sampler(row).state
        return repay(self._fastest(), self._cache, self._skipped, row, state, max_tokens)

    def _repay_before(self, rows: Sequence[int], stop: int) -> None:
        """For callers that do not repay in time: no pass may run over what is owed."""
        store = self._skipped
        assert store is not None
        for row in rows:
            if store.depth_of(row) < self._ends[stop - 1]:
                self.repay(row, self.row_capacity_tokens)
        store.may_owe = store.is_owed

    @property
    def _may_deepen(self) -> bool:
        """Whether a token that went through all layers may have to go on in more."""
        return self._skipped is not None and self.num_layers < self.full_depth

    def close(self) -> None:
        """Give the device memory that is not tensors' back; the runner is of no use afterwards."""
        if isinstance(self._decoder, PagedDecoder):
            self._decoder.close()

    def _fastest(self) -> AnyDecoder:
        """The compiled decoder from the step after it became ready, until then the eager one."""
        if self._swap is not None and (compiled := self._swap.take()) is not None:
            self._decoder = compiled
            self._swap = None
        return self._decoder

    def _finish_prefill(
        self, x: torch.Tensor, chunks: Sequence[PrefillChunk], spans: Sequence[Span]
    ) -> list[SampledToken | None]:
        """Head and sampling for the prompts that end here; prompt logprobs for all that ask."""
        results: list[SampledToken | None] = [None] * len(chunks)
        for chunk, span in zip(chunks, spans, strict=True):
            state = self._sampler(chunk.row).state
            if wants_scores(chunk, state):
                targets = self._scores.begin(chunk, state)
                if targets:
                    states = x[span.begin : span.begin + len(targets)]
                    logits = self._decoder.logits(states, self.num_layers)
                    self._scores.add(chunk.row, state, logits, targets)
        ended = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        self._left = None
        if not ended:
            return results
        last = x[[spans[i].end - 1 for i in ended]]
        logits = self._decoder.logits(last, self.num_layers)
        samplers = [self._sampler(chunks[i].row) for i in ended]
        self._left = Left(self.num_layers, samplers, last)
        for i, token in zip(ended, sample(logits, samplers, self.num_layers), strict=True):
            token.prompt_logprobs = self._scores.take(chunks[i].row)
            results[i] = token
        return results

    def _samplers_of(self, rows: Sequence[int]) -> list[RowSampler]:
        """The rows' samplers. Raises: InvariantViolation for a row without a sequence."""
        found = self._samplers
        samplers = [s for row in rows if (s := found[row]) is not None]
        if len(samplers) < len(rows):
            missing = [row for row in rows if found[row] is None]
            raise InvariantViolation(f"row {missing[0]} has no sequence attached")
        return samplers

    def _sampler(self, row: int) -> RowSampler:
        sampler = self._samplers[row]
        if sampler is None:
            raise InvariantViolation(f"row {row} has no sequence attached")
        return sampler
