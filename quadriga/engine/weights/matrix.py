"""A matrix in the form in which it lies in memory.

Weights are read end to end at every step, so the fewer bytes they take, the faster the step. Two
kinds of forms there are. Those that a file stores: the compiled kernels make floats of them in
registers (`kernels/forms.h`), and whoever computes in plain torch gets the same numbers, to the
bit, from `values`. And those that an engine is asked for and rounds to while it loads
(`kernels/interleaved.h`): products with them round their inputs as well, which is what makes them
fast; `rounded` does it for plain torch, so that both give the same but for the order of their
sums.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

from quadriga.checkpoint.stored_forms import BLOCK_FORMS, BLOCK_WEIGHTS, GROUP_ROWS, BlockForm

LANE_BYTES = 4
"""Of one row, before those of the next."""
INPUT_BLOCK = 64
"""Inputs of a product with int8 that share a scale; `Int8::kBlock`."""
_SCALE_BYTES = 4
_EACH_TIME_ROWS = 4096
"""Converted at once, so that a table of tokens is not held twice in float32."""
_INT8_MOST = 127


class Form(enum.IntEnum):
    """How a matrix's rows are stored; the kernels know the forms by these numbers."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    INT8 = 6
    BFLOAT16_PAIRS = 7

    @property
    def block(self) -> BlockForm | None:
        """Of a quantised form that files have."""
        return BLOCK_FORMS.get(self.name)

    @property
    def is_interleaved(self) -> bool:
        """Rows lie 16 by 16, and products round their inputs."""
        return self in (Form.INT8, Form.BFLOAT16_PAIRS)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that holds the rows."""
        return torch.uint8 if self.block is not None else _DTYPES[self]

    def width(self, columns: int) -> int | None:
        """Elements of `dtype` in a row of so many weights; None where blocks do not come out."""
        if self is Form.INT8:
            return columns + _SCALE_BYTES
        return columns if self.block is None else self.block.row_bytes(columns)

    def takes(self, num_rows: int, columns: int, parts: int = 0) -> bool:
        """Whether a matrix can be stored so.

        Args:
            parts: Equal ones of which each is used apart; 0: it ends what it is stored in.
        """
        if self.is_interleaved:
            whole_lanes = columns * self.dtype.itemsize % LANE_BYTES == 0
            return whole_lanes and (not parts or num_rows % (parts * GROUP_ROWS) == 0)
        return self.width(columns) is not None

    def stored_rows(self, num_rows: int) -> int:
        """Rows that so many take up, with those of zeros that fill the last group."""
        return -(-num_rows // GROUP_ROWS) * GROUP_ROWS if self.is_interleaved else num_rows

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The inputs [..., columns] that products with this form really multiply by."""
        if self is Form.BFLOAT16_PAIRS:
            return x.bfloat16().to(x.dtype)
        if self is not Form.INT8:
            return x
        blocks = F.pad(x, (0, -x.shape[-1] % INPUT_BLOCK)).view(*x.shape[:-1], -1, INPUT_BLOCK)
        most = blocks.abs().amax(-1, keepdim=True)
        counts = (blocks * (_INT8_MOST / most.clamp_min(1e-30))).round()
        return (counts * (most / _INT8_MOST)).flatten(-2)[..., : x.shape[-1]]


MatrixForm = Form | Literal["stored", "dtype"]
"""In which form matrices are loaded: the one they are stored in, that of the numbers that are
computed with, or a named one."""

_DTYPES = {
    Form.FLOAT32: torch.float32,
    Form.BFLOAT16: torch.bfloat16,
    Form.FLOAT16: torch.float16,
    Form.INT8: torch.uint8,
    Form.BFLOAT16_PAIRS: torch.bfloat16,
}
FORM_OF_DTYPE = {dtype: form for form, dtype in _DTYPES.items() if not form.is_interleaved}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of weights.

    Attributes:
        rows: [num_rows + padding, form.width(columns)] of `form.dtype`; where rows are interleaved
            that is the memory they take together.
        padding: Rows of zeros behind the last.
    """

    form: Form
    rows: torch.Tensor
    padding: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, in weights."""
        num_rows, width = self.rows.shape[0] - self.padding, self.rows.shape[1]
        block = self.form.block
        if self.form is Form.INT8:
            return num_rows, width - _SCALE_BYTES
        return num_rows, width if block is None else width // block.num_bytes * BLOCK_WEIGHTS

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def __getitem__(self, which: slice) -> Matrix:
        """Some of the rows, uncopied; whole groups of them where they are interleaved."""
        if not self.form.is_interleaved:
            return Matrix(self.form, self.rows[which])
        num_rows = self.shape[0]
        start, stop, step = which.indices(num_rows)
        if start % GROUP_ROWS or (stop % GROUP_ROWS and stop != num_rows) or step != 1:
            raise ValueError(f"rows {start}..{stop} are no whole groups of {GROUP_ROWS}")
        padding = self.padding if stop == num_rows else 0
        return Matrix(self.form, self.rows[start : stop + padding], padding)

    def take(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows `ids`, int64 [n], as numbers: [n, columns]. Raises: IndexError."""
        if not self.form.is_interleaved:
            return Matrix(self.form, self.rows[ids]).values(dtype)
        groups = self.rows.view(-1, GROUP_ROWS, self.rows.shape[1])[ids // GROUP_ROWS]
        together = Matrix(self.form, groups.reshape(-1, self.rows.shape[1])).values(dtype)
        each = together.view(-1, GROUP_ROWS, self.shape[1])
        return each[torch.arange(ids.numel()), ids % GROUP_ROWS]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product in plain torch: [..., columns] → [..., num_rows]."""
        return F.linear(self.form.rounded(x), self.values(x.dtype), bias)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """All weights as numbers, [num_rows, columns]; uncopied where they are of this type."""
        if self.form.is_interleaved:
            return self._interleaved_values().to(dtype)
        block = self.form.block
        if block is None:
            return self.rows.to(dtype)
        blocks = self.rows.reshape(-1, block.num_bytes)
        scales, quants = self._scales(blocks, block), blocks[:, 2 * block.num_scales :]
        if self.form is Form.Q8_0:
            numbers = scales * quants.view(torch.int8)
        else:
            nibbles = torch.cat((quants & 15, quants >> 4), dim=1).float()
            if self.form is Form.Q4_0:
                numbers = scales * (nibbles - 8)
            else:
                numbers = scales[:, :1] * nibbles + scales[:, 1:]
        return numbers.view(self.shape).to(dtype)

    def fill(self, numbers: torch.Tensor) -> None:
        """Round finite numbers [num_rows, columns] into the rows; only forms of numbers."""
        if not self.form.is_interleaved:
            self.rows.copy_(numbers)
            return
        numbers = F.pad(numbers, (0, 0, 0, self.padding)) if self.padding else numbers
        for first in range(0, numbers.shape[0], _EACH_TIME_ROWS):
            some = slice(first, first + _EACH_TIME_ROWS)
            Matrix(self.form, self.rows[some])._interleave(numbers[some].float())

    def _interleave(self, numbers: torch.Tensor) -> None:
        """`fill` for the interleaved forms, all rows at once."""
        columns = numbers.shape[1]
        groups = self.rows.view(-1, GROUP_ROWS * self.rows.shape[1])
        if self.form is Form.BFLOAT16_PAIRS:
            halves = numbers.bfloat16().view(-1, GROUP_ROWS, columns // 2, 2)
            groups.copy_(halves.transpose(1, 2).reshape(groups.shape))
            return
        scales = numbers.abs().amax(1) / _INT8_MOST
        counts = (numbers / scales.clamp_min(1e-30)[:, None]).round().clamp(-_INT8_MOST, _INT8_MOST)
        stored = (
            (counts + 128).to(torch.uint8).view(-1, GROUP_ROWS, columns // LANE_BYTES, LANE_BYTES)
        )
        header = GROUP_ROWS * _SCALE_BYTES
        groups[:, :header] = scales.view(-1, GROUP_ROWS).view(torch.uint8)
        groups[:, header:] = stored.transpose(1, 2).reshape(groups.shape[0], -1)

    def _interleaved_values(self) -> torch.Tensor:
        (num_rows, columns), padded = self.shape, self.rows.shape[0]
        groups = self.rows.reshape(-1, GROUP_ROWS * self.rows.shape[1])
        if self.form is Form.BFLOAT16_PAIRS:
            halves = groups.view(-1, columns // 2, GROUP_ROWS, 2)
            return halves.transpose(1, 2).reshape(padded, columns)[:num_rows]
        header = GROUP_ROWS * _SCALE_BYTES
        scales = groups[:, :header].contiguous().view(torch.float32).view(padded, 1)
        lanes = groups[:, header:].reshape(-1, columns // LANE_BYTES, GROUP_ROWS, LANE_BYTES)
        counts = lanes.transpose(1, 2).reshape(padded, columns).float() - 128
        return (counts * scales)[:num_rows]

    def is_finite(self) -> bool:
        """Whether no weight is NaN or infinite."""
        block = self.form.block
        if block is not None:
            return bool(
                self._scales(self.rows.reshape(-1, block.num_bytes), block).isfinite().all()
            )
        if not self.rows.numel():
            return True
        # Without a copy of the tensor: NaN is both its least and its greatest.
        return bool(torch.isfinite(torch.stack(self.rows.aminmax())).all())

    @staticmethod
    def _scales(blocks: torch.Tensor, block: BlockForm) -> torch.Tensor:
        """The float16 numbers of blocks [n, bytes], as float32: [n, num_scales]."""
        return blocks[:, : 2 * block.num_scales].contiguous().view(torch.float16).float()
