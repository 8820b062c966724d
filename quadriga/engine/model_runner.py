"""`NativeRunner`: a natively implemented model over its KV rows.

In the order in which a sequence meets it: `load`, `attach`, `prefill`, `decode` (or `advance` and
`emit`, where tokens may leave at exits; or `advance`, `draft` and `verify`, where exits draft),
`suspend` or `read_rest` on its way out of a row. At the end: loading more layers and dropping some
while sequences are in their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quadriga.checkpoint.model_config import read_model_config
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.adapters import find_adapter
from quadriga.core.kv import KVExtent
from quadriga.core.request import SampledToken, SequenceState
from quadriga.engine.compiled import CompiledDecoder
from quadriga.engine.early_exit.drafts import Drafts
from quadriga.engine.early_exit.exit_logits import ExitedTokens, ExitLogits
from quadriga.engine.early_exit.recorded_pass import RecordedPass, recorded_depths, repay
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.engine.kv_cache import Ints, KVCache
from quadriga.engine.loaded_model import (
    EngineParts,
    LoadedModel,
    PreparedLayers,
    kept_at_end,
    load_rows,
)
from quadriga.engine.memory import passes_of
from quadriga.engine.models.decoder import AnyDecoder, Decoder
from quadriga.engine.models.layers import TokenSpan, last_states
from quadriga.engine.prompt_scores import PromptReads
from quadriga.engine.sampler import (
    RowSampler,
    Sampler,
    SamplerAhead,
    end_not_finite,
    make_sampler,
    sample,
)
from quadriga.engine.suspended_row import HostTensor, RowRest, SuspendedRow
from quadriga.engine.transfers import index_on, to_device
from quadriga.engine.weights.checkpoint_weights import ModelWeights
from quadriga.errors import ConfigError, InvariantViolation, UnknownModel
from quadriga.interfaces import MAX_DRAFTED, Drafted, DraftPlan, LayersDone, PrefillChunk
from quadriga.scheduling.transfer.rebuild import num_open, replays_of

if TYPE_CHECKING:
    from quadriga.engine.tensor_parallel.loading import RankStarter

_Given = torch.Tensor | list[int]
"""What tokens go into a pass with: states [n, hidden], or ids where it begins at layer 0."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a pass: rows and positions, int64 [n], and the decoder's plan for them."""

    batch: Any
    rows: Ints
    positions: Ints


class NativeRunner:
    """One model at one depth on one device; see `quadriga.interfaces.ModelRunner`.

    Nothing moves when a token waits at an exit: the pass that runs it next finds it by its row.
    One thread calls everything except `read_kv` and `write_kv`, which other threads may call for
    rows that no pass is working on, and `prepare_depth`.

    Attributes:
        model: What is loaded.
        positions: Of each row's current token, int64 [num_rows]; −1 where none was run.
        hidden: [num_rows, hidden], with which that token left its last segment.
        skipped: What early tokens left behind; None without exits.
        at_exit: The rows at the exit where the last pass ended; None where it ended at none.
        exited: The tokens that left in the last pass; None where none did, or before the first.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.model = LoadedModel(parts)
        weights, num_rows = self.model.weights, parts.cache.num_rows
        self.positions = np.zeros(num_rows, dtype=np.int64)
        self.hidden = torch.zeros(
            num_rows, self.model.config.hidden_size, dtype=weights.dtype, device=weights.device
        )
        self.skipped = parts.skipped
        self.exited: ExitedTokens | None = None
        self._device = self.hidden.device
        self._samplers: list[RowSampler | None] = [None] * num_rows
        self.at_exit: ExitLogits | None = None
        self._drafts = Drafts(num_rows, self.hidden)
        self._reads = PromptReads()
        self._replays = replays_of(parts.spec)
        self._sampling: SamplingTensors | None = None
        if self._device.type != "cpu":
            from quadriga.engine.cuda.sampling import SamplingTensors

            self._sampling = SamplingTensors(num_rows, self._device)

    @classmethod
    def load(cls, spec: EngineSpec, starter: RankStarter | None = None) -> NativeRunner:
        """Read the weights and reserve the KV rows.

        Args:
            starter: Where there are several ranks, starts the others; None: threads of this
                process.

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
        if spec.tensor_parallel > 1:
            from quadriga.engine.tensor_parallel.loading import RankThreads, load_parallel

            return cls(load_parallel(spec, config, starter or RankThreads()))
        if spec.device == "cuda":
            from quadriga.engine.cuda.loading import find_gpu, load_paged

            return cls(load_paged(spec, config, find_gpu()))
        return cls(load_rows(spec, config))

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
    def numerics(self) -> str:
        """See `LoadedModel.numerics`."""
        return self.model.numerics

    def close(self) -> None:
        """Give the device memory that is not tensors' back; the runner is of no use afterwards."""
        self.model.close()

    @property
    def num_rows(self) -> int:
        return self._cache.num_rows

    @property
    def row_capacity_tokens(self) -> int:
        return self._cache.capacity

    # Rows, and the sequences in them.

    def attach(self, row: int, state: SequenceState) -> None:
        """See `ModelRunner.attach`. Raises: InvariantViolation when the row is taken or absent."""
        if not 0 <= row < self.num_rows:
            raise InvariantViolation(f"row {row} is outside the {self.num_rows} rows")
        if self._samplers[row] is not None:
            raise InvariantViolation(f"row {row} is taken: {state.sequence_id} cannot attach")
        sampler = make_sampler(state, self.model.spec.checkpoint, self.model.config.vocab_size)
        if self._sampling is not None:
            sampler.place = self._sampling.attach(row, state.sampling)
        self._set_adapter(row, state)
        self._samplers[row] = sampler
        self.positions[row] = -1
        if self.skipped is not None:
            self._start(self.skipped, row, state.num_tokens - 1)

    def _start(
        self, store: SkippedKVStore, row: int, num_tokens: int, depth: int | None = None
    ) -> None:
        """A row's first positions have KV; see `SkippedKVStore.start`."""
        store.start(row, num_tokens, depth, num_open(self._sampler(row).state, self.full_depth))

    def _set_adapter(self, row: int, state: SequenceState) -> None:
        """Have every pass over a row use its sequence's adapter, or none."""
        adapter_of = self.model.adapter_of
        if adapter_of is not None:
            adapter_of[row] = find_adapter(self.spec.adapters, state.adapter)
        elif state.adapter:
            raise UnknownModel(f"adapter {state.adapter!r} is not loaded here", param="model")

    def detach(self, row: int) -> None:
        """See `ModelRunner.detach`; a free row may be detached again."""
        self._samplers[row] = None
        if not any(self._samplers):  # no pass follows soon, and they hold a whole batch
            self.at_exit = self.exited = None
        self._drafts.drop((row,))
        self._reads.drop(row)
        self._cache.release(row)
        if self.skipped is not None:
            self.skipped.release(row)

    # Rows that begin alike: see `SharingRunner`.

    @property
    def share_tokens(self) -> int:
        return self._cache.share_tokens

    @torch.inference_mode()
    def keep(self, row: int, start: int, over: object | None = None) -> object:
        """See `SharingRunner.keep`."""
        return self._cache.keep(row, start, over)

    def blank(self) -> object | None:
        """See `SharingRunner.blank`."""
        return self._cache.blank()

    @torch.inference_mode()
    def share(self, row: int, start: int, kept: object) -> None:
        """See `SharingRunner.share`."""
        self._cache.share(row, start, kept)

    def forget(self, kept: object) -> None:
        """See `SharingRunner.forget`."""
        self._cache.forget(kept)

    @property
    def _cache(self) -> KVCache:
        return self.model.cache

    def _sampler(self, row: int) -> RowSampler:
        """The row's. Raises: InvariantViolation: It has no sequence."""
        return self._samplers_of((row,))[0]

    def _samplers_of(self, rows: Sequence[int]) -> list[RowSampler]:
        """The rows' samplers. Raises: InvariantViolation for a row without a sequence."""
        found = self._samplers
        samplers = [s for row in rows if (s := found[row]) is not None]
        if len(samplers) < len(rows):
            missing = [row for row in rows if found[row] is None]
            raise InvariantViolation(f"row {missing[0]} has no sequence attached")
        return samplers

    def _lengths(self) -> dict[int, int]:
        """Row with a sequence → its positions that were run to their end."""
        return {row: s.state.num_tokens - 1 for row, s in enumerate(self._samplers) if s}

    # Passes over rows.

    @torch.inference_mode()
    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None = None
    ) -> list[SampledToken | None]:
        """See `ModelRunner.prefill`; all chunks go through the layers together."""
        with self._undone():
            return self._prefill(chunks, on_layers) if chunks else []

    def _prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None
    ) -> list[SampledToken | None]:
        self.at_exit = None  # what it found may be in buffers of passes
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
                self._start(self.skipped, span.row, span.stop)
        return self._finish_prefill(x, chunks, spans)

    def _finish_prefill(
        self, x: torch.Tensor, chunks: Sequence[PrefillChunk], spans: Sequence[TokenSpan]
    ) -> list[SampledToken | None]:
        """Head and sampling for prompts that end here; logprobs and embeddings for who asks."""
        results: list[SampledToken | None] = [None] * len(chunks)
        decoder, depth, config = self._decoder, self.num_layers, self.model.config
        head = self.model.weights.heads[depth]
        for chunk, span in zip(chunks, spans, strict=True):
            own = x[span.begin : span.end]

            def logits(count: int, own: torch.Tensor = own) -> torch.Tensor:
                return decoder.logits(own[:count], depth)

            def states(first: int, own: torch.Tensor = own) -> torch.Tensor:
                return last_states(own[first:], head, config)

            self._reads.add(chunk, self._sampler(chunk.row).state, logits, states)
        ended = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        self.exited = None
        if not ended:
            return results
        last = x.index_select(0, index_on(self._device, [spans[i].end - 1 for i in ended]))
        samplers = [self._sampler(chunks[i].row) for i in ended]
        self.exited = ExitedTokens(depth, samplers, last)
        tokens = sample(decoder.logits(last, depth), samplers, depth)
        for i, sampler, token in zip(ended, samplers, tokens, strict=True):
            results[i] = self._reads.end(chunks[i].row, sampler.state, token)
        return results

    @torch.inference_mode()
    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.decode`."""
        if not rows:
            return []
        samplers = self._samplers_of(rows)
        self.at_exit = None
        self._drafts.drop(rows)
        depth, num_segments = self.num_layers, len(self.model.ends)
        indices = np.array(rows, dtype=np.int64)
        with self._undone():
            x = self._pass(indices, samplers, 0, num_segments)
            if all(s.is_plain for s in samplers):
                tokens = [SampledToken(-1, depth) for _ in rows]  # while a device computes
                for token, best in zip(tokens, self._decoder.best(x, depth), strict=True):
                    token.token_id = best
                end_not_finite(tokens, samplers, self.model.config.vocab_size)
            else:
                tokens = sample(self._decoder.logits(x, depth), samplers, depth)
        self.exited = ExitedTokens(depth, samplers, x)
        if self._goes_on(num_segments):
            self.hidden.index_copy_(0, self._at(indices), x)
        if self.skipped is not None and self.skipped.keeps_last:
            self.skipped.leave(indices, self.positions[indices], num_segments - 1, x)
        return tokens

    @torch.inference_mode()
    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        """See `ModelRunner.advance`, and `DraftingRunner` for rows that draft."""
        samplers = self._samplers_of(rows)
        self.exited = None
        drafts, depth = self._drafts, self.model.ends[stop - 1]
        drafted = drafts.next_of(rows) if (first, stop) == (0, 1) else []
        indices = np.array(rows, dtype=np.int64)
        with self._undone():
            if any(token is not None for token in drafted):
                x, ahead = self._draft_pass(rows, samplers, drafted)
                self.at_exit = ExitLogits.look(self._decoder, depth, stop - 1, rows, ahead, x)
            else:
                drafts.drop(rows)
                x = self._pass(indices, samplers, first, stop)
                self.at_exit = ExitLogits.look(self._decoder, depth, stop - 1, rows, samplers, x)
                if self._goes_on(stop):
                    self.hidden.index_copy_(0, self._at(indices), x)
        exits = self.spec.exits
        return exits.calibrated(depth, self.at_exit.confidences(exits.criterion))

    def _draft_pass(
        self, rows: Sequence[int], samplers: list[RowSampler], drafted: list[int | None]
    ) -> tuple[torch.Tensor, list[Sampler]]:
        """Run the first segment for rows' drafted tokens, or the newest of the state without one.

        Returns:
            The states [n, hidden], and the samplers as they are behind the drafts.
        """
        drafts, decoder = self._drafts, self.model.fastest()
        indices = np.array(rows, dtype=np.int64)
        where = np.array([s.state.num_tokens - 1 for s in samplers], dtype=np.int64)
        is_new = np.array([token is None for token in drafted])
        token_ids: list[int] = []
        ahead: list[Sampler] = []
        for row, token, sampler in zip(rows, drafted, samplers, strict=True):
            if token is None:
                drafts.drop((row,))
                state = sampler.state
                token_ids.append((state.output_ids or state.prompt_ids)[-1])
                ahead.append(sampler)
            else:
                token_ids.append(token)
                ahead.append(SamplerAhead(sampler, list(drafts.tokens[row])))
        batch = decoder.plan_tokens(indices, where + drafts.num_run[indices] + ~is_new)
        x = decoder.begin(token_ids, batch, self.model.ends[0])
        begun = np.flatnonzero(is_new)
        if begun.size:
            self.positions[indices[begun]] = where[begun]
            self.hidden.index_copy_(0, self._at(indices[begun]), x.index_select(0, self._at(begun)))
        went = np.flatnonzero(~is_new)
        drafts.keep(indices[went], x.index_select(0, self._at(went)))
        return x, ahead

    def _at(self, indices: Ints) -> torch.Tensor:
        return to_device(indices, self._device)

    @torch.inference_mode()
    def draft(self, rows: Sequence[int], plan: DraftPlan | None = None) -> list[Drafted]:
        """See `DraftingRunner.draft`; greedy rows draft on in one call of the kernels.

        Raises: InvariantViolation for a row that is not there.
        """
        at, drafts = self.at_exit, self._drafts
        places = at.places(rows) if at is not None and at.segment == 0 else None
        if at is None or places is None:
            raise InvariantViolation(f"rows {list(rows)} are not all at the first exit, just run")
        token_ids = [t.token_id for t in self._sampled(at, places)]
        for row, token_id in zip(rows, token_ids, strict=True):
            drafts.tokens[row].append(token_id)
        decoder = self.model.fastest()
        if plan is None or not at.is_plain or not isinstance(decoder, CompiledDecoder):
            return [Drafted([token_id], []) for token_id in token_ids]
        if not any(plan.rooms) or not decoder.can_draft:
            return [Drafted([token_id], []) for token_id in token_ids]
        indices = np.array(rows, dtype=np.int64)
        num_run = drafts.num_run[indices]
        ran = decoder.draft(
            self.model.ends[0],
            indices,
            self.positions[indices] + num_run + 1,
            token_ids,
            drafts.states,
            indices * MAX_DRAFTED + num_run,
            plan,
            self.spec.exits,
        )
        drafts.num_run[indices] += ran.num_run
        self.at_exit = None
        found = []
        counts = ran.num_run.tolist()
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tokens = ran.tokens[i, : count + 1].tolist()
            sure = ran.confidences[i, :count].tolist()
            drafts.tokens[row] += tokens[1:]
            found.append(Drafted(tokens, self.spec.exits.calibrated(self.model.ends[0], sure)))
        return found

    def drop_drafts(self, rows: Sequence[int]) -> None:
        """See `DraftingRunner.drop_drafts`."""
        self._drafts.drop(rows)

    @torch.inference_mode()
    def verify(self, rows: Sequence[int]) -> list[list[SampledToken]]:
        """See `DraftingRunner.verify`."""
        with self._undone():
            return self._verify(rows)

    def _verify(self, rows: Sequence[int]) -> list[list[SampledToken]]:
        samplers, drafts, skipped = self._samplers_of(rows), self._drafts, self.skipped
        if skipped is None:
            raise InvariantViolation("a runner without exits has no drafts to verify")
        depth, num_segments = self.num_layers, len(self.model.ends)
        indices = np.array(rows, dtype=np.int64)
        positions = self.positions[indices]
        counts = drafts.num_run[indices] + 1
        stops = counts.cumsum()
        begins = stops - counts
        x = self.hidden.index_select(0, self._at(indices))
        all_rows, all_positions = indices, positions
        if stops[-1] > len(rows):
            all_rows = np.repeat(indices, counts)
            numbers = np.arange(stops[-1]) - np.repeat(begins, counts)
            all_positions = np.repeat(positions, counts) + numbers
            later = np.flatnonzero(numbers)
            states = x.new_empty(int(stops[-1]), x.shape[1])
            states.index_copy_(0, self._at(begins), x)
            states.index_copy_(0, self._at(later), drafts.take(all_rows[later], numbers[later] - 1))
            x = states
        if skipped.may_owe:
            self._repay_before(skipped, rows, num_segments)
        decoder = self.model.fastest()
        at = _Tokens(decoder.plan_tokens(all_rows, all_positions), all_rows, all_positions)
        for stretch in skipped.stretches(indices, positions, 1, num_segments):
            x = self._run_stretch(skipped, x, at, indices, positions, *stretch)
        spans = list(zip(begins.tolist(), stops.tolist(), strict=True))
        found = drafts.verified(decoder, depth, x, samplers, rows, spans)
        came = np.array([len(tokens) for tokens in found], dtype=np.int64)
        last = begins + came - 1
        if skipped.keeps_last:
            kept = np.concatenate([np.arange(b, e) for b, e in zip(begins, last + 1, strict=True)])
            states = x.index_select(0, self._at(kept))
            skipped.leave(all_rows[kept], all_positions[kept], num_segments - 1, states)
        skipped.verified(indices, positions + came)
        self.at_exit = None
        self.exited = ExitedTokens(depth, samplers, x.index_select(0, self._at(last)))
        drafts.drop(rows)
        return found

    @torch.inference_mode()
    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.emit`. Raises: InvariantViolation for a row that is not at the exit."""
        at = self.at_exit
        places = at.places(rows) if at is not None else None
        if at is None or places is None:
            raise InvariantViolation(f"rows {list(rows)} are not all at the exit just run")
        all_leave = places == list(range(len(at.samplers)))
        self.exited = ExitedTokens(at.depth, at.samplers, at.hidden, None if all_leave else places)
        if self.skipped is not None and (at.depth < self.num_layers or self.skipped.keeps_last):
            indices = np.array(rows, dtype=np.int64)
            states = self.exited.of_states
            self.skipped.leave(indices, self.positions[indices], at.segment, states)
        return self._sampled(at, places)

    def _sampled(self, at: ExitLogits, places: Sequence[int]) -> list[SampledToken]:
        """The tokens of those at an exit who leave; half at a time where memory lacks for all."""
        try:
            return at.sample(places)
        except torch.OutOfMemoryError as exc:
            if len(places) == 1:
                raise
            exc.__traceback__ = None  # its frames hold what was computed so far
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(places) // 2
        return self._sampled(at, places[:half]) + self._sampled(at, places[half:])

    def _pass(
        self, rows: Ints, samplers: Sequence[RowSampler], first: int, stop: int
    ) -> torch.Tensor:
        """Run segments [first, stop) for the current token of each row: [n, hidden]."""
        if first == 0:
            states = [s.state for s in samplers]
            counts = [len(s.prompt_ids) + len(s.output_ids) for s in states]
            self.positions[rows] = np.array(counts, dtype=np.int64) - 1
            x: _Given = [(s.output_ids or s.prompt_ids)[-1] for s in states]
        else:
            x = self.hidden.index_select(0, self._at(rows))
        positions = self.positions[rows]
        if self.skipped is not None and self.skipped.may_owe:
            self._repay_before(self.skipped, rows.tolist(), stop)
        batch = self.model.fastest().plan_tokens(rows, positions)
        if self.skipped is None:
            return self._run_layers(x, batch, first, stop)
        at = _Tokens(batch, rows, positions)
        for stretch in self.skipped.stretches(rows, positions, first, stop):
            x = self._run_stretch(self.skipped, x, at, rows, positions, *stretch)
        assert isinstance(x, torch.Tensor)
        return x

    def _run_layers(self, x: _Given, batch: Any, first: int, stop: int) -> torch.Tensor:
        """Run segments [first, stop)."""
        begin, end = self._layers_of(first, stop)
        if isinstance(x, list):
            return self._decoder.begin(x, batch, end)
        return self._decoder.run_layers(x, batch, begin, end)

    def _goes_on(self, stop: int) -> bool:
        """Whether a pass may go on behind segment `stop`: then `hidden` keeps states of there."""
        return stop < len(self.model.ends) or (
            self.skipped is not None and self.num_layers < self.full_depth
        )

    def _run_stretch(
        self,
        skipped: SkippedKVStore,
        x: _Given,
        at: _Tokens,
        rows: Ints,
        positions: Ints,
        first: int,
        stop: int,
    ) -> torch.Tensor:
        """Run segments [first, stop) for tokens, and for what they carry along: [n, hidden].

        Args:
            rows, positions: Of the first token of each row.
        """
        decoder, count, batch = self._decoder, len(x), at.batch
        marks = skipped.marks(rows)
        try:
            went = skipped.enter(decoder, rows, positions, first, stop)
            if went is not None:
                batch = decoder.plan_tokens(
                    np.concatenate([at.rows, went.rows]),
                    np.concatenate([at.positions, went.positions]),
                )
                assert isinstance(x, torch.Tensor), "nothing goes along with what just begins"
                x = torch.cat([x, went.states])
            x = self._run_layers(x, batch, first, stop)
            if went is not None:
                skipped.carried(went, x[count:], stop)
                x = x[:count]
        except BaseException:  # want of memory, or an interrupt: other rows' streams go on
            skipped.take_back(rows, marks)
            raise
        return x

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """A pass inside that fails changes nothing.

        Raises: DeviceMemoryExhausted: See `passes_of`.
        """
        num_run, positions = self._drafts.num_run.copy(), self.positions.copy()
        with passes_of(self._device):
            try:
                yield
            except BaseException:
                self._drafts.num_run[:], self.positions[:] = num_run, positions
                self.at_exit = self.exited = None
                raise

    def _layers_of(self, first: int, stop: int) -> tuple[int, int]:
        """Layers [begin, end) of segments [first, stop)."""
        ends = self.model.ends
        return ends[first - 1] if first else 0, ends[stop - 1]

    @property
    def _decoder(self) -> AnyDecoder:
        """What the pass under way runs on."""
        return self.model.decoder

    @property
    def num_filled(self) -> int:
        """See `ModelRunner.num_filled`."""
        return 0 if self.skipped is None else self.skipped.num_filled

    # The ways out of a row and back into one.

    @torch.inference_mode()
    def suspend(self, row: int) -> SuspendedRow:
        """See `ModelRunner.suspend`."""
        extents = self.extents(row)
        # Layer by layer: a device whose memory is full has none for a copy of the row.
        kv = [
            torch.cat([self.read_kv(row, layer, 1, 0, e.num_tokens).cpu() for layer in e.layers])
            for e in extents
        ]
        suspended = SuspendedRow(extents, kv, self.read_rest(row))
        self.detach(row)
        return suspended

    @torch.inference_mode()
    def restore(self, row: int, state: SequenceState, suspended: SuspendedRow) -> None:
        """See `ModelRunner.restore`."""
        for extent, kv in zip(suspended.extents, suspended.kv, strict=True):
            if extent.first_layer < self.model.spec.depth:
                for i, layer in enumerate(extent.layers):
                    self.write_kv(row, layer, 0, kv[i : i + 1])
        self.resume(row, state, suspended.rest)

    def extents(self, row: int) -> list[KVExtent]:
        """See `ModelRunner.extents`; one for each segment."""
        state = self._sampler(row).state
        # The newest token has KV where it was run already and waits at an exit.
        is_run = int(self.positions[row]) == state.num_tokens - 1
        num_tokens = state.num_tokens if is_run else state.num_tokens - 1
        ends = self.model.ends
        tokens = [num_tokens] * len(ends)
        if self.skipped is not None:
            tokens = self.skipped.computed(row, num_tokens).tolist()
        return [KVExtent(*e) for e in zip((0, *ends[:-1]), ends, tokens, strict=True)]

    @torch.inference_mode()
    def read_rest(self, row: int) -> RowRest:
        """See `ModelRunner.read_rest`."""
        num_tokens = self._sampler(row).state.num_tokens
        return RowRest(
            position=int(self.positions[row]),
            hidden=HostTensor.of(self.hidden[row]),
            skipped=None if self.skipped is None else self.skipped.suspend(row, num_tokens),
        )

    @torch.inference_mode()
    def resume(
        self, row: int, state: SequenceState, rest: RowRest, depth: int | None = None
    ) -> None:
        """See `ModelRunner.resume`."""
        if (rest.skipped is None) != (self.skipped is None):
            raise InvariantViolation("a row with exits cannot go on in one without, nor one back")
        if self.skipped is not None and rest.skipped is not None:
            self.skipped.check_segments(rest.skipped, depth)
        self.attach(row, state)
        self.positions[row] = rest.position
        self.hidden[row] = rest.hidden.tensor(self.hidden.device)
        if self.skipped is not None and rest.skipped is not None:
            self.skipped.restore(row, rest.skipped, self.model.fastest(), depth)

    def read_kv(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `ModelRunner.read_kv`."""
        return self._cache.read(row, first_layer, num_layers, start, stop)

    def write_kv(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """See `ModelRunner.write_kv`; layers of the model that are not loaded are left out."""
        cache = self._cache
        num_layers = max(0, min(kv.shape[0], cache.num_layers - first_layer))
        if num_layers < kv.shape[0] <= self.model.full_depth - first_layer:
            kv = kv[:num_layers]
        if len(kv):
            cache.write(row, first_layer, start, kv)

    def set_depth_of(self, row: int, depth: int) -> None:
        """See `ResizableRunner.set_depth_of`."""
        if self.skipped is not None and depth < self.model.spec.depth:
            self._start(self.skipped, row, self._sampler(row).state.num_tokens - 1, depth)

    def depth_of(self, row: int) -> int:
        """See `ResizableRunner.depth_of`; so little that a token takes it along, a pass repays."""
        start, stop = (0, 0) if self.skipped is None else self.skipped.owed(row)
        newest = self._replays.newest if self._replays is not None else 0
        if self.skipped is None or stop - start <= newest:
            return self.model.spec.depth
        return self.skipped.depth_of(row)

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
        self.at_exit = self.exited = None
        self._drafts.drop(range(self.num_rows))
        if self.skipped is not None:
            model = self.model
            self.skipped.resize(model.ends, model.cache, kept_at_end(model.spec), self._lengths())
        self.model.let_go(old)

    def wait_freed(self, timeout_s: float) -> bool:
        """See `LoadedModel.wait_freed`."""
        return self.model.wait_freed(timeout_s)

    @torch.inference_mode()
    def repay(self, row: int, max_tokens: int) -> int:
        """See `ResizableRunner.repay`."""
        if self.skipped is None:
            return 0
        self.at_exit = None  # see `_prefill`
        decoder, state = self.model.fastest(), self._sampler(row).state
        return repay(decoder, self._cache, self.skipped, row, state, max_tokens, self._replays)

    def _repay_before(self, store: SkippedKVStore, rows: Sequence[int], stop: int) -> None:
        """For callers that do not repay in time: no pass may run over what is owed."""
        for row in rows:
            if store.depth_of(row) < self.model.ends[stop - 1]:
                self.repay(row, self.row_capacity_tokens)
        store.may_owe = store.is_owed
