"""Llama shapes whose weights are drawn on the device, loaded as the engine loads a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loadgen.model_costs.engine import sequence
from quadriga.checkpoint.exits import NO_EXITS, ExitSpec
from quadriga.checkpoint.folder import Checkpoint
from quadriga.checkpoint.model_config import ModelConfig, RopeConfig
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.engine.cuda.loading import load_paged
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.weights.checkpoint_weights import (
    Head,
    KVMap,
    LayerWeights,
    Linear,
    ModelWeights,
    Norm,
)
from quadriga.engine.weights.matrix import Form, Matrix

_SPREAD = 0.02
_FORMS = {torch.float32: Form.FLOAT32, torch.bfloat16: Form.BFLOAT16}


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            family="llama",
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.ffn,
            vocab_size=self.vocab,
            max_positions=1 << 17,
            embed_size=self.hidden,
            norm="rms",
            norm_eps=1e-5,
            activation="silu",
            windows=(0,) * self.layers,
            rope=RopeConfig(theta=5e5),
        )

    @property
    def step_values(self) -> int:
        """Weights that a decode step reads."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden

    @property
    def token_values(self) -> int:
        """Of one token's K and V."""
        return self.layers * 2 * self.kv_heads * self.head_dim


LLAMA_1B = Shape("llama-1b", 16, 2048, 8192, 32, 8, 64, 128_256)
LLAMA_8B = Shape("llama-8b", 32, 4096, 14_336, 32, 8, 128, 128_256)
TINY = Shape("tiny", 4, 48, 96, 4, 2, 16, 300)


def load(
    shape: Shape,
    device: torch.device,
    *,
    rows: int,
    capacity: int,
    exits: tuple[int, ...] = (),
    **changes: Any,
) -> NativeRunner:
    """A runner with random weights, and KV for every row at its full length."""
    spec_exits = ExitSpec(exits, criterion="margin") if exits else NO_EXITS
    checkpoint = Checkpoint(
        id=shape.name,
        path=Path(shape.name),
        architecture="LlamaForCausalLM",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_model_len=1 << 17,
        eos_token_ids=(),
        exits=spec_exits,
        fingerprint="",
        heads_path=Path(shape.name),
    )
    fields: dict[str, Any] = {
        "device": device.type,
        "dtype": "bfloat16",
        "threads": 1,
        "compile": "auto",
        "cache_dir": Path(),
        "exits": spec_exits,
        "num_rows": rows,
        "row_capacity_tokens": capacity,
        "kv_capacity_tokens": rows * capacity,
    }
    spec = EngineSpec(checkpoint, shape.layers, **fields | changes)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    weights = random_weights(shape, device, dtype, exits)
    return NativeRunner(load_paged(spec, shape.config, device, weights=weights))


def random_weights(
    shape: Shape, device: torch.device, dtype: torch.dtype, exits: tuple[int, ...] = ()
) -> ModelWeights:
    """The same on every device of a kind."""
    generator = torch.Generator(device).manual_seed(1)

    def matrix(rows: int, columns: int) -> Matrix:
        values = torch.empty(rows, columns, dtype=dtype, device=device)
        return Matrix(_FORMS[dtype], values.normal_(0, _SPREAD, generator=generator))

    def unit() -> Norm:
        return Norm(torch.ones(shape.hidden, dtype=dtype, device=device))

    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = [
        LayerWeights(
            attn_norm=unit(),
            qkv=Linear(matrix(q_size + 2 * kv_size, shape.hidden)),
            out=Linear(matrix(shape.hidden, q_size)),
            mlp_norm=unit(),
            up=Linear(matrix(2 * shape.ffn, shape.hidden)),
            down=Linear(matrix(shape.hidden, shape.ffn)),
        )
        for _ in range(shape.layers)
    ]
    head = Head(unit(), matrix(shape.vocab, shape.hidden))
    maps = [KVMap(layer.attn_norm, Linear(layer.qkv.weight[q_size:])) for layer in layers]
    return ModelWeights(
        dtype=dtype,
        device=device,
        form=_FORMS[dtype],
        embed=matrix(shape.vocab, shape.hidden),
        heads=dict.fromkeys((*exits, shape.layers), head),
        layers=layers,
        kv_maps=dict.fromkeys(exits, maps),
    )


def begin(runner: NativeRunner, rows: int, context: int, room: int) -> list[SequenceState]:
    """Sequences in rows 0…, each behind `context` positions of KV that nobody computed.

    Zeros take as long to read as any other numbers.
    """
    states = []
    for row in range(rows):
        sampling = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        state = sequence(str(row), [3 + row % 200] * context, sampling)
        runner.attach(row, state)
        states.append(state)
    return states
