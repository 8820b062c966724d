"""`python -m loadgen.bench.gpu`: greedy decoding on a GPU, our engine's forms and `transformers`.

Each contestant generates the same tokens for the same prompts, in one process, one after the
other; loading and a warm-up stay outside the clock, and the median of the rounds is reported. The
floor is what memory allows: every decode step reads the weights once and the KV of every sequence.
One JSON line a measurement on stdout; it needs torch and `transformers`, neither Ray nor pydantic.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loadgen.bench.engines.agreement import first_difference
from loadgen.bench.engines.floor import model_costs
from loadgen.bench.engines.hf_transformers import generate_padded, load_model
from loadgen.bench.engines.offline import run_offline
from loadgen.bench.engines.workloads import Workload, WorkloadRequest
from loadgen.model_costs.engine import engine_spec
from loadgen.report import provenance
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.engine import load_runner
from quadriga.errors import ConfigError
from quadriga.llm import LLM

RANDOM = "random-1b"
_COPY_BYTES = 1 << 30
_REPEATS = 5

FORMS: dict[str, dict[str, Any]] = {
    "flash graphs": {"attention": "flash", "compile": "wait"},
    "triton graphs": {"attention": "triton", "compile": "wait"},
    "triton eager": {"attention": "triton", "compile": "off"},
    "torch eager": {"attention": "torch", "compile": "off"},
}
"""Of our engine."""

Generate = Callable[[Workload], list[list[int]]]


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What is measured, on what."""

    device: torch.device
    dtype: str
    prompt_tokens: int
    output_tokens: int
    rounds: int
    share: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all contestants at all batch sizes."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.bench.gpu", description=__doc__)
    parser.add_argument("--checkpoint", default="quadriga-l", help=f"or {RANDOM}: a made-up Llama")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-share", type=float, default=0.5)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu measures the CPU engine")
    dtype = args.dtype if args.device == "cuda" else "float32"
    options = GpuOptions(
        torch.device(args.device), dtype, args.prompt_tokens, args.output_tokens, args.rounds,
        args.memory_share,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = _random_model(Path(folder)) if args.checkpoint == RANDOM else args.checkpoint
        _measure(read_checkpoint(str(path)), args.batch, options)
    return 0


def _measure(checkpoint: Checkpoint, batches: Sequence[int], options: GpuOptions) -> None:
    origin = {
        "benchmark": "gpu",
        "checkpoint": checkpoint.id,
        "dtype": options.dtype,
        "commit": provenance.commit(),
        "machine": provenance.machine() | {"gpu": _device_name(options.device)},
        "versions": provenance.versions("torch", "triton", "flash-attn", "transformers"),
    }
    bytes_per_s = _bandwidth(options.device)
    reference: dict[int, list[list[int]]] = {}
    forms = FORMS if options.device.type == "cuda" else {"cpu": {"compile": "wait"}}
    for name in ("transformers", *forms):
        try:
            with _contestant(name, forms, checkpoint, max(batches), options) as generate:
                for batch in batches:
                    workload = _workload(checkpoint, batch, options)
                    seconds, tokens = _time(generate, workload, options)
                    known = reference.setdefault(batch, tokens)
                    floor_s = _floor_bytes(checkpoint, batch, options) / bytes_per_s
                    line = {
                        "contestant": name,
                        "batch": batch,
                        "tokens_per_s": round(workload.output_tokens / seconds, 1),
                        "floor_tokens_per_s": round(workload.output_tokens / floor_s, 1),
                        "same_as_transformers": round(_agreement(tokens, known), 4),
                    }
                    print(json.dumps(line | origin), flush=True)
        except ConfigError as exc:
            print(f"{name}: left out, {exc.message}", file=sys.stderr, flush=True)


@contextmanager
def _contestant(
    name: str,
    forms: dict[str, dict[str, Any]],
    checkpoint: Checkpoint,
    num_rows: int,
    options: GpuOptions,
) -> Iterator[Generate]:
    """What generates; its memory is free again afterwards."""
    if name == "transformers":
        yield _transformers(checkpoint, options)
    else:
        spec = engine_spec(
            checkpoint,
            threads=1,
            num_rows=num_rows,
            row_capacity_tokens=options.prompt_tokens + options.output_tokens,
        )
        if options.device.type == "cuda":
            spec = replace(spec, device="cuda", dtype=options.dtype, gpu_memory_share=options.share)  # type: ignore[arg-type]
        runner = load_runner(replace(spec, **forms[name]))
        llm = LLM.over(runner)
        try:
            yield lambda workload: run_offline(llm, workload).token_ids
        finally:
            llm.close()
            del runner, llm
    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()


def _transformers(checkpoint: Checkpoint, options: GpuOptions) -> Generate:
    model = load_model(checkpoint.path, options.dtype, options.device.type)
    return lambda workload: generate_padded(
        model, [r.prompt for r in workload.requests], options.output_tokens
    )


def _time(
    generate: Generate, workload: Workload, options: GpuOptions
) -> tuple[float, list[list[int]]]:
    """Median seconds of the rounds, and the tokens; tokens are on the host when it returns."""
    tokens = generate(workload)  # warm-up: the same shapes
    times = []
    for _ in range(options.rounds):
        started_s = time.perf_counter()
        tokens = generate(workload)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times), tokens


def _workload(checkpoint: Checkpoint, batch: int, options: GpuOptions) -> Workload:
    rng = random.Random(batch)
    prompts = [
        [rng.randrange(3, checkpoint.vocab_size) for _ in range(options.prompt_tokens)]
        for _ in range(batch)
    ]
    requests = [WorkloadRequest(prompt, options.output_tokens) for prompt in prompts]
    return Workload(f"batch-{batch}", batch, requests)


def _agreement(tokens: list[list[int]], known: list[list[int]]) -> float:
    """Share of the tokens that come before the first difference in their sequence."""
    same = 0
    for ours, theirs in zip(tokens, known, strict=True):
        parted = first_difference(ours, theirs)
        same += len(ours) if parted is None else parted
    return same / sum(len(t) for t in known)


def _floor_bytes(checkpoint: Checkpoint, batch: int, options: GpuOptions) -> float:
    """Bytes that decoding must read: per step the weights, and the KV of every sequence."""
    costs = model_costs(checkpoint.path)
    context = options.prompt_tokens + options.output_tokens / 2
    values = costs.weights + costs.kv_values * context * batch
    return float(options.output_tokens * values * getattr(torch, options.dtype).itemsize)


def _bandwidth(device: torch.device) -> float:
    """Bytes a second that a sum of 1 GiB reads; the best of five."""
    data = torch.ones(_COPY_BYTES // 4, device=device)
    best_s = float("inf")
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        float(data.sum())
        best_s = min(best_s, time.perf_counter() - started_s)
    return _COPY_BYTES / best_s


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none"


def _random_model(folder: Path) -> Path:
    """A Llama of 1.1 billion random parameters, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
        num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder / RANDOM)
    return folder / RANDOM


if __name__ == "__main__":
    sys.exit(main())
