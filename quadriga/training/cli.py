"""Arguments of `python -m quadriga.training`."""

import argparse
import datetime
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadriga.errors import ConfigError
from quadriga.files import only_run, write_atomically
from quadriga.tasks import DEFAULT_MIX
from quadriga.training.recipe.family import (
    FAMILY,
    FamilyMember,
    at_rate,
    on_mix,
    with_reworded_share,
)
from quadriga.tune.cli import count, finished

if TYPE_CHECKING:
    import torch

RESULTS = Path("results/training")
ASSETS = Path(__file__).resolve().parents[1] / "assets"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    # The data is tokenised in small pieces: threads would only fight for the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return finished(partial(args.run, args), "a training goes on with --resume, all else anew")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quadriga.training",
        description="Train, measure and export the bundled models; see docs/training.md.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a member of the family, or go on training it")
    train.add_argument("--model", choices=list(FAMILY), required=True, help="member of the family")
    train.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    train.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="of the matrix products (default: auto, the fastest here)",
    )
    train.add_argument(
        "--threads", type=count, default=1, help="torch threads on a CPU (default: 1)"
    )
    train.add_argument("--steps", type=count, help="optimiser steps of this run")
    train.add_argument("--minutes", type=_minutes, help="wall-clock budget of this run")
    train.add_argument("--finish-by", type=_clock, metavar="HH:MM", help="end by this local time")
    train.add_argument("--tokens-per-step", type=count, help="default: the recipe's")
    train.add_argument(
        "--resume", action="store_true", help="go on from the run's folder, if it has a state"
    )
    train.add_argument(
        "--init-from",
        type=Path,
        metavar="PATH",
        help="checkpoint folder or state file whose weights to start with",
    )
    train.add_argument(
        "--compile", action="store_true", help="compile the blocks: 10 %% faster on a CPU"
    )
    train.add_argument(
        "--mix",
        default="own",
        metavar="own|equal|TASK=WEIGHT,…",
        help="the recipe's; every task alike; or these tasks alone (default: own)",
    )
    train.add_argument(
        "--rate",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="of the recipe's learning rates; below 1 to go on from finished weights (default: 1)",
    )
    train.add_argument(
        "--reworded",
        type=float,
        metavar="SHARE",
        help="of short questions in other words than the tasks' own (default: the recipe's)",
    )
    train.add_argument(
        "--folder",
        type=Path,
        help=f"default: {RESULTS}/MODEL; {RESULTS}/MODEL-equal with --mix equal",
    )
    train.set_defaults(run=_train)

    export = commands.add_parser("export", help="write a training state as a checkpoint directory")
    export.add_argument("--model", choices=list(FAMILY), required=True, help="member of the family")
    export.add_argument(
        "--state", type=Path, metavar="FILE", help=f"default: {RESULTS}/MODEL/latest.pt"
    )
    export.add_argument("--to", type=Path, metavar="FOLDER", help="default: the package's assets")
    export.add_argument(
        "--figures", type=Path, metavar="FILE", help="JSON of `evaluate`, for the model card"
    )
    export.set_defaults(run=_export)

    fit = commands.add_parser("fit-kv", help="fit the stand-ins for skipped layers' K and V anew")
    _add_models(fit)
    fit.add_argument("--threads", type=count, default=1, help="torch threads (default: 1)")
    fit.set_defaults(run=_fit_kv)

    length = commands.add_parser("length", help="train the length heads on real generation runs")
    _add_models(length)
    length.add_argument("--requests", type=count, default=400, help="per task (default: 400)")
    length.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    length.add_argument("--threads", type=count, default=1, help="torch threads (default: 1)")
    length.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    length.set_defaults(run=_length)

    evaluate = commands.add_parser("evaluate", help="measure the stored checkpoints")
    _add_models(evaluate)
    evaluate.add_argument("--examples", type=count, default=200, help="per task (default: 200)")
    evaluate.add_argument(
        "--seed", type=int, default=2024, help="of everything random (default: 2024)"
    )
    evaluate.add_argument("--threads", type=count, default=1, help="torch threads (default: 1)")
    evaluate.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    evaluate.set_defaults(run=_evaluate)

    prompts = commands.add_parser("prompts", help="word public texts as prompts for quadriga.tune")
    prompts.add_argument(
        "--texts",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help=".jsonl or .jsonl.gz with id, domain and prompt, or .txt with a question a line",
    )
    prompts.add_argument("--out", type=Path, required=True, metavar="FILE", help="a .jsonl.gz")
    prompts.add_argument(
        "--like",
        type=Path,
        metavar="FILE",
        help="prompts whose texts to take, in their order (default: english.jsonl.gz)",
    )
    prompts.add_argument(
        "--more", type=count, default=0, help="texts to draw beside them (default: 0)"
    )
    prompts.add_argument(
        "--seed", type=partial(count, least=0), default=0, help="of what is drawn (default: 0)"
    )
    prompts.set_defaults(run=_prompts)
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="checkpoint folders of that family; default: the bundled family",
    )


def _minutes(text: str) -> float:
    """An argparse type: minutes, more than none and at most a year's."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 366 * 24 * 60:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of minutes above 0")
    return value


def _clock(text: str) -> datetime.time:
    """An argparse type: a time of day."""
    try:
        return datetime.datetime.strptime(text, "%H:%M").time()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time of day, as in 07:30") from None


def _folders(args: argparse.Namespace) -> list[Path]:
    """The checkpoints that are meant. Raises: ConfigError: One is none."""
    folders: list[Path] = args.models or [ASSETS / name for name in FAMILY]
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--models: {folder} is no checkpoint folder: no config.json there")
    return folders


def _by_name(args: argparse.Namespace) -> dict[str, Path]:
    """The checkpoints by what figures name them. Raises: ConfigError: As `_folders`; two names."""
    folders = _folders(args)
    named = {folder.name: folder for folder in folders}
    if len(named) < len(folders):
        raise ConfigError(f"--models: of {len(folders)} folders some have one name; rename them")
    return named


@contextmanager
def _reading(option: str, path: Path) -> Iterator[None]:
    """Raises: ConfigError: What is read is damaged, or something else."""
    from quadriga.tune.importers.head_files import DAMAGED, reason

    try:
        yield
    except DAMAGED as exc:
        raise ConfigError(f"{option}: {path} is of another model or none: {reason(exc)}") from exc


def _device(name: str) -> "torch.device":
    """Raises: ConfigError: This torch has no such device."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as exc:
        reason = str(exc).splitlines()[0]
        raise ConfigError(f"--device: {name!r} cannot be used: {reason:.120}") from exc
    return device


def _prompts(args: argparse.Namespace) -> int:
    from quadriga.training.english import ENGLISH, make_prompts

    made = make_prompts(args.texts, args.like or ENGLISH, args.more, args.seed)
    write_atomically(args.out, made)
    print(f"{len(made):,} bytes → {args.out}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from quadriga.checkpoint.exits import EXITS_FILE
    from quadriga.checkpoint.length_heads import LENGTH_FILE
    from quadriga.training.checkpoint_io import save_checkpoint
    from quadriga.training.model import EarlyExitLlama
    from quadriga.training.recipe.model_card import figures_part
    from quadriga.training.recipe.state import LATEST, load
    from quadriga.training.tokenizer import build_tokenizer

    member = FAMILY[args.model]
    state = args.state or RESULTS / args.model / LATEST
    folder = (args.to or ASSETS / args.model).resolve()
    held = {path.name for path in folder.glob("*")}
    if folder.is_file() or (held and not held >= {EXITS_FILE, "config.json"}):
        raise ConfigError(
            f"--to: {folder} holds other files, which the export would delete; name a new folder"
        )
    model = EarlyExitLlama(member.shape, build_tokenizer().get_vocab_size())
    with _reading("--state", state):
        payload = load(state)
        model.load_state_dict(payload["model"])
        progress = payload["progress"]
        facts = {"steps": progress["step"], "tokens": progress["tokens_seen"]}
    if args.figures is not None:
        with _reading("--figures", args.figures):
            report = json.loads(args.figures.read_text())
            facts["figures"] = figures_part(report | report["models"][args.model])
    save_checkpoint(model, member, folder, facts=facts)
    print(f"{args.model} at step {progress['step']} → {folder}")
    _fit(folder)
    if LENGTH_FILE in held:
        print(f"its length heads were those of the old weights: run `length --models {folder}`")
    return 0


def _fit_kv(args: argparse.Namespace) -> int:
    for folder in _folders(args):
        _fit(folder, args.threads)
    return 0


def _fit(folder: Path, threads: int = 1) -> None:
    from quadriga.training.heads import fit_folder

    print(f"maps for skipped K and V → {folder}; variance left unexplained:")
    for name, share in fit_folder(folder, threads=threads).items():
        print(f"  {name}  {share:.3f}")


def _length(args: argparse.Namespace) -> int:
    from quadriga.tasks import TASKS
    from quadriga.training.heads import train_lengths
    from quadriga.tune.report import progress

    report: dict[str, Any] = {}
    for name, folder in _by_name(args).items():
        with progress("requests", args.requests * len(TASKS)) as advance:
            report[name] = train_lengths(
                folder,
                requests_per_task=args.requests,
                seed=args.seed,
                threads=args.threads,
                advance=advance,
                report=print,
            )
    _write_figures(args.json, report)
    return 0


def _write_figures(file: Path | None, report: dict[str, Any]) -> None:
    if file is not None:
        write_atomically(file, (json.dumps(report, indent=1) + "\n").encode())


def _evaluate(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from quadriga.tasks import TASKS
    from quadriga.training.checkpoint_io import load_checkpoint
    from quadriga.training.evaluate import evaluate
    from quadriga.training.model import EarlyExitLlama
    from quadriga.training.report import print_report
    from quadriga.training.tokenizer import build_tokenizer
    from quadriga.tune.report import progress

    torch.set_num_threads(args.threads)
    device = _device(args.device)
    models: dict[str, EarlyExitLlama] = {}
    for name, folder in _by_name(args).items():
        with _reading("--models", folder):
            models[name] = load_checkpoint(folder).to(device)
    answers = len(models) * len(TASKS) * (2 * args.examples + max(1, args.examples // 2))
    with progress("answers", answers) as advance:
        report = evaluate(
            models,
            build_tokenizer(),
            examples=args.examples,
            seed=args.seed,
            advance=advance,
        )
    print_report(report, Console())
    _write_figures(args.json, report)
    return 0


def _train(args: argparse.Namespace) -> int:
    import torch

    from quadriga.training.hardware import fastest_dtype
    from quadriga.training.recipe.loop import (
        Trainer,
        TrainingOptions,
        append_json,
        budget_name,
        resume,
        run,
    )
    from quadriga.training.recipe.state import LATEST

    torch.set_num_threads(args.threads)
    member, device = _member(args), _device(args.device)
    name = f"{args.model}-equal" if args.mix == "equal" else args.model
    named = {"fp32": torch.float32, "bf16": torch.bfloat16}
    dtype = named[args.dtype] if args.dtype in named else fastest_dtype(device)
    finish_by_s = None if args.finish_by is None else _next_s(args.finish_by)
    ends_s = [] if args.minutes is None else [time.time() + 60.0 * args.minutes]
    ends_s += [] if finish_by_s is None else [finish_by_s]
    options = TrainingOptions(
        folder=args.folder or RESULTS / name,
        device=device,
        dtype=dtype,
        steps=args.steps,
        deadline_s=min(ends_s, default=None),
        minutes=args.minutes,
        finish_by_s=finish_by_s,
        tokens_per_step=args.tokens_per_step or member.recipe.tokens_per_step,
        compile=args.compile,
    )
    if options.steps is None and options.deadline_s is None:
        raise ConfigError("train needs a budget: --steps, --minutes or --finish-by")
    if not args.resume and (state := options.folder / LATEST).is_file():
        raise ConfigError(
            f"{state} holds a training that this one would replace: go on with --resume, name "
            "another --folder, or move it away"
        )

    def report(record: dict[str, object]) -> None:
        append_json(options.folder / "log.jsonl", record)
        print(time.strftime("%H:%M:%S"), record, flush=True)

    with only_run("--folder", options.folder):
        trainer = Trainer(member, options)
        if args.init_from is not None:
            with _reading("--init-from", args.init_from):
                trainer.start_from(args.init_from)
        if args.resume:
            with _reading("--resume", options.folder):
                resume(trainer, budget_name(options))
        print(f"{args.model}: {dtype} on {device}, from step {trainer.progress.step}", flush=True)
        run(trainer, report)
    return 0


def _member(args: argparse.Namespace) -> FamilyMember:
    """The member with the mix and rates that were asked for. Raises: ConfigError."""
    member = FAMILY[args.model]
    if not 0.0 < args.rate <= 1.0:
        raise ConfigError(f"--rate: {args.rate:g} must be above 0 and at most 1")
    if args.mix == "equal":
        member = on_mix(member, DEFAULT_MIX)
    elif args.mix != "own":
        if args.folder is None:
            raise ConfigError("--mix: a mix of your own needs a --folder for its state")
        member = on_mix(member, _mix(args.mix))
    if args.reworded is not None:
        member = with_reworded_share(member, args.reworded)
    return at_rate(member, args.rate)


def _mix(text: str) -> dict[str, float]:
    """`TASK=WEIGHT,…` as a table. Raises: ConfigError."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {task.strip(): float(weight) for task, weight in pairs}
    except ValueError as exc:
        raise ConfigError(f"--mix: {text!r} is not own, equal or TASK=WEIGHT,…") from exc


def _next_s(clock: datetime.time) -> float:
    """When the clock shows it next."""
    now = datetime.datetime.now()
    today = datetime.datetime.combine(now, clock)
    return (today + datetime.timedelta(days=today <= now)).timestamp()
