"""Arguments of `python -m quadriga.tune`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from quadriga.errors import QuadrigaError
from quadriga.files import FULL_DISK, only_run

KINDS = ("norm", "mlp", "head", "linear")
PARTS = ("exits", "thresholds", "maps", "lengths", "report")
MAX_WIDTH = 65_536
"""Of an exit's bottleneck: wider than the MLPs of the models that get one."""
FORMATS = ("layerskip", "ee-llm", "dssd", "linear")


def main(argv: Sequence[str] | None = None) -> int:
    """Tune one model; returns the exit status."""
    args = _parser().parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def run() -> int:
        with only_run("--out", args.out / "work"):
            return _run(args)

    return finished(run, "it goes on where it stopped")


def finished(run: Callable[[], int], again: str) -> int:
    """Run a command, and say in a line why it could not.

    Args:
        again: What happens where it is started again.

    Returns:
        The exit status: 2 where the user has to mend something first, 130 after Ctrl-C.
    """
    try:
        return run()
    except QuadrigaError as exc:
        said = exc.message
    except OSError as exc:
        if exc.errno not in FULL_DISK:
            raise
        said = f"{exc}; make room, and start it again: {again}"
    except KeyboardInterrupt:
        print(f"interrupted; start it again: {again}", file=sys.stderr)
        return 130
    print(f"error: {said}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quadriga.tune",
        description="Exits, thresholds, maps for skipped KV and length heads for any native model; "
        "see docs/own-models.md. What was begun goes on where it stopped.",
    )
    add = parser.add_argument
    add("model", help="bundled or packaged name, checkpoint folder, GGUF file or hub id")
    add(
        "--out",
        type=_folder,
        required=True,
        metavar="DIR",
        help="folder to write; serve it with exits.folder=DIR",
    )
    add(
        "--prompts",
        required=True,
        metavar="FILE",
        help=".txt, .jsonl or .jsonl.gz with `prompt` or `messages`, and `domain`; or tasks:N",
    )
    add(
        "--parts",
        type=_parts,
        default=PARTS,
        metavar="PART,…",
        help=f"of {', '.join(PARTS)}; default: all",
    )
    add(
        "--layers",
        type=_layers,
        default=(),
        metavar="K,…",
        help="exits, by layers run before them; default: a half, two thirds, five sixths",
    )
    add(
        "--kind",
        choices=KINDS,
        default="mlp",
        help="of the exits: norm; mlp, a bottleneck and a norm; head; linear, a head without a "
        "norm (default: mlp)",
    )
    add(
        "--width",
        type=partial(count, most=MAX_WIDTH),
        default=256,
        help="of the MLP's bottleneck (default: 256)",
    )
    add(
        "--import",
        dest="imported",
        type=_imported,
        default=None,
        metavar="FORMAT:PATH",
        help=f"exits of another project instead of trained ones: {', '.join(FORMATS)}",
    )
    add(
        "--budget",
        type=_budget,
        default="changed=0.02",
        metavar="MEASURE=X",
        help="what may be given up: changed=0.02, the share of all tokens that are not those of "
        "full depth; loss=0.02, nats of log-likelihood a token (default: changed=0.02)",
    )
    add(
        "--hold-back",
        type=_words,
        default=(),
        metavar="DOMAIN,…",
        help="domains that nothing is learned or chosen on",
    )
    add(
        "--epochs",
        type=_above_zero,
        default=3.0,
        help="times each token is learned from (default: 3)",
    )
    add("--rate", type=_above_zero, default=2e-3, help="greatest learning rate (default: 0.002)")
    add("--batch-tokens", type=count, default=512, help="of a training step (default: 512)")
    add("--max-tokens", type=count, default=256, help="of an answer (default: 256)")
    add(
        "--temperature",
        type=_temperature,
        default=None,
        help="of the answers (default: what the checkpoint recommends)",
    )
    add(
        "--seed",
        type=partial(count, least=0, most=2**40 - 1),
        default=0,
        help="of everything random (default: 0)",
    )
    add("--threads", type=partial(count, most=1024), default=1, help="on a CPU (default: 1)")
    add("--slots", type=count, default=32, help="answers generated at once (default: 32)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the model and of the training's products (default: float32)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add(
        "--map-answers",
        type=count,
        default=400,
        help="that the maps are fitted on, at most (default: 400)",
    )
    add(
        "--test-tokens",
        type=count,
        default=20_000,
        help="that thresholds are chosen on, and reported on, at most (default: 20000)",
    )
    add(
        "--speed-prompts",
        type=partial(count, least=0),
        default=32,
        help="that the speed is measured with; 0: not (default: 32)",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from quadriga.checkpoint.folder import read_checkpoint
    from quadriga.tune.distillation import DistillOptions
    from quadriga.tune.importers import import_exits
    from quadriga.tune.thresholds import QualityBudget
    from quadriga.tune.tuning import TuneOptions, Tuning

    torch.set_num_threads(args.threads)
    imported = None
    if args.imported is not None:
        name, path = args.imported
        checkpoint = read_checkpoint(args.model, heads="own")
        imported = import_exits(name, path, checkpoint, args.layers, args.out)
    measure, amount = args.budget
    engine: dict[str, Any] = {"device": args.device, "dtype": args.dtype}
    Tuning(
        TuneOptions(
            model=args.model if imported is None else imported.model,
            out=args.out,
            prompts=args.prompts,
            parts=args.parts,
            layers=tuple(sorted(args.layers)),
            distill=DistillOptions(
                kind=args.kind,
                width=args.width,
                epochs=args.epochs,
                batch_tokens=args.batch_tokens,
                rate=args.rate,
                dtype=getattr(torch, args.dtype),
                device=args.device,
            ),
            budget=QualityBudget(measure, amount),
            held_back=args.hold_back,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
            threads=args.threads,
            slots=args.slots,
            map_answers=args.map_answers,
            test_tokens=args.test_tokens,
            speed_prompts=args.speed_prompts,
            imported=None if imported is None else (imported.spec, imported.tensors),
            engine=engine,
        ),
        Console(),
    ).run()
    return 0


def count(text: str, least: int = 1, most: float = math.inf) -> int:
    """An argparse type: a whole number."""
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
        end = "on" if most == math.inf else f"to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} {end}")
    return int(text)


def _folder(text: str) -> Path:
    """An argparse type: absolute, as "own" is a word of exits.folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; give a folder, '.' for this one")
    return Path(text).expanduser().absolute()


def _number(text: str) -> float:
    """NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _above_zero(text: str) -> float:
    """An argparse type: a number above 0."""
    if not 0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return float(text)


def _temperature(text: str) -> float:
    """An argparse type: what a request may say."""
    if not 0 <= _number(text) <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to a million")
    return float(text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _layers(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers above 0."""
    return tuple(dict.fromkeys(count(word) for word in _words(text)))


def _parts(text: str) -> tuple[str, ...]:
    """An argparse type: some of the parts."""
    wanted = _words(text)
    for word in wanted or (text,):
        if word not in PARTS:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(PARTS)}")
    return wanted


def _budget(text: str) -> tuple[str, float]:
    """An argparse type: `changed=X` or `loss=X`."""
    from quadriga.tune.thresholds import Measure

    measure, _, amount = text.partition("=")
    if measure not in get_args(Measure) or not 0 <= _number(amount) <= 20:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be changed=X or loss=X, and X a number from 0"
        )
    return measure, float(amount)


def _imported(text: str) -> tuple[str, Path]:
    """An argparse type: `FORMAT:PATH`; LayerSkip's exits have no file."""
    name, _, path = text.partition(":")
    if name not in FORMATS or bool(path) is (name == "layerskip"):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be layerskip, or FORMAT:PATH with one of {', '.join(FORMATS[1:])}"
        )
    return name, Path(path)
