"""Try a model on a few tokens before it serves: is its cache plain, do padded rows compute alike?

Every family handles masks, positions and caches in its own code. Instead of trusting a list of
names, the relay batch runs what it will do in service (chunks, groups, insertion, padding, steps)
on a handful of tokens and compares the logits with one plain pass without a cache.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from quadriga.config.engine_spec import EngineSpec
from quadriga.engine.baton.dense import DenseBatch
from quadriga.engine.baton.loading import FOREIGN_ERRORS, refuse
from quadriga.engine.baton.model import CausalModel
from quadriga.engine.baton.passes import decode_step, prompt_pass
from quadriga.engine.baton.prompts import PromptSpan
from quadriga.engine.baton.row_kv import CacheGeometry, RowKV
from quadriga.errors import ConfigError

PROBE_TOKENS = 10
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}
"""Largest difference of logits, relative to the largest logit, that counts as rounding."""


class _RecordingCache(DynamicCache):
    """Notes in which order the layers are filled."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.order.append(layer_idx)
        kv: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return kv


def probe(spec: EngineSpec, loaded: PreTrainedModel) -> tuple[CausalModel, CacheGeometry]:
    """Return the model, wrapped, and the shape of its cache.

    Raises:
        ConfigError: Its cache is not plain, padded and unpadded passes differ, or its positions
            do not reach as far as a row.
    """
    name = spec.checkpoint.id
    model = CausalModel(loaded)
    if not model.takes_cache:
        raise refuse(name, "its forward takes no past_key_values")
    try:
        geometry = inspect_cache(model, name)
        check_plan(spec, geometry)
        error = padding_error(model, geometry, spec)
    except FOREIGN_ERRORS as exc:
        raise refuse(name, f"a trial pass failed: {type(exc).__name__}: {exc}") from exc
    if not error <= TOLERANCE[spec.dtype]:  # also refuses what is not a number
        raise refuse(
            name,
            f"logits of padded rows differ from unpadded ones by {error:.2g} of the largest: it "
            "ignores the mask or the positions it is given, or looks ahead",
        )
    check_last_position(model, geometry, spec)
    return model, geometry


def probe_tokens(vocab_size: int, count: int, *, seed: int) -> list[int]:
    """Ordinary token ids, spread over the vocabulary; low ids, often special, are left out."""
    low = min(10, vocab_size // 2)
    return [low + (seed + 37 * i + i * i) % (vocab_size - low) for i in range(count)]


@torch.no_grad()
def inspect_cache(model: CausalModel, name: str) -> CacheGeometry:
    """Run three tokens and look at what they left in a plain cache.

    Raises:
        ConfigError: Not K and V of one shape in each layer, filled in order.
    """
    cache = _RecordingCache()
    ids = torch.tensor([probe_tokens(model.config.vocab_size, 3, seed=0)])
    logits = model(ids, torch.ones_like(ids), torch.arange(3)[None], cache)
    shapes: set[tuple[int, ...]] = set()
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise refuse(name, f"layer {index} leaves no K/V in a plain cache")
        shapes |= {tuple(layer.keys.shape), tuple(layer.values.shape)}
    if not cache.layers:
        raise refuse(name, "it does not fill the cache it is given")
    if cache.order != list(range(len(cache.layers))):
        raise refuse(name, f"its layers fill the cache in the order {cache.order[:8]}…")
    batch, heads, num_tokens, head_dim = shape = shapes.pop()
    if shapes or (batch, num_tokens) != (1, 3):
        found = " and ".join(str(list(s)) for s in sorted({shape, *shapes}))
        raise refuse(name, f"for 3 tokens its cache holds {found} instead of one [1, heads, 3, d]")
    return CacheGeometry(len(cache.layers), heads, head_dim, logits.shape[-1])


def check_plan(spec: EngineSpec, geometry: CacheGeometry) -> None:
    """Compare the cache found with the one that memory was planned for.

    Raises:
        ConfigError: It needs more than was planned, or has another number of layers.
    """
    planned = spec.checkpoint.kv_bytes_per_token(spec.checkpoint.num_layers, 1)
    if geometry.num_layers != spec.checkpoint.num_layers:
        raise refuse(
            spec.checkpoint.id,
            f"{geometry.num_layers} layers fill the cache, config.json says "
            f"{spec.checkpoint.num_layers}",
        )
    if geometry.values_per_token > planned:
        raise refuse(
            spec.checkpoint.id,
            f"its cache takes {geometry.values_per_token} numbers a token, config.json lets "
            f"expect {planned}; state num_key_value_heads and head_dim there",
        )


def padding_error(model: CausalModel, geometry: CacheGeometry, spec: EngineSpec) -> float:
    """Largest difference of logits between service and a plain pass, relative to the largest logit.

    Not a number where a logit is none.
    """
    trial = _Trial(model, geometry, spec)
    trial.prefill()
    trial.decode()
    return max(trial.errors, key=lambda e: (e != e, e))


class _Trial:
    """Two sequences of different length on the whole way, compared with themselves alone.

    Args:
        spec: For its dtype, and for the longest row.
    """

    @torch.no_grad()
    def __init__(self, model: CausalModel, geometry: CacheGeometry, spec: EngineSpec) -> None:
        self._model = model
        self._geometry = geometry
        dtype, device = getattr(torch, spec.dtype), model.device
        most = spec.row_capacity_tokens
        lengths = [min(n, most) for n in (PROBE_TOKENS, PROBE_TOKENS - 4)]
        self._prompts = [probe_tokens(geometry.vocab_size, n, seed=5 * n) for n in lengths]
        self._wanted = []
        for prompt in self._prompts:
            ids = torch.tensor([prompt], device=device)
            positions = torch.arange(len(prompt), device=device)[None]
            self._wanted.append(model(ids, torch.ones_like(ids), positions, None)[0])
        self._scale = max(float(logits.abs().max()) for logits in self._wanted) or 1.0
        self._rows = [RowKV(geometry, dtype, device, max_tokens=most) for _ in lengths]
        self._batch = DenseBatch(
            geometry, dtype, device, max_rows=2, row_capacity_tokens=most, release_columns=2
        )
        self.errors = [0.0]

    def prefill(self) -> None:
        """First tokens of both in one pass, padded; then one chunk of each alone."""
        num_layers = self._geometry.num_layers
        firsts = [min(n, len(prompt)) for n, prompt in zip((3, 2), self._prompts, strict=True)]
        spans = [
            PromptSpan(row, prompt[:n], 0)
            for row, prompt, n in zip(self._rows, self._prompts, firsts, strict=True)
        ]
        keep = sorted({n - 1 for n in firsts})
        logits = prompt_pass(self._model, num_layers, spans, keep)
        for i, n in enumerate(firsts):
            self._compare(i, n - 1, logits[i, keep.index(n - 1)][None])
        for i, (row, prompt) in enumerate(zip(self._rows, self._prompts, strict=True)):
            chunk = prompt[row.length : -3]
            if chunk:
                start = row.length
                span = PromptSpan(row, chunk, start)
                self._compare(i, start, prompt_pass(self._model, num_layers, [span], None)[0])

    def decode(self) -> None:
        """The short one joins first, the long one extends it; then they step together."""
        left = [len(p) - r.length for p, r in zip(self._prompts, self._rows, strict=True)]
        if min(left) == 0:
            return
        for i in (1, 0):
            self._batch.insert(i, self._rows[i].prefix(self._rows[i].length))
        for _ in range(min(left)):
            inputs = self._batch.begin_step()
            starts = [self._batch.length(row) for row in inputs.rows]
            tokens = [self._prompts[r][at] for r, at in zip(inputs.rows, starts, strict=True)]
            logits = decode_step(
                self._model, self._geometry.num_layers, self._batch, inputs, tokens
            )
            self._batch.end_step()
            for i, (row, at) in enumerate(zip(inputs.rows, starts, strict=True)):
                self._compare(row, at, logits[i][None])

    def _compare(self, row: int, first: int, logits: torch.Tensor) -> None:
        """Note how far these logits are from those of the sequence alone, from `first` on."""
        wanted = self._wanted[row][first : first + len(logits)]
        self.errors.append(float((wanted - logits).abs().max()) / self._scale)


@torch.no_grad()
def check_last_position(model: CausalModel, geometry: CacheGeometry, spec: EngineSpec) -> None:
    """Run one token at the last position of a full row.

    Raises:
        ConfigError: The model's tables of positions or biases are shorter.
    """
    most = spec.row_capacity_tokens
    batch = DenseBatch(
        geometry, getattr(torch, spec.dtype), model.device, max_rows=1, row_capacity_tokens=most
    )
    g = geometry
    row = torch.zeros((g.num_layers, 2, g.num_kv_heads, 1, g.head_dim), device=model.device)
    batch.insert(0, row.expand(-1, -1, -1, most - 1, -1))
    token = probe_tokens(geometry.vocab_size, 1, seed=0)
    try:
        decode_step(model, geometry.num_layers, batch, batch.begin_step(), token)
    except FOREIGN_ERRORS as exc:
        raise ConfigError(
            f"engine.max_model_len: {spec.checkpoint.id} cannot compute position {most - 1} "
            f"({type(exc).__name__}: {exc}); lower engine.max_model_len",
            param="engine.max_model_len",
        ) from exc
