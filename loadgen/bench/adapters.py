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
from typing import TYPE_CHECKING, Any

from loadgen.comparison.pairs import median_ratio
from loadgen.options import whole
from loadgen.report.experiment import print_line, show
from quadriga.catalogue.adapters import CONFIG_FILE, WEIGHTS_FILE
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
        share: What the adapter adds to a step, over the step without one: the median of the
            rounds' own.
    """

    rows: int
    without_s: float
    beside_s: float
    with_s: float
    share: float


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
        checkpoint = read_checkpoint(args.model).path
        size, floor = random_adapter(Path(folder) / NAME, checkpoint, args.rank)
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


def projections(model: Any, targets: tuple[str, ...] = ()) -> dict[str, Any]:
    """The layers' linear modules by name; those that end in `targets`, or all.

    Args:
        model: Of `transformers`.
    """
    from torch.nn import Linear

    return {
        name: module
        for name, module in model.named_modules()
        if ".layers." in name
        and isinstance(module, Linear)
        and (not targets or name.rpartition(".")[2] in targets)
    }


def write_adapter(
    path: Path,
    model: Any,
    *,
    rank: int = 5,
    alpha: float = 12.0,
    strength: float = 0.2,
    seed: int = 0,
    targets: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """Write an adapter of random matrices, in PEFT's format; returns its folder.

    Args:
        model, targets: See `projections`.
        config: Further fields of its configuration.
    """
    import torch
    from safetensors.torch import save_file

    made = torch.Generator().manual_seed(seed)
    tensors, found = {}, projections(model, targets)
    for name, module in found.items():
        size = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
        for kind, shape in size.items():
            drawn = torch.randn(shape, generator=made) * strength
            tensors[f"base_model.model.{name}.lora_{kind}.weight"] = drawn
    path.mkdir(parents=True)
    save_file(tensors, path / WEIGHTS_FILE)
    said = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in found}),
        "base_model_name_or_path": "a-model",
        "bias": "none",
    }
    (path / CONFIG_FILE).write_text(json.dumps(said | config), encoding="utf-8")
    return path


def random_adapter(path: Path, checkpoint: Path, rank: int) -> tuple[int, float]:
    """Write an adapter for all projections of a stored model.

    Returns:
        Its bytes, and its weights over those of the matrices that it changes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):  # sizes alone
        model = auto.from_config(AutoConfig.from_pretrained(checkpoint))
    write_adapter(path, model, rank=rank, alpha=rank, strength=0.01)
    sizes = [(m.in_features, m.out_features) for m in projections(model).values()]
    numbers = sum(rank * (inputs + outputs) for inputs, outputs in sizes)
    return 4 * numbers, numbers / sum(inputs * outputs for inputs, outputs in sizes)


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
        rounds = [[timed() for timed in turns] for _ in range(repeats)]
        without_s, beside_s, with_s = zip(*rounds, strict=True)
        share = median_ratio(with_s, without_s) - 1.0
        middle = median(without_s), median(beside_s), median(with_s)
        costs.append(AdapterCost(rows, *middle, share))
    return costs


def _batch(llm: LLM, rows: int, num_tokens: int, adapter: str) -> Callable[[], float]:
    def cpu_s(tokens: int) -> float:
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        began_s = time.process_time()
        llm.generate([PROMPT] * rows, params, progress=False, adapter=adapter)
        return time.process_time() - began_s

    # The pass over the prompts brings the first token.
    return lambda: (cpu_s(num_tokens) - cpu_s(1)) / (num_tokens - 1)
