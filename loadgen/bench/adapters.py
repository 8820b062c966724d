"""`python -m loadgen bench adapters`: what a LoRA adapter adds to a step.

One model is loaded twice, with a random adapter of `--rank` for all projections of its layers and
without. Full batches of 1, 8 and 32 rows decode in turns: on the model that has no adapter; on the
one that has, with all rows the base model's; and with all rows the adapter's. Rows are computed
each with its own adapter, so several adapters in a batch cost what one does.

The floor is what low-rank products must multiply: their weights over those of the model's matrices.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from loadgen.options import whole
from loadgen.report.experiment import print_line, show
from quadriga.catalogue.adapters import ATTENTION, CONFIG_FILE, WEIGHTS_FILE
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.core.request import SamplingParams

if TYPE_CHECKING:
    from quadriga.llm import LLM

BATCHES = (1, 8, 32)
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
NAME = "measured"


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """Processor seconds of a step of so many rows.

    Attributes:
        without_s: On a model that has no adapters.
        beside_s: On one that has, where no row asks for it.
        with_s: With every row the adapter's.
    """

    rows: int
    without_s: float
    beside_s: float
    with_s: float

    @property
    def share(self) -> float:
        """What the adapter adds to a step, over the step without one."""
        return self.with_s / self.without_s - 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled id or folder")
    parser.add_argument("--rank", type=whole(1), default=16, help="of the adapter")
    parser.add_argument("--tokens", type=whole(2), default=32, help="of each row")
    parser.add_argument("--repeats", type=whole(1), default=5, help="of each batch")


def run(args: argparse.Namespace) -> int:
    """Measure; prints a table and one JSON line."""
    from quadriga.llm import LLM

    settings = {"engine": {"compile": "wait"}, "decode": {"max_slots": max(BATCHES)}}
    with tempfile.TemporaryDirectory() as folder:
        size, floor = write_adapter(Path(folder) / NAME, args.model, args.rank)
        adapted = LLM(args.model, adapters=folder, **settings)
    plain = LLM(args.model, **settings)
    with closing(adapted), closing(plain):
        costs = measure(plain, adapted, args.tokens, args.repeats)
    show(
        costs,
        {
            "rows": lambda c: c.rows,
            "without ms": lambda c: f"{c.without_s * 1e3:.2f}",
            "beside ms": lambda c: f"{c.beside_s * 1e3:.2f}",
            "with ms": lambda c: f"{c.with_s * 1e3:.2f}",
            "cost": lambda c: f"{c.share:.1%}",
        },
    )
    print_line(
        "adapters",
        headline={f"cost_{cost.rows}": round(cost.share, 4) for cost in costs},
        model=args.model,
        rank=args.rank,
        adapter_bytes=size,
        floor=round(floor, 4),
        costs=[asdict(cost) for cost in costs],
    )
    return 0


def write_adapter(path: Path, model: str, rank: int) -> tuple[int, float]:
    """Write a random adapter of a model, in PEFT's format.

    Returns:
        Its bytes, and its weights over those of the matrices that it changes.
    """
    import torch
    from safetensors.torch import save_file

    from quadriga.checkpoint.model_config import read_model_config
    from quadriga.engine.weights.adapters import projections

    config = read_model_config(read_checkpoint(model).path)
    made = torch.Generator().manual_seed(0)
    tensors, matrices = dict[str, torch.Tensor](), 0
    for layer in range(config.num_layers):
        for inputs, stack in projections(config).values():
            for name, outputs in stack:
                block = "self_attn" if name in ATTENTION else "mlp"
                base = f"base_model.model.model.layers.{layer}.{block}.{name}"
                for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    drawn = torch.randn(shape, generator=made) * 0.01
                    tensors[f"{base}.lora_{kind}.weight"] = drawn
                matrices += inputs * outputs
    path.mkdir()
    save_file(tensors, path / WEIGHTS_FILE)
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (path / CONFIG_FILE).write_text(json.dumps(said), encoding="utf-8")
    numbers = sum(tensor.numel() for tensor in tensors.values())
    return 4 * numbers, numbers / matrices


def measure(plain: LLM, adapted: LLM, num_tokens: int, repeats: int) -> list[AdapterCost]:
    """Time full batches in turns; medians of processor time a step."""
    costs = []
    for rows in BATCHES:
        turns = [
            _batch(llm, rows, num_tokens, adapter)
            for llm, adapter in ((plain, ""), (adapted, ""), (adapted, NAME))
        ]
        for timed in turns:
            timed()  # fills caches
        seconds = zip(*([timed() for timed in turns] for _ in range(repeats)), strict=True)
        costs.append(AdapterCost(rows, *(median(of) for of in seconds)))
    return costs


def _batch(llm: LLM, rows: int, num_tokens: int, adapter: str) -> Callable[[], float]:
    def cpu_s(tokens: int) -> float:
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        began_s = time.process_time()
        llm.generate([PROMPT] * rows, params, progress=False, adapter=adapter)
        return time.process_time() - began_s

    # The pass over the prompts brings the first token.
    return lambda: (cpu_s(num_tokens) - cpu_s(1)) / (num_tokens - 1)
