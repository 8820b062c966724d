"""K/V of one sequence outside the running batch: being filled, sitting out, or suspended."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quadriga.core.kv import KVExtent
from quadriga.errors import InvariantViolation

BLOCK_TOKENS = 64
"""A row's memory grows by doubling, in multiples of this."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What one token leaves in the cache: `num_layers` times K and V of [num_kv_heads, head_dim].

    Attributes:
        vocab_size: Width of the logits; padded vocabularies are wider than the tokenizer's.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def values_per_token(self) -> int:
        """Numbers stored for one token, over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


class RowKV:
    """One tensor [num_layers, 2, num_kv_heads, capacity, head_dim], filled from position 0 on.

    Layers may be filled one after another (a hand-off sends groups of layers), so each has a
    length of its own; the row's is the least of them.
    """

    def __init__(
        self, geometry: CacheGeometry, dtype: torch.dtype, device: torch.device, *, max_tokens: int
    ) -> None:
        self._geometry = geometry
        self._max_tokens = max_tokens
        self._lengths = [0] * geometry.num_layers
        self._kv = torch.zeros(self._shape(0), dtype=dtype, device=device)

    @property
    def length(self) -> int:
        """Positions whose K/V is here in all layers."""
        return min(self._lengths)

    @property
    def extents(self) -> list[KVExtent]:
        """See `Suspended.extents`."""
        return [KVExtent(0, self._geometry.num_layers, self.length)]

    @property
    def rest(self) -> None:
        """See `Suspended.rest`: K/V is all there is."""

    @property
    def num_bytes(self) -> int:
        return self._kv.nbytes

    @property
    def device(self) -> torch.device:
        return self._kv.device

    def move(self, device: torch.device) -> None:
        """Take the row to another memory; the old one is free afterwards."""
        self._kv = self._kv.to(device)

    def crop(self, num_tokens: int) -> None:
        """Forget everything from position `num_tokens` on."""
        self._lengths = [min(length, num_tokens) for length in self._lengths]

    def put(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's K and V [num_kv_heads, n, head_dim] from position `start` on."""
        stop = self._extend(layer, 1, start, keys.shape[1])
        self._kv[layer, 0, :, start:stop] = keys
        self._kv[layer, 1, :, start:stop] = values

    def write(self, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """Store what `read` returned, from position `start` on.

        Raises:
            InvariantViolation: Misshapen, out of range, or it would leave a gap.
        """
        heads, head_dim = self._geometry.num_kv_heads, self._geometry.head_dim
        num_layers, num_tokens = kv.shape[0], kv.shape[3] if kv.dim() == 5 else 0
        if tuple(kv.shape) != (num_layers, 2, heads, num_tokens, head_dim):
            raise InvariantViolation(
                f"KV of shape {tuple(kv.shape)} does not fit [layers, 2, {heads}, n, {head_dim}]"
            )
        stop = self._extend(first_layer, num_layers, start, num_tokens)
        self._kv[first_layer : first_layer + num_layers, :, :, start:stop] = kv

    def read(self, first_layer: int, num_layers: int, start: int, stop: int) -> torch.Tensor:
        """Copy of positions [start, stop): [num_layers, 2, num_kv_heads, stop - start, head_dim].

        Raises:
            InvariantViolation: Not all of it is here.
        """
        last = first_layer + num_layers
        if not (0 <= first_layer < last <= len(self._lengths) and 0 <= start <= stop):
            raise InvariantViolation(f"layers {first_layer}..{last}, positions {start}..{stop}")
        if stop > min(self._lengths[first_layer:last]):
            raise InvariantViolation(
                f"positions {start}..{stop} of layers {first_layer}..{last} are not all computed"
            )
        return self._kv[first_layer:last, :, :, start:stop].clone(
            memory_format=torch.contiguous_format
        )

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's K and V so far, in place: [1, num_kv_heads, n, head_dim] each."""
        stop = self._lengths[layer]
        return self._kv[layer, 0, None, :, :stop], self._kv[layer, 1, None, :, :stop]

    def prefix(self, num_tokens: int) -> torch.Tensor:
        """The first positions of all layers, in place."""
        return self._kv[:, :, :, :num_tokens]

    def _extend(self, first_layer: int, num_layers: int, start: int, num_tokens: int) -> int:
        """Make room and account for a write; return where it stops."""
        stop = start + num_tokens
        layers = range(first_layer, first_layer + num_layers)
        if first_layer < 0 or layers.stop > len(self._lengths) or not 0 <= start <= stop:
            raise InvariantViolation(f"write to layers {layers}, positions {start}..{stop}")
        if stop > self._max_tokens:
            raise InvariantViolation(
                f"write to positions {start}..{stop}: a row holds {self._max_tokens}"
            )
        if any(start > self._lengths[layer] for layer in layers):
            raise InvariantViolation(f"write from position {start} leaves a gap before it")
        self._grow(stop)
        for layer in layers:
            self._lengths[layer] = max(self._lengths[layer], stop)
        return stop

    def _grow(self, num_tokens: int) -> None:
        capacity = self._kv.shape[3]
        if num_tokens <= capacity:
            return
        wanted = max(num_tokens, 2 * capacity)
        wanted = min(-(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS, self._max_tokens)
        grown = torch.zeros(self._shape(wanted), dtype=self._kv.dtype, device=self._kv.device)
        grown[:, :, :, :capacity] = self._kv
        self._kv = grown

    def _shape(self, capacity: int) -> tuple[int, ...]:
        g = self._geometry
        return (g.num_layers, 2, g.num_kv_heads, capacity, g.head_dim)
