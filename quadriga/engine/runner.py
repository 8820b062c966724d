"""`ModelRunner` over a natively implemented model: KV rows, forward passes, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from quadriga.engine.compiled import KernelSwap
from quadriga.engine.kv_cache import RowKVCache
from quadriga.engine.models.config import read_model_config
from quadriga.engine.models.decoder import AnyDecoder, Candidates, Decoder, top_two
from quadriga.engine.models.layers import Span
from quadriga.engine.sampler import RowSampler, choose, process, sample, token_logprobs
from quadriga.engine.skipped_kv import SkippedKVStore, SuspendedSkips
from quadriga.engine.weights import load_weights
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.interfaces import LayersDone, PrefillChunk
from quadriga.resolve import EngineSpec
from quadriga.types import SampledToken, SequenceState, TokenLogprob


@dataclass(slots=True)
class _Exit:
    """The exit that was run last, until the next pass.

    Attributes:
        index: Row → its place in `found` and `hidden`.
        hidden: [n, hidden], as the rows reached the exit.
    """

    depth: int
    segment: int
    index: dict[int, int]
    found: Candidates
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class SuspendedRow:
    """A row in host memory.

    Attributes:
        kv: [num_layers, 2, num_kv_heads, tokens, head_dim], the current token included.
        position, hidden: Of the current token, which may wait at an exit.
    """

    kv: torch.Tensor
    position: int
    hidden: torch.Tensor
    skipped: SuspendedSkips | None


class NativeRunner:
    """One model at one depth on one device; see `quadriga.interfaces.ModelRunner`.

    One thread calls everything except `read_kv` and `write_kv`, which other threads may call for
    rows that no pass is working on.
    """

    def __init__(
        self,
        spec: EngineSpec,
        decoder: Decoder,
        cache: RowKVCache,
        skipped: SkippedKVStore | None = None,
    ) -> None:
        self.spec = spec
        self._config = decoder.config
        self._decoder: AnyDecoder = decoder
        self._swap: KernelSwap | None = KernelSwap(spec, decoder)
        self._cache = cache
        self._samplers: list[RowSampler | None] = [None] * cache.num_rows
        self._prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        self._ends = (*spec.exits.layers, spec.depth)
        self._skipped = skipped
        # Each row's current token: where it is, and the hidden state with which it left its last
        # segment. Nothing moves when a token waits: whoever runs it next finds it by its row.
        self._positions = np.zeros(cache.num_rows, dtype=np.int64)
        self._hidden = torch.zeros(
            cache.num_rows, decoder.config.hidden_size, dtype=decoder.weights.embed.dtype
        )
        self._exit: _Exit | None = None

    @classmethod
    def load(cls, spec: EngineSpec) -> NativeRunner:
        """Read the weights and reserve the KV rows.

        Raises:
            ConfigError: The checkpoint or the spec cannot be served.
        """
        if spec.device != "cpu":
            raise ConfigError(
                f"engine.device: {spec.device!r} is not supported by this version's engine; "
                "use 'cpu'",
                param="engine.device",
            )
        torch.set_num_threads(spec.threads)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        config = read_model_config(spec.checkpoint.path)
        if config.rope is None and spec.row_capacity_tokens > config.max_positions:
            raise ConfigError(
                f"engine.max_model_len: {spec.row_capacity_tokens} is beyond the "
                f"{config.max_positions} learned positions of {spec.checkpoint.id}",
                param="engine.max_model_len",
            )
        weights = load_weights(
            spec.checkpoint.path,
            config,
            spec.depth,
            dtype,
            spec.row_capacity_tokens,
            spec.checkpoint.exits,
        )
        cache = RowKVCache(
            num_layers=spec.depth,
            num_rows=spec.num_rows,
            num_kv_heads=config.num_kv_heads,
            capacity=spec.row_capacity_tokens,
            head_dim=config.head_dim,
            dtype=dtype,
            budget_tokens=spec.kv_capacity_tokens,
        )
        skipped = None
        if spec.exits.layers:
            ends = (*spec.exits.layers, spec.depth)
            skipped = SkippedKVStore(spec.skipped_kv, ends, cache, config.hidden_size)
        depths = skipped.depths if skipped is not None and skipped.mode == "alias" else None
        return cls(spec, Decoder(config, weights, cache, depths), cache, skipped)

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
        """Whether the next pass runs on the compiled kernels."""
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
        if self._skipped is not None:
            self._skipped.start(row, state.num_tokens - 1)

    def detach(self, row: int) -> None:
        """See `ModelRunner.detach`; a free row may be detached again."""
        self._samplers[row] = None
        self._prompt_logprobs.pop(row, None)
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
        for layer in range(self.num_layers):
            x = decoder.run_layers(x, batch, layer, layer + 1)
            if on_layers is not None:
                on_layers(layer, 1)
        if self._skipped is not None:
            for span in spans:
                self._skipped.start(span.row, span.stop)
        return self._finish_prefill(x, chunks, spans)

    @torch.inference_mode()
    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.decode`."""
        if not rows:
            return []
        x = self._pass(rows, 0, len(self._ends))
        samplers = [self._sampler(row) for row in rows]
        if all(s.is_plain for s in samplers):
            return [
                SampledToken(t, self.num_layers) for t in self._decoder.best(x, self.num_layers)
            ]
        return sample(self._decoder.logits(x, self.num_layers), samplers, self.num_layers)

    @torch.inference_mode()
    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        """See `ModelRunner.advance`."""
        x = self._pass(rows, first, stop)
        depth = self._ends[stop - 1]
        if depth < self.num_layers:
            self._hidden[torch.tensor(rows)] = x
        found = self._decoder.candidates(x, depth)
        samplers = [self._sampler(row) for row in rows]
        probs = found.probs
        if process(found.logits, samplers):
            # Of these rows alone: what a row is sure of does not depend on its company.
            changed = [i for i, sampler in enumerate(samplers) if not sampler.is_plain]
            probs[changed] = top_two(found.logits[changed])
        self._exit = _Exit(depth, stop - 1, {row: i for i, row in enumerate(rows)}, found, x)
        if self.spec.exits.criterion == "margin":
            confidences: list[float] = (probs[:, 0] - probs[:, 1]).tolist()
        else:
            confidences = probs[:, 0].tolist()
        return confidences

    @torch.inference_mode()
    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.emit`. Raises: InvariantViolation for a row that is not at the exit."""
        at = self._exit
        if at is None or not at.index.keys() >= set(rows):
            raise InvariantViolation(f"rows {list(rows)} are not all at the exit just run")
        chosen = [at.index[row] for row in rows]
        samplers = [self._sampler(row) for row in rows]
        if self._skipped is not None and at.depth < self.num_layers:
            indices = np.array(rows, dtype=np.int64)
            self._skipped.leave(indices, self._positions[indices], at.segment, at.hidden[chosen])
        if all(s.is_plain for s in samplers):
            best = at.found.best
            return [SampledToken(int(best[i]), at.depth) for i in chosen]
        return choose(at.found.logits[chosen], samplers, at.depth)

    def _pass(self, rows: Sequence[int], first: int, stop: int) -> torch.Tensor:
        """Run segments [first, stop) for the current token of each row: [n, hidden]."""
        decoder = self._fastest()
        indices = np.array(rows, dtype=np.int64)
        if first == 0:
            token_ids = []
            positions = []
            for row in rows:
                state = self._sampler(row).state
                token_ids.append((state.output_ids or state.prompt_ids)[-1])
                positions.append(state.num_tokens - 1)
            self._positions[indices] = positions
        where = self._positions[indices]
        if self._skipped is not None:
            self._skipped.enter(decoder, indices, where, first, stop)
        batch = decoder.plan_tokens(indices, where)
        x = decoder.embed(token_ids, batch) if first == 0 else self._hidden[torch.tensor(rows)]
        first_layer = self._ends[first - 1] if first else 0
        return decoder.run_layers(x, batch, first_layer, self._ends[stop - 1])

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
        """Bytes of KV and kept hidden states of these rows, as far as they were computed."""
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
        return total + (0 if self._skipped is None else self._skipped.kept_bytes())

    @torch.inference_mode()
    def suspend(self, row: int) -> SuspendedRow:
        """See `ModelRunner.suspend`."""
        state = self._sampler(row).state
        suspended = SuspendedRow(
            kv=self._cache.read(row, 0, self.num_layers, 0, state.num_tokens),
            position=int(self._positions[row]),
            hidden=self._hidden[row].clone(),
            skipped=None if self._skipped is None else self._skipped.suspend(row, state.num_tokens),
        )
        self.detach(row)
        return suspended

    @torch.inference_mode()
    def restore(self, row: int, state: SequenceState, suspended: SuspendedRow) -> None:
        """See `ModelRunner.restore`."""
        self.attach(row, state)
        self._cache.write(row, 0, 0, suspended.kv)
        self._positions[row] = suspended.position
        self._hidden[row] = suspended.hidden
        if self._skipped is not None and suspended.skipped is not None:
            self._skipped.restore(row, suspended.skipped)

    def read_kv(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `ModelRunner.read_kv`."""
        return self._cache.read(row, first_layer, num_layers, start, stop)

    def write_kv(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """See `ModelRunner.write_kv`."""
        self._cache.write(row, first_layer, start, kv)

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
            if self._sampler(chunk.row).params.num_prompt_logprobs is not None:
                self._collect_prompt_logprobs(x[span.begin : span.end], chunk)
        ended = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        if not ended:
            return results
        logits = self._decoder.logits(x[[spans[i].end - 1 for i in ended]], self.num_layers)
        samplers = [self._sampler(chunks[i].row) for i in ended]
        for i, token in zip(ended, sample(logits, samplers, self.num_layers), strict=True):
            token.prompt_logprobs = self._prompt_logprobs.pop(chunks[i].row, None)
            results[i] = token
        return results

    def _collect_prompt_logprobs(self, x: torch.Tensor, chunk: PrefillChunk) -> None:
        """Score the prompt tokens that this chunk's hidden states predict: start + 1, …"""
        state = self._sampler(chunk.row).state
        num_top = state.sampling.num_prompt_logprobs or 0
        report = self._prompt_logprobs.setdefault(chunk.row, [])
        if chunk.start == 0:
            report[:] = [TokenLogprob(state.prompt_ids[0], None)]
        targets = state.prompt_ids[chunk.start + 1 : chunk.start + 1 + x.shape[0]]
        if targets:
            logits = self._decoder.logits(x[: len(targets)], self.num_layers)
            report.extend(token_logprobs(logits, targets, num_top))

    def _sampler(self, row: int) -> RowSampler:
        sampler = self._samplers[row]
        if sampler is None:
            raise InvariantViolation(f"row {row} has no sequence attached")
        return sampler
