"""KV of a fake runner as the tensors that replicas send each other."""

from __future__ import annotations

from typing import Any

import torch

from tests.fake_runner import FakeRunner


class TensorRunner(FakeRunner):
    """KV is a tensor that holds the tokens it stands for: [num_layers, 2, 1, num_tokens, 1]."""

    def read_kv(  # type: ignore[override]
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        tokens = torch.tensor(self.kv[row][start:stop], dtype=torch.float32)
        return tokens[None, None, None, :, None].repeat(num_layers, 2, 1, 1, 1)

    def write_kv(self, row: int, first_layer: int, start: int, kv: Any) -> None:
        super().write_kv(row, first_layer, start, list(map(int, kv[0, 0, 0, :, 0].tolist())))
