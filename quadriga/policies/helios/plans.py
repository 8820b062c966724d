"""What each candidate would do at each depth worth loading: measured where it ran, else predicted.

A profile runs at full depth with early exits, so one row speaks for all depths: the share of
tokens that an exit lets go is read off, and times scale with the work of the layers, by the
catalogue's times where it has them, else by their number. (On HELIOS's own figures the latter is
right: its Table 4 shares, weighted by layers at the speeds of the single models, give 8.03 ms a
token; Table 5 says 8.) What a profile's few requests say is steadied by what is on record (`work`).

Source: HELIOS §3.3.2–3.3.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quadriga.catalogue.records import CatalogueModel, DepthRecord
from quadriga.config.scheduling import HeliosConfig
from quadriga.core.replica import DepthClass
from quadriga.policies.helios.exit_distribution import (
    cost_ratio,
    cut,
    deepened,
    expected_changed,
    recorded_exits,
    recorded_token_s,
    speed,
    steadied,
    steadied_changed,
    step_s,
)
from quadriga.policies.helios.history import HistoryRow, HistoryTable
from quadriga.policies.helios.messages import ChosenDevice

DEFAULT_LOAD_BYTES_PER_S = 1e9
"""For models that were never loaded here."""
LEAST_TOKENS = 20.0
"""Tokens that must have been looked at before a share of them counts, where none is on record."""
RECORD_TOKENS = 8000.0
"""So many live tokens the catalogue's perplexity counts for: about as many as `loadgen profile`
scores. It compares all models on the same prompts, where a profile sees five requests of each
candidate, and never the same: what they ask for differs more than the models do."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A model at a depth, as it would serve the present stream.

    Attributes:
        coverage: Share of tokens sure enough by then; 1 at full depth.
        changed_share: Share of its tokens that are others than all of the model would say; 0 at
            full depth.
        batch: Sequences it is judged with: what there are, or as many as fit.
        tokens_per_s: At that batch.
        load_s: To load it from nothing.
    """

    depth_class: DepthClass
    is_full: bool
    coverage: float
    changed_share: float
    ttft_s: float
    tpot_s: float
    batch: float
    tokens_per_s: float
    perplexity: float
    joules_per_prompt: float | None
    tokens_per_request: float
    prompt_tokens: float
    weight_bytes: int
    load_s: float


class Planner:
    """Makes plans out of the table.

    Args:
        candidates: Step 1's.
        device: What one decode replica has.
    """

    def __init__(
        self,
        candidates: Sequence[CatalogueModel],
        config: HeliosConfig,
        device: ChosenDevice,
        table: HistoryTable,
    ) -> None:
        self._models = {m.id: m for m in candidates}
        self._config, self._device, self._table = config, device, table
        self._is_named = device.memory_bytes is not None
        self._read_bytes_per_s: float | None = None

    def has_memory(self, memory_bytes: int) -> None:
        """Take in what a decode replica says it has, where no setting named it."""
        if not self._is_named:
            self._device = replace(self._device, memory_bytes=memory_bytes)

    def worth_loading(self, model_id: str) -> list[int]:
        """Exits that enough tokens would pass, the smallest first; none where full depth must be.

        The smallest one is HELIOS's; the others count where it is not accurate enough.
        """
        model, least = self._models[model_id], self._config.min_coverage
        shares = {depth: self._coverage(model, depth) for depth in model.exits.layers}
        return [depth for depth, share in shares.items() if share is not None and share >= least]

    def plans(self, model_id: str, demand: float) -> list[PoolPlan]:
        """The model's plans, the shallowest first; none before its first profile.

        Args:
            demand: Sequences there are for one replica.
        """
        depths = [*self.worth_loading(model_id), self._models[model_id].num_layers]
        found = (self.plan(DepthClass(model_id, depth), demand) for depth in depths)
        return [plan for plan in found if plan is not None]

    def plan(self, depth_class: DepthClass, demand: float) -> PoolPlan | None:
        """One plan; None where the model was not profiled yet."""
        model = self._models[depth_class.model]
        depth = depth_class.depth
        full = self._table.find(model.id, model.num_layers)
        if full is None or full.tpot_s is None or full.ttft_s is None or not full.requests:
            return None
        own = self._table.find(model.id, depth)
        tokens = self._tokens_per_request()
        batch = max(1.0, min(demand, self.max_batch(model, depth, full)))
        tpot_s = self._tpot_s(model, depth, full, own, batch)
        joules = self._joules_per_token(model, depth, full, own)
        is_full = depth == model.num_layers
        own_ttft_s = own.ttft_s if own is not None else None
        return PoolPlan(
            depth_class=depth_class,
            is_full=is_full,
            coverage=1.0 if is_full else self._coverage(model, depth) or 0.0,
            changed_share=0.0 if is_full else self._changed(model, depth, own),
            ttft_s=own_ttft_s or full.ttft_s * depth / model.num_layers,
            tpot_s=tpot_s,
            batch=batch,
            tokens_per_s=batch / tpot_s,
            perplexity=self._perplexity(model, depth, full, own),
            joules_per_prompt=joules * tokens if joules is not None else None,
            tokens_per_request=tokens,
            prompt_tokens=full.prompt_tokens / full.requests,
            weight_bytes=model.sizes.weight_bytes(depth, self._device.value_bytes),
            load_s=self.load_s(depth_class),
        )

    def at_best(self, model_id: str, demand: float) -> PoolPlan | None:
        """As if every token of the model left at its first exit: no stream could be faster.

        None where what such a token takes is not on record, or nothing was profiled yet.
        """
        model = self._models[model_id]
        first = model.exit_depths[0]
        plan = self.plan(DepthClass(model_id, first), demand)
        factor = speed(self._served())
        if plan is None or factor is None:
            return None
        token_s = recorded_token_s(model, {first: 1.0}, plan.batch)
        if token_s is None:
            return None
        tpot_s, joules = factor * token_s, plan.joules_per_prompt
        return replace(
            plan,
            coverage=1.0,
            changed_share=0.0,
            tpot_s=tpot_s,
            tokens_per_s=plan.batch / tpot_s,
            joules_per_prompt=joules * tpot_s / plan.tpot_s if joules is not None else None,
        )

    def has_read(self, depth_class: DepthClass, held: int, seconds: float) -> None:
        """A process that had the first `held` layers has read the others."""
        num_bytes = self._bytes(depth_class, held, depth_class.depth)
        if num_bytes > 0.0:
            self._read_bytes_per_s = num_bytes / seconds

    def load_s(self, depth_class: DepthClass, held: int = 0) -> float:
        """Seconds to read what is missing where the first `held` layers are there already; with
        none, to start a process that reads all of the depth."""
        model, depth = self._models[depth_class.model], depth_class.depth
        record, size = model.record(depth), self._bytes(depth_class, 0, depth)
        per_s = self._read_bytes_per_s
        if per_s is None:
            known_s = record.load_s if record is not None else None
            per_s = size / known_s if known_s else DEFAULT_LOAD_BYTES_PER_S
        if held and not self._device.starts_anew:
            return self._bytes(depth_class, held, depth) / per_s
        for row in (self._table.find(model.id, k) for k in (depth, model.num_layers)):
            if row is not None and row.load_s is not None:
                more = self._bytes(depth_class, depth, row.depth)
                return max(0.0, row.load_s - more / per_s)
        return size / per_s

    def _bytes(self, depth_class: DepthClass, first: int, stop: int) -> float:
        """Of the weights of a model up to layer `stop`, without those up to layer `first`."""
        sizes, width = self._models[depth_class.model].sizes, self._device.value_bytes
        there = sizes.weight_bytes(first, width) if first else 0
        return max(0.0, float(sizes.weight_bytes(stop, width) - there))

    def max_batch(self, model: CatalogueModel, depth: int, full: HistoryRow) -> float:
        """Sequences of the stream's mean length that fit at a depth."""
        slots = float(self._device.max_slots)
        if self._device.memory_bytes is None:
            return slots
        values = self._device.value_bytes
        length = (full.prompt_tokens + full.output_tokens) / max(full.requests, 1e-9)
        room = self._device.memory_bytes - model.sizes.weight_bytes(depth, values)
        fitting = room / (model.sizes.kv_bytes_per_token(depth, values) * max(1.0, length))
        return max(1.0, min(slots, fitting))

    # Columns

    def _tokens_per_request(self) -> float:
        """Of the stream: what is asked for decides it, not which of a family answers."""
        rows = [row for row in self._table if row.model in self._models]
        requests = sum(row.requests for row in rows)
        return max(1.0, sum(row.output_tokens for row in rows) / max(1e-9, requests))

    def _record_tokens(self) -> float:
        """Live tokens that what is on record counts for: a profile's."""
        return self._config.profile_requests * self._tokens_per_request()

    def _coverage(self, model: CatalogueModel, depth: int) -> float | None:
        """As the depth itself did since the last profile, else as the profile says; steadied."""
        row = self._table.find(model.id, depth)
        if row is None or row.coverage(depth) is None:
            row = self._table.find(model.id, model.num_layers)
        share = row.coverage(depth) if row is not None else None
        if row is None or share is None:
            return None
        recorded, counted = recorded_exits(model), self._record_tokens()
        tokens = sum((row.sure_tokens or row.exit_tokens).values())  # that were looked at
        if recorded is None:
            return share if tokens >= LEAST_TOKENS else None
        on_record = sum(n for k, n in recorded.items() if k <= depth)
        return (share * tokens + on_record * counted) / (tokens + counted)

    def _changed(self, model: CatalogueModel, depth: int, own: HistoryRow | None) -> float:
        expected = expected_changed(model.record(depth), self._coverage(model, depth) or 0.0)
        return steadied_changed(expected, own, self._record_tokens())

    @staticmethod
    def _perplexity(
        model: CatalogueModel, depth: int, full: HistoryRow, own: HistoryRow | None
    ) -> float:
        """As served at that depth; else the profile's, worse by as much as it is on record.

        A profile's tokens left early only where they were sure; a partial depth lets all go.
        """
        here, whole = model.record(depth), model.record(model.num_layers)
        if own is not None and own.perplexity is not None:
            return _perplexity(own, here)
        live = _perplexity(full, whole)
        if here is None or whole is None or not here.perplexity or not whole.perplexity:
            return live
        return live * max(1.0, here.perplexity / whole.perplexity)

    def _tpot_s(
        self,
        model: CatalogueModel,
        depth: int,
        full: HistoryRow,
        own: HistoryRow | None,
        batch: float,
    ) -> float:
        source = own if own is not None and own.tpot_s is not None else full
        part = self._best_known_part(model, full) if source is full else None
        counted = self._record_tokens()
        if part is not None and depth == model.num_layers:
            source, exits = part, deepened(model, part, full)
        else:
            exits = cut(steadied(model, source.exit_tokens, counted), depth)
        assert source.tpot_s is not None  # the caller looked
        seconds = source.tpot_s * _work_ratio(model, depth, source, exits)
        usual_s = recorded_token_s(model, exits, source.batch)
        factor = speed(self._served()) if usual_s is not None else None
        if usual_s is not None and factor is not None:
            seconds = source.decoded * seconds + counted * factor * usual_s
            seconds /= source.decoded + counted
        at_batch = step_s(model.record(source.depth), batch)
        then = step_s(model.record(source.depth), source.batch)
        return seconds * at_batch / then if at_batch and then else seconds

    def _served(self) -> list[tuple[CatalogueModel, HistoryRow]]:
        return [(self._models[row.model], row) for row in self._table if row.model in self._models]

    def _best_known_part(self, model: CatalogueModel, full: HistoryRow) -> HistoryRow | None:
        """A partial depth that has seen more of the stream than the full one's profile."""
        rows = (self._table.find(model.id, depth) for depth in model.exits.layers)
        known = [r for r in rows if r is not None and r.tpot_s is not None and r.exit_tokens]
        best = max(known, key=lambda r: r.requests, default=None)
        return best if best is not None and best.requests > full.requests else None

    def _joules_per_token(
        self, model: CatalogueModel, depth: int, full: HistoryRow, own: HistoryRow | None
    ) -> float | None:
        if own is not None and own.joules_per_token is not None:
            return own.joules_per_token
        if full.joules_per_token is not None:
            exits = cut(steadied(model, full.exit_tokens, self._record_tokens()), depth)
            return full.joules_per_token * _work_ratio(model, depth, full, exits)
        record = model.record(depth)
        return record.joules_per_token if record is not None else None


def _work_ratio(
    model: CatalogueModel, depth: int, source: HistoryRow, exits: Mapping[int, float]
) -> float:
    """Work of the mean token at a depth that leaves as `exits` says, over that of a row's."""
    before = {k: n for k, n in source.exit_tokens.items() if n > 0.0}
    if before and exits:
        return cost_ratio(model, exits, before, source.batch)
    return depth / source.depth


def _perplexity(row: HistoryRow, record: DepthRecord | None) -> float:
    """A row's, together with what is on record; 1 where nothing is known."""
    nll, scored = row.nll, row.scored
    if record is not None and record.perplexity:
        nll += RECORD_TOKENS * math.log(record.perplexity)
        scored += RECORD_TOKENS
    return math.exp(min(nll / scored, 700.0)) if scored else 1.0
