"""A rank's part of each operation: its decoder and its KV rows, which hold its heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.config.engine_spec import EngineSpec
from quadriga.engine.compiled import CompiledDecoder, KernelSwap, find_kernels
from quadriga.engine.kv_cache import RowKVCache, budget_tokens
from quadriga.engine.models.decoder import Decoder
from quadriga.engine.tensor_parallel.ranks import Op, Order, Ranks, Tokens
from quadriga.engine.weights.loading import load_spec
from quadriga.engine.weights.shards import Shard


class Part:
    """What one rank holds of a model, and does.

    Attributes:
        decoder: Over this rank's heads, share of the MLP and of the vocabulary: compiled kernels
            where there are some, else plain torch.
        cache: KV rows of this rank's heads.
    """

    def __init__(self, spec: EngineSpec, whole: ModelConfig, shard: Shard) -> None:
        config = shard.config(whole)
        # In step from the beginning: kernels that came later would come at another time each.
        spec = replace(spec, compile="wait" if spec.compile == "auto" else spec.compile)
        kernels = find_kernels(spec)
        weights = load_spec(spec, config, has_kernels=kernels.library is not None, shard=shard)
        self.cache = RowKVCache(
            num_layers=spec.depth,
            num_rows=spec.num_rows,
            num_kv_heads=config.num_kv_heads,
            capacity=spec.row_capacity_tokens,
            head_dim=config.head_dim,
            dtype=weights.dtype,
            budget_tokens=budget_tokens(spec),
        )
        self.eager = Decoder(config, weights, self.cache)
        self.eager.gather = self._gather
        self.decoder: Decoder | CompiledDecoder = (
            KernelSwap(spec, self.eager, kernels).take() or self.eager
        )
        self.shard = shard
        self.ranks: Ranks | None = None
        self._kept: dict[int, object] = {}

    def join(self, ranks: Ranks) -> Ranks:
        """Meet the other ranks."""
        self.ranks = ranks
        return ranks

    @property
    def _met(self) -> Ranks:
        assert self.ranks is not None, "a part computes with the others alone"
        return self.ranks

    def _gather(self, columns: torch.Tensor) -> torch.Tensor:
        return self._met.all_gather(columns.contiguous())

    def plan(self, tokens: Tokens) -> Any:
        """This rank's plan of a pass, made once."""
        if tokens.plan is None:
            tokens.plan = self.decoder.plan_tokens(tokens.rows, tokens.positions)
        return tokens.plan

    def embed(self, ids: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Token ids [T] that all ranks have → hidden states [T, hidden]."""
        weights, size = self.eager.weights, self.eager.config.vocab_size
        own = ids - self.shard.rank * size
        is_here = (own >= 0) & (own < size)
        x = weights.embed.take(torch.where(is_here, own, 0), weights.dtype)
        x = self._met.total(x.masked_fill(~is_here[:, None], 0.0))
        if weights.project_in is not None:
            x = weights.project_in.linear(x)
        if weights.positions is not None:
            x = x + weights.positions[torch.from_numpy(tokens.positions)]
        return self._met.computed(x)

    def run_layers(self, x: torch.Tensor, tokens: Tokens, first: int, stop: int) -> torch.Tensor:
        """See `Decoder.run_layers`; every rank has the result."""
        return self._met.computed(self.decoder.run_layers(x, self.plan(tokens), first, stop))

    def logits(self, x: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """The exit's logits, a part of the vocabulary from each rank: at rank 0."""
        return self._met.gather(self.decoder.logits(x, depth))

    def read(self, row: int, first: int, count: int, start: int, stop: int) -> list[torch.Tensor]:
        """KV of a row, some heads from each rank: at rank 0."""
        return self._met.gather(self.cache.read(row, first, count, start, stop))

    def write(
        self,
        row: int,
        first: int,
        count: int,
        start: int,
        num_tokens: int,
        parts: list[torch.Tensor],
    ) -> None:
        """Store what `read` gave; `parts` at rank 0 alone."""
        config, dtype = self.eager.config, self.eager.weights.dtype
        shape = (count, 2, config.num_kv_heads, num_tokens, config.head_dim)
        kv = self._met.scatter(parts, torch.empty(shape, dtype=dtype))
        self.cache.write(row, first, start, kv)

    def keep(self, row: int, start: int, number: int, over: int) -> None:
        """Keep a block under a number; `over` names one that goes for it, −1 none."""
        self._kept[number] = self.cache.keep(row, start, self._kept.pop(over, None))

    def share(self, row: int, start: int, number: int) -> None:
        """Let a row have a block."""
        self.cache.share(row, start, self._kept[number])

    def forget(self, number: int) -> None:
        """Let a block go."""
        self.cache.forget(self._kept.pop(number))

    @torch.inference_mode()
    def follow(self) -> None:
        """Do what rank 0 orders, until it says that this is the end.

        Raises:
            RuntimeError: Rank 0 or another one died, or fell silent.
        """
        while (order := self._met.hear()).op is not Op.END:
            self._obey(order)

    def _obey(self, order: Order) -> None:
        a, b, c, d, e, _ = order.numbers
        tokens, states = order.tokens, order.states
        match order.op:
            case Op.PULSE:
                self._met.total(torch.zeros(1))
            case Op.READ:
                self.read(a, b, c, d, e)
            case Op.WRITE:
                self.write(a, b, c, d, e, [])
            case Op.RELEASE:
                self.cache.release(a)
            case Op.KEEP:
                self.keep(a, b, c, d)
            case Op.SHARE:
                self.share(a, b, c)
            case Op.FORGET:
                self.forget(a)
            case Op.EMBED:
                assert tokens is not None
                ids = torch.empty(len(tokens.rows), dtype=torch.int64)
                self.embed(self._met.broadcast(ids), tokens)
            case Op.LAYERS:
                assert tokens is not None and states is not None
                self.run_layers(states, tokens, a, b)
            case Op.PROJECT_KV:
                assert tokens is not None and states is not None
                self.decoder.project_kv(states, self.plan(tokens), a, b, c)
            case Op.LOGITS:
                assert states is not None
                self.logits(states, a)
            case Op.COPY_LAYERS:
                assert tokens is not None
                self.cache.copy_layers(tokens.rows, tokens.positions, a, b, c)
            case _:
                raise AssertionError(f"{order.op!r} is no order")
