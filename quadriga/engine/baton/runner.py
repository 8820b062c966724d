"""`ModelRunner` over a relay batch: any Hugging Face decoder with a plain K/V cache, unmodified."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quadriga.config.engine_spec import EngineSpec
from quadriga.core.kv import KVExtent
from quadriga.core.replica import RelayMemory
from quadriga.core.request import SampledToken, SequenceState
from quadriga.engine.baton.dense import RELEASE_COLUMNS
from quadriga.engine.baton.loading import fit, load_model
from quadriga.engine.baton.model import CausalModel
from quadriga.engine.baton.passes import decode_step, prompt_pass
from quadriga.engine.baton.probe import probe
from quadriga.engine.baton.prompts import PASS_TOKENS, PromptSpan, group_prompts
from quadriga.engine.baton.row_kv import CacheGeometry, RowKV
from quadriga.engine.baton.rows import RelayRows
from quadriga.engine.memory import passes_of
from quadriga.engine.numerics import numerics, torch_code
from quadriga.engine.prompt_scores import PromptReads, pooled_from, wants_scores
from quadriga.engine.sampler import RowSampler, choose, make_sampler, process, sample
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.interfaces import LayersDone, PrefillChunk


class BatonRunner:
    """One Hugging Face model on one device; see `quadriga.interfaces.ModelRunner`.

    One thread calls everything except `read_kv` and `write_kv`, which other threads may call for
    rows that no pass is working on. A token's result may differ in its last bits with the rows
    beside it: the model's own kernels decide that.

    Args:
        release_columns: Padding columns in front of all rows that are worth a release.

    Attributes:
        model: The model itself; experiments drive it otherwise.
        max_padding: Most padding columns behind a prompt that shares a pass.
    """

    def __init__(
        self,
        spec: EngineSpec,
        model: CausalModel,
        geometry: CacheGeometry,
        *,
        release_columns: int = RELEASE_COLUMNS,
    ) -> None:
        self.spec = spec
        self.geometry = geometry
        self.model = model
        self._rows = RelayRows(
            geometry,
            getattr(torch, spec.dtype),
            model.device,
            num_rows=spec.num_rows,
            row_capacity_tokens=spec.row_capacity_tokens,
            release_columns=release_columns,
        )
        self.max_padding = min(model.max_padding, PASS_TOKENS[model.device.type])
        self._samplers: list[RowSampler | None] = [None] * spec.num_rows
        self._reads = PromptReads()
        self._at_end: tuple[dict[int, int], torch.Tensor] | None = None

    @classmethod
    def load(cls, spec: EngineSpec, *, release_columns: int = RELEASE_COLUMNS) -> BatonRunner:
        """Read the weights and try the model on a few tokens.

        Raises:
            ConfigError: The checkpoint or the spec cannot be served; says why.
        """
        if spec.depth != spec.checkpoint.num_layers:
            raise ConfigError(
                f"depth: {spec.checkpoint.id} runs in the relay batch, which has no exits; load "
                f"all {spec.checkpoint.num_layers} layers, not {spec.depth}",
                param="depth",
            )
        if spec.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "engine.device: 'cuda' was asked for but torch sees no GPU; use 'cpu'",
                param="engine.device",
            )
        torch.set_num_threads(spec.threads)
        loaded = load_model(spec)
        if spec.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            weights = sum(p.nbytes for p in (*loaded.parameters(), *loaded.buffers()))
            spec = fit(spec, weight_bytes=weights, free_bytes=free, total_bytes=total)
        model, geometry = probe(spec, loaded)
        model.to(torch.device(spec.device))
        return cls(spec, model, geometry, release_columns=release_columns)

    @property
    def numerics(self) -> str:
        """Name of what it computes with."""
        return numerics(self.spec, torch_code(self.model.device))

    @property
    def num_layers(self) -> int:
        return self.geometry.num_layers

    @property
    def num_rows(self) -> int:
        return self.spec.num_rows

    @property
    def row_capacity_tokens(self) -> int:
        return self.spec.row_capacity_tokens

    @property
    def kv_capacity_tokens(self) -> int:
        return self.spec.kv_capacity_tokens

    @property
    def segment_ends(self) -> tuple[int, ...]:
        """See `ModelRunner.segment_ends`: unmodified models have no early exits."""
        return (self.num_layers,)

    def close(self) -> None:
        """All it holds are tensors, which go with it."""

    def attach(self, row: int, state: SequenceState) -> None:
        """See `ModelRunner.attach`. Raises: InvariantViolation when the row is taken or absent."""
        self._check_row(row)
        if self._samplers[row] is not None:
            raise InvariantViolation(f"row {row} is taken: {state.sequence_id} cannot attach")
        self._samplers[row] = make_sampler(state, self.spec.checkpoint, self.geometry.vocab_size)

    def detach(self, row: int) -> None:
        """See `ModelRunner.detach`; a free row may be detached again."""
        self._samplers[row] = None
        self._reads.drop(row)
        self._rows.drop(row)

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None = None
    ) -> list[SampledToken | None]:
        """See `ModelRunner.prefill`; prompts of similar length share a pass.

        Layers are announced while the last group is computed.

        Raises:
            DeviceMemoryExhausted: See `passes_of`.
            InvariantViolation: A chunk is empty, too long, or leaves a gap.
        """
        with passes_of(self.model.device):
            return self._prefill(chunks, on_layers)

    def _prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: LayersDone | None
    ) -> list[SampledToken | None]:
        results: list[SampledToken | None] = [None] * len(chunks)
        spans = [self._span(chunk) for chunk in chunks]
        groups = group_prompts(chunks, max_padding=self.max_padding)
        ended: list[tuple[int, torch.Tensor]] = []
        for group in groups:
            announce = on_layers if group is groups[-1] else None
            ended += self._prefill_group(group, chunks, spans, announce)
        if ended:
            logits = torch.stack([row for _, row in ended])
            samplers = [self._sampler(chunks[i].row) for i, _ in ended]
            tokens = sample(logits, samplers, self.num_layers)
            for (i, _), sampler, token in zip(ended, samplers, tokens, strict=True):
                results[i] = self._reads.end(chunks[i].row, sampler.state, token)
        return results

    def decode(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.decode`; rows join and leave the dense batch as they come and go.

        Raises:
            DeviceMemoryExhausted: See `passes_of`.
            InvariantViolation: A row has no sequence, lacks K/V of its past, or is full.
        """
        if not rows:
            return []
        with passes_of(self.model.device):
            of_row, logits = self._step(rows)
            samplers = [self._sampler(row) for row in of_row]
            tokens = sample(logits, samplers, self.num_layers)
        return [tokens[of_row[row]] for row in rows]

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        """See `ModelRunner.advance`; the one segment is the whole model.

        Raises:
            DeviceMemoryExhausted: See `passes_of`.
            InvariantViolation: As `decode`, or there is no such segment.
        """
        if (first, stop) != (0, 1):
            raise InvariantViolation(f"segments {first}..{stop}: an unmodified model has one")
        self._at_end = None
        with passes_of(self.model.device):
            of_row, logits = self._step(rows)
            process(logits, [self._sampler(row) for row in of_row])
            best = torch.topk(torch.softmax(logits, dim=-1), 2, dim=-1).values
        self._at_end = (of_row, logits)
        is_margin = self.spec.exits.criterion == "margin"
        confidences = (best[:, 0] - best[:, 1] if is_margin else best[:, 0]).tolist()
        return [confidences[of_row[row]] for row in rows]

    def emit(self, rows: Sequence[int]) -> list[SampledToken]:
        """See `ModelRunner.emit`. Raises: InvariantViolation for a row of no `advance`."""
        if self._at_end is None or not self._at_end[0].keys() >= set(rows):
            raise InvariantViolation(f"rows {list(rows)} were not all advanced just now")
        of_row, logits = self._at_end
        chosen = logits[[of_row[row] for row in rows]]
        return choose(chosen, [self._sampler(row) for row in rows], self.num_layers)

    @property
    def num_filled(self) -> int:
        """See `ModelRunner.num_filled`."""
        return 0

    def suspend(self, row: int) -> RowKV:
        """See `ModelRunner.suspend`."""
        self._sampler(row)
        kv = self._rows.suspend(row)
        self.detach(row)
        return kv

    def restore(self, row: int, state: SequenceState, suspended: RowKV) -> None:
        """See `ModelRunner.restore`."""
        self.attach(row, state)
        self._rows.restore(row, suspended)

    def extents(self, row: int) -> list[KVExtent]:
        """See `ModelRunner.extents`."""
        return [KVExtent(0, self.num_layers, self._sampler(row).state.num_tokens - 1)]

    def read_rest(self, row: int) -> None:
        """See `ModelRunner.read_rest`: K/V is all there is."""

    def resume(self, row: int, state: SequenceState, rest: None, depth: int | None = None) -> None:
        """See `ModelRunner.resume`.

        Raises:
            InvariantViolation: The row is taken, or not all layers came.
        """
        if depth is not None and depth < self.num_layers:
            raise InvariantViolation(
                f"K/V of {depth} layers came for row {row}; an unmodified model runs all "
                f"{self.num_layers}"
            )
        self.attach(row, state)

    def memory(self) -> RelayMemory:
        """What is held now, and how much work was idle so far."""
        return self._rows.memory()

    def read_kv(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `ModelRunner.read_kv`. Raises: InvariantViolation when not all of it is computed."""
        self._check_row(row)
        # In host memory: complete, whatever stream it is sent on.
        return self._rows.read(row, first_layer, num_layers, start, stop).cpu()

    def write_kv(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """See `ModelRunner.write_kv`; the row joins the batch at its first `decode`.

        Raises:
            InvariantViolation: Misshapen, out of range, or it would leave a gap.
        """
        self._check_row(row)
        self._rows.write(row, first_layer, start, kv)

    def _step(self, rows: Sequence[int]) -> tuple[dict[int, int], torch.Tensor]:
        """Run one token of each row; return row → index into logits [n, vocab], in that order."""
        samplers = {row: self._sampler(row) for row in rows}
        if len(samplers) != len(rows):
            raise InvariantViolation(f"rows {list(rows)} name one twice")
        inputs = self._rows.begin_step({r: s.state.num_tokens - 1 for r, s in samplers.items()})
        states = [samplers[row].state for row in inputs.rows]
        token_ids = [(state.output_ids or state.prompt_ids)[-1] for state in states]
        logits = decode_step(self.model, self.num_layers, self._rows.batch, inputs, token_ids)
        self._rows.end_step()
        return {row: i for i, row in enumerate(inputs.rows)}, logits

    def _span(self, chunk: PrefillChunk) -> PromptSpan:
        """Check a chunk and find the row it goes to."""
        self._sampler(chunk.row)
        stop = chunk.stop
        if stop > self.row_capacity_tokens or stop == chunk.start:
            raise InvariantViolation(
                f"prefill chunk of row {chunk.row} covers positions {chunk.start}.."
                f"{stop}; must be non-empty and within {self.row_capacity_tokens}"
            )
        if chunk.depths is not None and min(chunk.depths) < self.num_layers:
            raise InvariantViolation(
                f"prefill chunk of row {chunk.row} has tokens that left after {min(chunk.depths)} "
                f"layers; an unmodified model runs all {self.num_layers}"
            )
        row = self._rows.own(chunk.row)
        if row.length < chunk.start:
            raise InvariantViolation(
                f"prefill chunk of row {chunk.row} starts at {chunk.start}, only {row.length} "
                "positions are computed"
            )
        return PromptSpan(row, chunk.token_ids, chunk.start)

    def _prefill_group(
        self,
        group: list[int],
        chunks: Sequence[PrefillChunk],
        spans: list[PromptSpan],
        on_layers: LayersDone | None,
    ) -> list[tuple[int, torch.Tensor]]:
        """Run one pass; return (chunk, logits [vocab]) of the prompts that end in it."""
        lasts = [len(chunks[i].token_ids) - 1 for i in group]
        states = [self._sampler(chunks[i].row).state for i in group]
        each = list(zip([chunks[i] for i in group], states, strict=True))
        wants_all = any(wants_scores(*one) for one in each)
        keep = None if wants_all else sorted(set(lasts))
        announce = None if on_layers is None else lambda layer: on_layers(layer, 1)
        pools = any(pooled_from(*one) is not None for one in each)
        found: list[torch.Tensor] = []
        logits = prompt_pass(
            self.model,
            self.num_layers,
            [spans[i] for i in group],
            keep,
            announce,
            found.append if pools else None,
        )
        ended = []
        for at, (i, last) in enumerate(zip(group, lasts, strict=True)):

            def first_logits(count: int, at: int = at) -> torch.Tensor:
                return logits[at, :count]

            def last_states(first: int, at: int = at, stop: int = last + 1) -> torch.Tensor:
                return found[0][at, first:stop]

            self._reads.add(chunks[i], states[at], first_logits, last_states)
            if chunks[i].is_last:
                ended.append((i, logits[at, last if keep is None else keep.index(last)]))
        return ended

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.num_rows:
            raise InvariantViolation(f"row {row} is outside the {self.num_rows} rows")

    def _sampler(self, row: int) -> RowSampler:
        sampler = self._samplers[row]
        if sampler is None:
            raise InvariantViolation(f"row {row} has no sequence attached")
        return sampler
