"""`python -m loadgen plan`: what partial depth buys, as arithmetic over real configurations.

For each model and depth: bytes of weights, bytes of KV per token, and the largest batch that the
device still holds. No checkpoint is read and nothing is run: these are sizes, not speeds. Without
models it compares with HELIOS's Table 6 and its largest batch (figure 9), assumptions printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.model_costs.published import (
    PAPER_BATCH_RATIO,
    PAPER_DEVICE_GIB,
    PAPER_SAVING,
    PUBLISHED,
    SAVED_GB,
    TABLE_6,
)
from loadgen.options import number, whole
from loadgen.report.experiment import table_of
from quadriga.catalogue.sizes import ModelSizes, sizes_of
from quadriga.checkpoint.exits import read_exits
from quadriga.checkpoint.folder import ASSETS, bundled_models
from quadriga.config.engine_spec import DTYPE_BYTES
from quadriga.errors import ConfigError

GIB = 2**30
DEFAULT_CONTEXT = 2048
QUARTERS = (0.25, 0.5, 0.75, 1.0)
ASSUMPTIONS = (
    "weights and KV alone: no activations, no workspace, no fragmentation",
    "several devices count as one memory",
    "every exit shares norm and head with the model, unless exits.json says otherwise",
    "each sequence holds --context tokens of KV in the loaded layers only",
)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One model at one depth.

    Attributes:
        batch: Sequences that fit beside the weights; 0 where not even the weights do.
        batch_ratio: Over that of full depth, unrounded; None where full depth holds none.
    """

    model: str
    depth: int
    num_layers: int
    weights_gib: float
    kv_bytes_per_token: int
    device_gib: float
    context: int
    batch: int
    batch_ratio: float | None


@dataclass(frozen=True, slots=True)
class PaperCheck:
    """A row of HELIOS's Table 6 beside ours, and its largest batch at a quarter of the depth."""

    model: str
    paper_gb: float
    ours_gib: float
    error: float
    batch_ratio: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"bundled id, checkpoint folder, config.json, or one of {', '.join(PUBLISHED)}",
    )
    parser.add_argument("--device-gib", type=number(0), default=40.0, help="memory of one device")
    parser.add_argument("--devices", type=whole(1), default=1, help="that share each model")
    parser.add_argument(
        "--context",
        type=whole(1),
        help=f"tokens of a sequence; default: {DEFAULT_CONTEXT}, or all that the model takes",
    )
    parser.add_argument(
        "--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16", help="of weights and KV"
    )
    parser.add_argument(
        "--depth",
        nargs="+",
        type=whole(1),
        metavar="LAYERS",
        help="depths to show; default: the exits there are, else quarters",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table and one JSON line."""
    console = Console()
    line: dict[str, Any] = {"plan": "paper" if not args.models else "models"}
    if args.models:
        rows = [row for name in args.models for row in _rows(name, args)]
        _print_rows(console, rows, args)
        line["rows"] = [asdict(row) for row in rows]
    else:
        checks = paper_checks()
        _print_paper(console, checks)
        line["table_6"] = [asdict(check) for check in checks]
        line["max_error"] = max(abs(check.error) for check in checks)
        line["saved"] = saved_gib()
        line["paper_batch_ratio"] = PAPER_BATCH_RATIO
    for assumption in ASSUMPTIONS:
        console.print(f"assumed: {assumption}", markup=False, highlight=False)
    print(json.dumps(line | {"assumptions": ASSUMPTIONS}))
    return 0


def find_sizes(name: str) -> tuple[ModelSizes, tuple[int, ...]]:
    """Sizes of a published or bundled model, a folder or a `config.json`; and its exits.

    Raises:
        ConfigError: It is none of these, or its family is not known.
    """
    published = PUBLISHED.get(name.lower())
    if published is not None:
        return sizes_of(published.config), ()
    path = ASSETS / name if name in bundled_models() else Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{name!r} is no published model ({', '.join(PUBLISHED)}), and {file} cannot be read "
            f"as a configuration: {exc}"
        ) from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    sizes = sizes_of(config)
    exits = read_exits(file.parent, sizes.num_layers)
    return sizes_of(config, exits), exits.layers


def plan_row(
    name: str, sizes: ModelSizes, depth: int, *, device_bytes: float, context: int, value_bytes: int
) -> PlanRow:
    """One row. Raises: ConfigError when the depth is outside the model."""
    room = device_bytes - sizes.weight_bytes(depth, value_bytes)
    full_room = device_bytes - sizes.weight_bytes(sizes.num_layers, value_bytes)
    kv = sizes.kv_bytes_per_token(depth, value_bytes)
    full_kv = sizes.kv_bytes_per_token(sizes.num_layers, value_bytes)
    return PlanRow(
        model=name,
        depth=depth,
        num_layers=sizes.num_layers,
        weights_gib=sizes.weight_bytes(depth, value_bytes) / GIB,
        kv_bytes_per_token=kv,
        device_gib=device_bytes / GIB,
        context=context,
        batch=max(0, int(room // (kv * context))),
        batch_ratio=(room / kv) / (full_room / full_kv) if full_room > 0 and room > 0 else None,
    )


def paper_checks() -> list[PaperCheck]:
    """HELIOS's Table 6 and figure 9 by arithmetic: 16-bit values, 40 GiB devices."""
    checks = []
    for row in TABLE_6:
        sizes = sizes_of(PUBLISHED[row.model].config)
        ours = sizes.weight_bytes(sizes.num_layers, 2) / GIB
        quarter = plan_row(
            row.model,
            sizes,
            sizes.num_layers // 4,
            context=1,
            value_bytes=2,
            device_bytes=row.num_devices * PAPER_DEVICE_GIB * GIB,
        )
        assert quarter.batch_ratio is not None  # all five fit whole
        checks.append(
            PaperCheck(
                model=row.model,
                paper_gb=row.weights_gb,
                ours_gib=ours,
                error=ours / row.weights_gb - 1.0,
                batch_ratio=quarter.batch_ratio,
            )
        )
    return checks


def saved_gib() -> list[tuple[str, int, float, float]]:
    """(model, layers kept, the paper's GB saved, ours in GiB): HELIOS §1, 32-bit weights."""
    found = []
    for model, depth, paper_gb in SAVED_GB:
        sizes = sizes_of(PUBLISHED[model].config)
        saved = sizes.weight_bytes(sizes.num_layers, 4) - sizes.weight_bytes(depth, 4)
        found.append((model, depth, paper_gb, saved / GIB))
    return found


def _rows(name: str, args: argparse.Namespace) -> list[PlanRow]:
    sizes, exits = find_sizes(name)
    context = args.context or min(DEFAULT_CONTEXT, sizes.max_positions)
    if context > sizes.max_positions:
        raise ConfigError(
            f"--context: {context} is beyond the {sizes.max_positions} positions of {name}",
            param="--context",
        )
    depths: Sequence[int] = args.depth or sorted(
        {*exits, sizes.num_layers}
        if exits
        else {max(1, round(share * sizes.num_layers)) for share in QUARTERS}
    )
    return [
        plan_row(
            name,
            sizes,
            depth,
            context=context,
            value_bytes=DTYPE_BYTES[args.dtype],
            device_bytes=args.devices * args.device_gib * GIB,
        )
        for depth in depths
    ]


def _print_rows(console: Console, rows: Sequence[PlanRow], args: argparse.Namespace) -> None:
    columns: dict[str, Callable[[PlanRow], object]] = {
        "model": lambda r: r.model,
        "layers": lambda r: f"{r.depth}/{r.num_layers}",
        "context": lambda r: r.context,
        "weights GiB": lambda r: f"{r.weights_gib:.2f}",
        "KV KiB/token": lambda r: f"{r.kv_bytes_per_token / 1024:.0f}",
        "largest batch": lambda r: r.batch,
        "over full depth": lambda r: "—" if r.batch_ratio is None else f"{r.batch_ratio:.2f}×",
    }
    memory = f"{args.devices} × {args.device_gib:g} GiB"
    console.print(table_of(rows, columns, title=f"{memory}, {args.dtype}"))


def _print_paper(console: Console, checks: Sequence[PaperCheck]) -> None:
    columns: dict[str, Callable[[PaperCheck], object]] = {
        "model": lambda c: c.model,
        "paper GB": lambda c: f"{c.paper_gb:g}",
        "ours GiB": lambda c: f"{c.ours_gib:.2f}",
        "difference": lambda c: f"{c.error:+.1%}",
        "batch at a quarter of the depth": lambda c: f"{c.batch_ratio:.2f}×",
    }
    title = "HELIOS Table 6 (weights) and figure 9 (largest batch), by arithmetic"
    console.print(table_of(checks, columns, title=title))
    for model, depth, paper_gb, ours in saved_gib():
        console.print(
            f"{model} up to layer {depth} saves {paper_gb} GB in the paper (§1), {ours:.2f} GiB "
            "here, in 32-bit weights",
            markup=False,
            highlight=False,
        )
    largest = sizes_of(PUBLISHED["llama-2-70b"].config)
    budget = (1.0 - PAPER_SAVING) * largest.weight_bytes(largest.num_layers, 2)
    fits = [d for d in range(1, largest.num_layers + 1) if largest.weight_bytes(d, 2) <= budget]
    console.print(
        f"The paper's largest batch is {PAPER_BATCH_RATIO}× (figure 9) and its weights shrink by "
        f"{PAPER_SAVING:.1%}: as much as layers 1..{fits[-1]} of llama-2-70b's "
        f"{largest.num_layers} take.",
        markup=False,
        highlight=False,
    )
    console.print(
        "assumed: 16-bit weights and KV, A100s of 40 GiB (4 for llama-2-70b, 2 for codellama-34b, "
        "§4.2), the exit at a quarter of the depth (§4.1); the paper's GB are GiB",
        markup=False,
        highlight=False,
    )
