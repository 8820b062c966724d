"""A matrix in the form it is stored in.

Weights are read end to end at every step, so the fewer bytes they take, the faster the step. The
compiled kernels make floats of them in registers (`kernels/forms.h`); whoever computes in plain
torch asks for `values`. Both give the same numbers, to the bit.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from quadriga.checkpoint.stored_forms import BLOCK_FORMS, BLOCK_WEIGHTS, BlockForm


class Form(enum.IntEnum):
    """How a matrix's rows are stored; the kernels know the forms by these numbers."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5

    @property
    def block(self) -> BlockForm | None:
        """Of a quantised form."""
        return BLOCK_FORMS.get(self.name)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that holds the rows."""
        return torch.uint8 if self.block is not None else _DTYPES[self]

    def width(self, columns: int) -> int | None:
        """Elements of `dtype` in a row of so many weights; None where blocks do not come out."""
        return columns if self.block is None else self.block.row_bytes(columns)


_DTYPES = {
    Form.FLOAT32: torch.float32,
    Form.BFLOAT16: torch.bfloat16,
    Form.FLOAT16: torch.float16,
}
FORM_OF_DTYPE = {dtype: form for form, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of weights.

    Attributes:
        rows: [num_rows, form.width(columns)] of `form.dtype`.
    """

    form: Form
    rows: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, in weights."""
        num_rows, width = self.rows.shape
        block = self.form.block
        return num_rows, width if block is None else width // block.num_bytes * BLOCK_WEIGHTS

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def __getitem__(self, which: slice) -> Matrix:
        """Some of the rows, uncopied."""
        return Matrix(self.form, self.rows[which])

    def take(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows `ids`, int64 [n], as numbers: [n, columns]. Raises: IndexError."""
        return Matrix(self.form, self.rows[ids]).values(dtype)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """All weights as numbers, [num_rows, columns]; uncopied where they are of this type."""
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
