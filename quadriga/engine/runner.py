"""`ModelRunner` over a natively implemented model: KV rows, forward passes, sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quadriga.engine.compiled import KernelSwap
from quadriga.engine.kv_cache import RowKVCache
from quadriga.engine.models.config import read_model_config
from quadriga.engine.models.decoder import AnyDecoder, Decoder
from quadriga.engine.models.layers import Span
from quadriga.engine.sampler import RowSampler, sample, token_logprobs
from quadriga.engine.weights import load_weights
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.interfaces import LayersDone, PrefillChunk
from quadriga.resolve import EngineSpec
from quadriga.types import SampledToken, SequenceState, TokenLogprob


class NativeRunner:
    """One model at one depth on one device; see `quadriga.interfaces.ModelRunner`.

    One thread calls everything except `read_kv` and `write_kv`, which other threads may call for
    rows that no pass is working on.
    """

    def __init__(self, spec: EngineSpec, decoder: Decoder, cache: RowKVCache) -> None:
        self.spec = spec
        self._config = decoder.config
        self._decoder: AnyDecoder = decoder
        self._swap: KernelSwap | None = KernelSwap(spec, decoder)
        self._cache = cache
        self._samplers: list[RowSampler | None] = [None] * cache.num_rows
        self._prompt_logprobs: dict[int, list[TokenLogprob]] = {}

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
            spec.checkpoint.path, config, spec.depth, dtype, spec.row_capacity_tokens
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
        return cls(spec, Decoder(config, weights, cache), cache)

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

    def detach(self, row: int) -> None:
        """See `ModelRunner.detach`; a free row may be detached again."""
        self._samplers[row] = None
        self._prompt_logprobs.pop(row, None)
        self._cache.release(row)

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
        return self._finish_prefill(x, chunks, spans)

    @torch.inference_mode()
    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.decode`."""
        if not rows:
            return []
        samplers = [self._sampler(row) for row in rows]
        spans = []
        token_ids = []
        for i, (row, sampler) in enumerate(zip(rows, samplers, strict=True)):
            state = sampler.state
            token_ids.append(state.output_ids[-1] if state.output_ids else state.prompt_ids[-1])
            spans.append(Span(row, i, i + 1, state.num_tokens - 1))
        decoder = self._fastest()
        batch = decoder.plan(spans)
        x = decoder.embed(token_ids, batch)
        x = decoder.run_layers(x, batch, 0, self.num_layers)
        if all(s.is_plain for s in samplers):
            return [SampledToken(t, self.num_layers) for t in decoder.best(x)]
        return sample(decoder.logits(x), samplers, self.num_layers)

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
        logits = self._decoder.logits(x[[spans[i].end - 1 for i in ended]])
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
            logits = self._decoder.logits(x[: len(targets)])
            report.extend(token_logprobs(logits, targets, num_top))

    def _sampler(self, row: int) -> RowSampler:
        sampler = self._samplers[row]
        if sampler is None:
            raise InvariantViolation(f"row {row} has no sequence attached")
        return sampler
