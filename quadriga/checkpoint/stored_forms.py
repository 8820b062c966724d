"""How quantised matrices are stored: in blocks of 32 weights along a row, as GGUF files have them.

A checkpoint of ours keeps such a matrix as bytes, in a tensor `NAME.FORM` of type U8 with the shape
[rows, bytes of a row]. The formats themselves are those of ggml.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_WEIGHTS = 32
GROUP_ROWS = 16
"""Rows that lie interleaved where an engine rounds weights; `kGroupRows` of interleaved.h."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """One way to store 32 weights.

    Attributes:
        name: As GGUF calls it.
        num_bytes: Of a block.
        num_scales: float16 numbers at its beginning; all weights are finite where these are.
    """

    name: str
    num_bytes: int
    num_scales: int

    def row_bytes(self, columns: int) -> int | None:
        """Bytes of a row of so many weights; None where they fill no whole number of blocks."""
        blocks, rest = divmod(columns, BLOCK_WEIGHTS)
        return None if rest else blocks * self.num_bytes

    def columns(self, row_bytes: int) -> int | None:
        """Weights of a row of so many bytes; None where these are no whole number of blocks."""
        blocks, rest = divmod(row_bytes, self.num_bytes)
        return None if rest else blocks * BLOCK_WEIGHTS


BLOCK_FORMS = {
    form.name: form
    for form in (BlockForm("Q8_0", 34, 1), BlockForm("Q4_0", 18, 1), BlockForm("Q4_1", 20, 2))
}


def split_name(name: str) -> tuple[str, BlockForm | None]:
    """A stored tensor's name without its form, and that form; None for a tensor of numbers."""
    base, _, suffix = name.rpartition(".")
    form = BLOCK_FORMS.get(suffix)
    return (base, form) if form is not None else (name, None)
