"""`ModelRunner` over a natively implemented model: passes over its rows, sampling, its depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SampledToken
from quadriga.engine.compiled import CompiledDecoder, Kernels
from quadriga.engine.cuda.decoder import PagedDecoder
from quadriga.engine.cuda.loading import find_gpu, load_paged
from quadriga.engine.depth import PreparedLayers, repay
from quadriga.engine.early_exit.exit_logits import ExitLogits
from quadriga.engine.early_exit.exited_tokens import ExitedTokens
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.engine.kv_cache import KVCache
from quadriga.engine.models.config import read_model_config
from quadriga.engine.models.decoder import AnyDecoder, Decoder
from quadriga.engine.models.layers import TokenSpan
from quadriga.engine.prompt_scores import PromptScores, wants_scores
from quadriga.engine.rebuild import RecordedPass, recorded_depths
from quadriga.engine.row_engine import load_rows
from quadriga.engine.rows import NativeRows
from quadriga.engine.sampler import RowSampler, sample
from quadriga.engine.weights.checkpoint_weights import ModelWeights
from quadriga.engine.weights.loaded_model import LoadedModel
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.interfaces import LayersDone, PrefillChunk

Ints = npt.NDArray[np.int64]


class NativeRunner(NativeRows):
    """One model at one depth on one device; see `quadriga.interfaces.ModelRunner`.

    One thread calls everything except `read_kv` and `write_kv`, which other threads may call for
    rows that no pass is working on, and `prepare_depth`.

    Attributes:
        left: Who left in the last pass; None where nobody did, or before the first.
    """

    def __init__(
        self,
        spec: EngineSpec,
        decoder: Decoder | PagedDecoder,
        cache: KVCache,
        skipped: SkippedKVStore | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(LoadedModel(spec, decoder, cache, kernels or Kernels()), skipped)
        self.left: ExitedTokens | None = None
        self._device = self.hidden.device
        self._exit: ExitLogits | None = None
        self._scores = PromptScores()

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
        return cls(spec, loaded.decoder, loaded.cache, loaded.skipped, loaded.kernels)

    @property
    def spec(self) -> EngineSpec:
        """What is loaded now."""
        return self.model.spec

    @property
    def segment_ends(self) -> tuple[int, ...]:
        """See `ModelRunner.segment_ends`."""
        return self.model.ends

    @property
    def num_layers(self) -> int:
        return self.model.ends[-1]

    @property
    def is_compiled(self) -> bool:
        """See `LoadedModel.is_compiled`."""
        return self.model.is_compiled

    def wait_compiled(self, timeout_s: float) -> bool:
        """Wait for a compilation under way; return `is_compiled`."""
        return self.model.wait_compiled(timeout_s)

    def close(self) -> None:
        """Give the device memory that is not tensors' back; the runner is of no use afterwards."""
        self.model.close()

    def detach(self, row: int) -> None:
        """See `ModelRunner.detach`; a free row may be detached again."""
        super().detach(row)
        self._scores.take(row)

    @torch.inference_mode()
    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None = None
    ) -> list[SampledToken | None]:
        """See `ModelRunner.prefill`; all chunks go through the layers together."""
        if not chunks:
            return []
        spans: list[TokenSpan] = []
        token_ids: list[int] = []
        for chunk in chunks:
            begin = len(token_ids)
            token_ids.extend(chunk.token_ids)
            spans.append(TokenSpan(chunk.row, begin, len(token_ids), chunk.start))
            if spans[-1].stop > self.row_capacity_tokens or begin == len(token_ids):
                raise InvariantViolation(
                    f"prefill chunk of row {chunk.row} covers positions {chunk.start}.."
                    f"{spans[-1].stop}; must be non-empty and within {self.row_capacity_tokens}"
                )
        decoder = self.model.fastest()
        batch = decoder.plan(spans)
        x = decoder.embed(token_ids, batch)
        depths = recorded_depths(chunks, self.model.ends, self.spec.skipped_kv)
        if depths is None:
            for layer in range(self.num_layers):
                x = decoder.run_layers(x, batch, layer, layer + 1)
                if on_layers is not None:
                    on_layers(layer, 1)
        else:
            recorded = RecordedPass(decoder, self._cache, self.spec.skipped_kv, spans, depths)
            x = recorded.run(x, batch, self.model.ends, on_layers)
        if self.skipped is not None:
            for span in spans:
                self.skipped.start(span.row, span.stop)
        return self._finish_prefill(x, chunks, spans)

    def _finish_prefill(
        self, x: torch.Tensor, chunks: Sequence[PrefillChunk], spans: Sequence[TokenSpan]
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
        self.left = None
        if not ended:
            return results
        last = x[[spans[i].end - 1 for i in ended]]
        logits = self._decoder.logits(last, self.num_layers)
        samplers = [self._sampler(chunks[i].row) for i in ended]
        self.left = ExitedTokens(self.num_layers, samplers, last)
        for i, token in zip(ended, sample(logits, samplers, self.num_layers), strict=True):
            token.prompt_logprobs = self._scores.take(chunks[i].row)
            results[i] = token
        return results

    @torch.inference_mode()
    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.decode`."""
        if not rows:
            return []
        samplers = self._samplers_of(rows)
        depth, num_segments = self.num_layers, len(self.model.ends)
        x = self._pass(rows, samplers, 0, num_segments)
        self.left = ExitedTokens(depth, samplers, x)
        if self.skipped is not None and self.skipped.keeps_last:
            indices = np.array(rows, dtype=np.int64)
            self.skipped.leave(indices, self.positions[indices], num_segments - 1, x)
        if all(s.is_plain for s in samplers):
            return [SampledToken(t, depth) for t in self._decoder.best(x, depth)]
        return sample(self._decoder.logits(x, depth), samplers, depth)

    @torch.inference_mode()
    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        """See `ModelRunner.advance`."""
        samplers = self._samplers_of(rows)
        self.left = None
        x = self._pass(rows, samplers, first, stop)
        depth = self.model.ends[stop - 1]
        self._exit = ExitLogits.look(self._decoder, depth, stop - 1, rows, samplers, x)
        return self._exit.confidences(self.spec.exits.criterion)

    @torch.inference_mode()
    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.emit`. Raises: InvariantViolation for a row that is not at the exit."""
        at = self._exit
        places = at.places(rows) if at is not None else None
        if at is None or places is None:
            raise InvariantViolation(f"rows {list(rows)} are not all at the exit just run")
        self.left = ExitedTokens(at.depth, at.samplers, at.hidden, places)
        some = np.array(places, dtype=np.int64)
        if self.skipped is not None and (at.depth < self.num_layers or self.skipped.keeps_last):
            indices = np.array(rows, dtype=np.int64)
            where = torch.from_numpy(some).to(self._device, non_blocking=True)
            states = at.hidden.index_select(0, where)
            self.skipped.leave(indices, self.positions[indices], at.segment, states)
        return at.sample(places, some)

    def _pass(
        self, rows: Sequence[int], samplers: Sequence[RowSampler], first: int, stop: int
    ) -> torch.Tensor:
        """Run segments [first, stop) for the current token of each row: [n, hidden]."""
        decoder = self.model.fastest()
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
            self.positions[indices] = where
        else:
            where = self.positions[indices]
        if self.skipped is not None and self.skipped.may_owe:
            self._repay_before(self.skipped, rows, stop)
        batch = decoder.plan_tokens(indices, where)
        x = decoder.embed(token_ids, batch) if not first else self.hidden.index_select(0, at_rows)
        if self.skipped is None:
            x = decoder.run_layers(x, batch, *self._layers_of(first, stop))
        else:
            for stretch in self.skipped.stretches(indices, where, first, stop):
                x = self._run_stretch(self.skipped, x, batch, indices, where, *stretch)
        if stop < len(self.model.ends) or self._may_deepen:
            self.hidden.index_copy_(0, at_rows, x)
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
        ends = self.model.ends
        return ends[first - 1] if first else 0, ends[stop - 1]

    @property
    def _decoder(self) -> AnyDecoder:
        """What the pass under way runs on."""
        return self.model.decoder

    @property
    def _may_deepen(self) -> bool:
        """Whether a token that went through all layers may have to go on in more."""
        return self.skipped is not None and self.num_layers < self.full_depth

    @property
    def num_filled(self) -> int:
        """See `ModelRunner.num_filled`."""
        return 0 if self.skipped is None else self.skipped.num_filled

    @property
    def exit_rows(self) -> list[int]:
        """Rows at the exit of the last `advance`."""
        return list(self._exit.index) if self._exit is not None else []

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """See `NativeRows.dry_run`."""
        exit_ = self._exit
        with super().dry_run():
            yield
        self._exit = exit_

    # Changing the depth: see `LoadedModel`, and `ResizableRunner` of `quadriga.interfaces`.

    @property
    def weights(self) -> ModelWeights:
        return self.model.weights

    @property
    def full_depth(self) -> int:
        return self.model.full_depth

    @property
    def kv_capacity_tokens(self) -> int:
        return self.spec.kv_capacity_tokens

    @property
    def depths(self) -> tuple[int, ...]:
        return self.spec.depths

    def prepare_depth(self, depth: int, *, timeout_s: float = 600.0) -> PreparedLayers:
        """See `LoadedModel.prepare_depth`."""
        return self.model.prepare_depth(depth, timeout_s)

    def take_depth(self, prepared: PreparedLayers) -> None:
        """Run the layers that were loaded from the next pass on.

        Raises:
            ConfigError: They were made for another depth than is loaded now, or are closed.
            InvariantViolation: Rows are in use, and the engine has no segments.
        """
        self._change(*self.model.unpack(prepared), prepared.compiled)

    def check_drop(self, depth: int) -> None:
        """See `ResizableRunner.check_drop`."""
        self.model.check_drop(depth)

    def drop_to(self, depth: int) -> None:
        """Let the layers behind the first `depth` go; tokens that wait behind them are lost.

        Raises:
            ConfigError: The engine cannot hold so many.
            InvariantViolation: Rows are in use, and the engine has no segments.
        """
        self._change(*self.model.cut(depth), None)

    def _change(self, spec: EngineSpec, eager: Decoder, compiled: CompiledDecoder | None) -> None:
        """Run another number of layers from the next pass on."""
        num_used = len(self._lengths())
        if num_used and self.skipped is None:
            raise InvariantViolation(
                f"{num_used} rows are in use; without exits the depth changes between sequences"
            )
        old = self.model.put(spec, eager, compiled)
        self._exit = self.left = None
        self._follow_depth()
        self.model.let_go(old)

    def wait_freed(self, timeout_s: float) -> bool:
        """See `LoadedModel.wait_freed`."""
        return self.model.wait_freed(timeout_s)

    @torch.inference_mode()
    def repay(self, row: int, max_tokens: int) -> int:
        """See `ResizableRunner.repay`."""
        if self.skipped is None:
            return 0
        model, state = self.model, self._sampler(row).state
        return repay(model.fastest(), self._cache, self.skipped, row, state, max_tokens)

    def _repay_before(self, store: SkippedKVStore, rows: Sequence[int], stop: int) -> None:
        """For callers that do not repay in time: no pass may run over what is owed."""
        for row in rows:
            if store.depth_of(row) < self.model.ends[stop - 1]:
                self.repay(row, self.row_capacity_tokens)
        store.may_owe = store.is_owed
