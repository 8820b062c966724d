"""Matrices of quantised checkpoints as numbers.

Where a matrix `NAME.weight` is quantised, several tensors stand for it; `QuantisedTensors` knows
which, by the layout that `quadriga.checkpoint.quantisation` names, and multiplies them out in
float32, in which every product of a weight and its scale is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path

import torch

from quadriga.checkpoint.json_files import GARBLED
from quadriga.checkpoint.quantisation import Quantisation
from quadriga.errors import ConfigError

_SUFFIX = ".weight"
_WORD_BITS = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of eight that each nibble of a word belongs to, from the lowest nibble on."""
_SCALES = ("weight_scale", "weight_scale_inv")
"""What multiplies weights in a byte; FP8's calls itself inverse and multiplies as well."""


class QuantisedTensors:
    """The quantised matrices of one checkpoint.

    Args:
        how: They are stored.
        path: Of the checkpoint, for messages.
        names: Of all its tensors.
        read: Returns one of them.
    """

    def __init__(
        self,
        how: Quantisation,
        path: Path,
        names: Container[str],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self._how, self._path, self._names, self._read = how, path, names, read

    def __contains__(self, name: str) -> bool:
        """Whether it is a matrix of this checkpoint that is quantised."""
        return self._mark(name) is not None

    def values(self, name: str) -> torch.Tensor:
        """A matrix as float32 [rows, columns].

        Raises:
            ConfigError: A tensor of it is missing, or does not fit the others.
        """
        base = name.removesuffix(_SUFFIX)
        mark = self._mark(name)
        try:
            if mark == "weight_packed":
                return self._packed(base)
            if mark == "qweight":
                return self._columns_first(base)
            return self._bytes(base, str(mark))
        except (*GARBLED, RuntimeError) as exc:
            raise ConfigError(
                f"model: the tensors of {name} in {self._path} do not fit each other, or its "
                f"quantization_config: {exc}",
                param="model",
            ) from exc

    def _mark(self, name: str) -> str | None:
        """The tensor by which one sees that `name` is quantised, and how."""
        if not name.endswith(_SUFFIX):
            return None
        base = name.removesuffix(_SUFFIX)
        marks = {
            "gptq": ("qweight",),
            "awq": ("qweight",),
            "fp8": _SCALES,
            "compressed-tensors": ("weight_packed", *_SCALES),
        }[self._how.method]
        return next((mark for mark in marks if f"{base}.{mark}" in self._names), None)

    def _packed(self, base: str) -> torch.Tensor:
        """compressed-tensors: integers plus half their range, in words along the rows."""
        how = self._how
        shape = self._read(f"{base}.weight_shape").tolist()
        rows, columns = (int(size) for size in shape)
        half = 1 << (how.bits - 1)
        counts = _unpacked(self._read(f"{base}.weight_packed"), how.bits)[:, :columns] - half
        if counts.shape != (rows, columns):  # before anything is made by those numbers
            raise ValueError(f"weight_packed holds {list(counts.shape)}, weight_shape is {shape}")
        scales = self._read(f"{base}.weight_scale").float()
        zeros: torch.Tensor | None = None
        if f"{base}.weight_zero_point" in self._names:
            words = self._read(f"{base}.weight_zero_point")
            zeros = _unpacked(words.t(), how.bits).t()[:rows] - half
        order = f"{base}.weight_g_idx"
        groups = self._groups(columns, scales.shape[1], order)
        return _scaled(counts, scales, zeros, groups)

    def _columns_first(self, base: str) -> torch.Tensor:
        """GPTQ and AWQ: [columns, rows], with zero points and scales by group."""
        how, is_awq = self._how, self._how.method == "awq"
        words, zero_words = self._read(f"{base}.qweight"), self._read(f"{base}.qzeros")
        scales = self._read(f"{base}.scales").float()
        if is_awq:
            counts, zeros = (_awq_unpacked(w, how.bits) for w in (words, zero_words))
        else:
            counts = _unpacked(words.t(), how.bits).t()
            zeros = _unpacked(zero_words, how.bits)
        if how.adds_one:
            zeros = zeros + 1 & (1 << how.bits) - 1
        if counts.shape[1] != scales.shape[1]:
            raise ValueError(f"{counts.shape[1]} rows have {scales.shape[1]} scales")
        groups = self._groups(counts.shape[0], scales.shape[0], f"{base}.g_idx")
        return _scaled(counts.t(), scales.t(), zeros.t(), groups)

    def _bytes(self, base: str, scale: str) -> torch.Tensor:
        """One byte a weight, an integer or a float: scales of all, by row, by group or by block."""
        stored = self._read(f"{base}.weight")
        if stored.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(f"weight is {stored.dtype}, not int8 or float8_e4m3fn")
        counts, scales = stored.float(), self._read(f"{base}.{scale}").float()
        rows, columns = counts.shape
        if f"{base}.weight_zero_point" in self._names:
            zeros = self._read(f"{base}.weight_zero_point").float()
        else:
            zeros = torch.zeros_like(scales)
        if scales.numel() == 1:
            return (counts - zeros.reshape(1, 1)) * scales.reshape(1, 1)
        if scales.shape == (rows,):
            scales, zeros = scales[:, None], zeros[:, None]
        high, wide = map(min, self._how.block, counts.shape)
        if list(scales.shape) == [-(-rows // high), -(-columns // wide)]:
            each = scales.repeat_interleave(high, 0)[:rows]
            return counts * each.repeat_interleave(wide, 1)[:, :columns]
        if scales.shape[0] != rows:
            raise ValueError(
                f"scales {list(scales.shape)} for {rows} × {columns} weights in blocks of "
                f"{high} × {wide}"
            )
        groups = self._groups(columns, scales.shape[1], f"{base}.weight_g_idx")
        return _scaled(counts, scales, zeros, groups)

    def _groups(self, columns: int, num_groups: int, order: str) -> torch.Tensor:
        """The group of every column, int64 [columns]."""
        if order in self._names:
            groups = self._read(order).long()
        elif num_groups == 1:
            groups = torch.zeros(columns, dtype=torch.long)
        else:
            size = self._how.group_size or -(-columns // num_groups)
            groups = torch.arange(columns) // size
        if groups.shape != (columns,) or int(groups.min()) < 0 or int(groups.max()) >= num_groups:
            raise ValueError(f"{columns} columns in groups do not fit {num_groups} scales a row")
        return groups


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Counts from int32 words along the last dimension, the lowest bits first: int32."""
    if words.dtype != torch.int32 or words.ndim != 2:
        raise ValueError(f"packed weights are {words.dtype} of shape {list(words.shape)}")
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    counts = words[..., None] >> shifts & (1 << bits) - 1
    return counts.flatten(1)


def _awq_unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    counts = _unpacked(words, bits)
    in_order = torch.empty_like(counts).view(counts.shape[0], -1, len(_AWQ_ORDER))
    in_order[:, :, list(_AWQ_ORDER)] = counts.view_as(in_order)
    return in_order.view_as(counts)


def _scaled(
    counts: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, groups: torch.Tensor
) -> torch.Tensor:
    """(count - zero) · scale, [rows, columns], with zeros and scales by row and group."""
    if scales.shape[0] not in (1, counts.shape[0]):
        raise ValueError(f"{counts.shape[0]} rows have {scales.shape[0]} rows of scales")
    if zeros is not None:
        if zeros.shape != scales.shape:
            raise ValueError(f"zero points {list(zeros.shape)}, scales {list(scales.shape)}")
        counts = counts - zeros[:, groups]
    return counts * scales[:, groups]
