"""The training loop: one visible step, resumable, ends in time."""

import dataclasses
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import ConfigError
from quadriga.tasks import LengthMix
from quadriga.training.checkpoint_io import load_checkpoint
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe.data import TrainingBatch, next_batch
from quadriga.training.recipe.family import FamilyMember
from quadriga.training.recipe.optimizer import Muon
from quadriga.training.recipe.schedule import Budget, length_scale, ramp
from quadriga.training.recipe.state import LATEST, STABLE, Progress, load, save_atomically
from quadriga.training.reference_pass import probe
from quadriga.training.tokenizer import build_tokenizer


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What a call of `train` decides.

    Attributes:
        folder: Where state and log go.
        device: Torch device.
        dtype: Of the matrix products; weights and moments stay fp32.
        steps: Steps of this budget, or None.
        deadline_s: Wall clock at which this budget ends, or None.
        minutes, finish_by_s: What the deadline was asked for by, the earlier of both.
        tokens_per_step: Tokens of a step, padding included.
        compile: Whether the blocks are compiled; tenths of speed for a minute at the start.
        save_every_s: Seconds between saves.
        probe_every_s: Seconds between accuracy lines in the log.
        probe_examples: Examples per task of an accuracy line.
    """

    folder: Path
    device: torch.device
    dtype: torch.dtype
    steps: int | None
    deadline_s: float | None
    tokens_per_step: int
    minutes: float | None = None
    finish_by_s: float | None = None
    compile: bool = False
    save_every_s: float = 240.0
    probe_every_s: float = 600.0
    probe_examples: int = 24


class Trainer:
    """A model, its optimisers and its position in the data."""

    def __init__(self, member: FamilyMember, options: TrainingOptions) -> None:
        self.member, self.options = member, options
        self.tokenizer = build_tokenizer()
        vocab_size = self.tokenizer.get_vocab_size()
        self.model = EarlyExitLlama(member.shape, vocab_size, seed=member.recipe.seed)
        self.model.to(options.device)
        if options.compile:
            self.model.compile_blocks()
        matrices = [p for p in self.model.parameters() if p.ndim == 3]
        rest = [p for p in self.model.parameters() if p.ndim < 3]
        self.muon = Muon(matrices, lr=member.recipe.muon_lr, dtype=options.dtype)
        self.adam = torch.optim.Adam(rest, lr=member.recipe.adam_lr, betas=(0.9, 0.98))
        recipe = member.recipe
        self.progress = Progress(
            options={
                "--mix": recipe.mix,
                "--rate": recipe.adam_lr,
                "--reworded": recipe.reworded_share,
                "--tokens-per-step": options.tokens_per_step,
            }
        )

    def restore(self, path: Path) -> None:
        """Continue from a saved state. Raises: ConfigError: It is of a training unlike this one."""
        payload, asked = load(path), self.progress.options
        progress = Progress(**{"options": asked, **payload["progress"]})
        if changed := [name for name, held in progress.options.items() if held != asked[name]]:
            raise ConfigError(
                f"--resume: {path} was trained with another {' and '.join(changed)}; give the same "
                "again, or begin in another --folder with --init-from"
            )
        self.model.load_state_dict(payload["model"])
        self.muon.load_state_dict(payload["muon"])
        self.adam.load_state_dict(payload["adam"])
        self.progress = progress

    def start_from(self, source: Path) -> None:
        """Take over weights only, from a checkpoint folder or a state file.

        Lengths start full and the exits' weight at its last value, as the weights were left.
        """
        weights = load_checkpoint(source).state_dict() if source.is_dir() else load(source)["model"]
        self.model.load_state_dict(weights)
        recipe = self.member.recipe
        self.progress.tokens_before = max(recipe.curriculum[-1][0], recipe.ramp_tokens)

    def save(self, name: str) -> None:
        """Write the state under the run's folder."""
        payload = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "progress": dataclasses.asdict(self.progress),
        }
        save_atomically(payload, self.options.folder / name)

    def batch(self) -> TrainingBatch:
        """Return the next batch of the stream."""
        recipe, progress = self.member.recipe, self.progress
        scale = length_scale(recipe.curriculum, progress.scheduled_tokens)
        return next_batch(
            self.tokenizer,
            seed=recipe.seed,
            start=progress.next_index,
            mix=recipe.mix,
            lengths=LengthMix(scale=scale),
            reworded_share=recipe.reworded_share if scale == 1.0 else 0.0,
            tokens_per_step=self.options.tokens_per_step,
            end_weight=recipe.end_token_weight,
        ).to(self.options.device)

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, list[float]]:
        """Return the training loss and the plain loss at every exit, nats per answer token."""
        states = self.model(
            batch.tokens, batch.positions, batch.groups, batch.answers, self.options.dtype
        )
        weights = batch.weights / batch.weights.sum()
        recipe = self.member.recipe
        exit_weight = ramp(recipe.exit_weights, recipe.ramp_tokens, self.progress.scheduled_tokens)
        losses = []
        for index, state in enumerate(states):
            logits = self.model.logits(state, index, self.options.dtype)
            losses.append(
                (F.cross_entropy(logits, batch.targets, reduction="none") * weights).sum()
            )
        total = losses[-1] + exit_weight * torch.stack(losses[:-1]).sum()
        return total, [float(loss.detach()) for loss in losses]

    def probe(self) -> dict[str, str]:
        """Return a line of accuracy and exits per task."""
        return probe(self.model, self.tokenizer, examples=self.options.probe_examples)

    def step(self, rate: float) -> list[float]:
        """Do one optimiser step at `rate` times the plateau's learning rate."""
        recipe = self.member.recipe
        batch = self.batch()
        loss, exit_losses = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm)
        self.muon.param_groups[0]["lr"] = recipe.muon_lr * rate
        self.adam.param_groups[0]["lr"] = recipe.adam_lr * rate
        self.muon.step()
        self.adam.step()
        self.model.zero_grad()
        self.progress.step += 1
        self.progress.next_index = batch.next_index
        self.progress.tokens_seen += batch.tokens.numel()
        return exit_losses


def budget_name(options: TrainingOptions) -> str:
    """Return what distinguishes one budget from another: minutes are the same whenever asked."""
    until = [f"{options.minutes}min"] if options.minutes else []
    until += [str(options.finish_by_s)] if options.finish_by_s else []
    return f"steps={options.steps} deadline={' '.join(until) or None}"


def resume(trainer: Trainer, budget: str) -> None:
    """Load the newest state that fits the budget.

    A run that is interrupted goes on where it was. Another budget begins a new plateau, so it
    starts from the end of the last plateau when the newest state has begun to decay.
    """
    folder = trainer.options.folder
    if (folder / LATEST).exists():
        trainer.restore(folder / LATEST)
        if trainer.progress.budget != budget and trainer.progress.decaying:
            trainer.restore(folder / STABLE)


def run(trainer: Trainer, report: Callable[[dict[str, Any]], None]) -> None:
    """Train until the budget is spent or the process is asked to end (SIGTERM, SIGINT).

    Args:
        trainer: Restored or fresh.
        report: Called every few steps with what goes into the log.

    Raises:
        ConfigError: The budget was spent before.
    """
    options, recipe, progress = trainer.options, trainer.member.recipe, trainer.progress
    name = budget_name(options)
    if progress.budget != name:
        progress.budget, progress.first_step = name, progress.step
        progress.started_s, progress.decaying = time.time(), False
        progress.deadline_s = options.deadline_s
    deadline_s = progress.deadline_s or options.deadline_s
    end = None if options.steps is None else progress.first_step + options.steps
    budget = Budget(progress.first_step, end, progress.started_s, deadline_s, recipe.decay_share)
    if budget.progress(progress.step, time.time()) >= 1.0:
        raise ConfigError(
            f"--resume: {name} is spent at step {progress.step}; ask for another budget"
        )
    asked_to_end: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: asked_to_end.append(received))

    started_s = last_save_s = last_probe_s = time.time()
    first_tokens = progress.tokens_seen
    while not asked_to_end and budget.progress(progress.step, time.time()) < 1.0:
        now_s = time.time()
        if not progress.decaying and budget.decaying(progress.step, now_s):
            trainer.save(STABLE)
            progress.decaying = True
        rate = budget.multiplier(progress.step, now_s, warmup_steps=recipe.warmup_steps)
        exit_losses = trainer.step(rate)
        if progress.step % 10 == 0:
            report(
                {
                    "step": progress.step,
                    "tokens": progress.tokens_seen,
                    "losses": [round(loss, 4) for loss in exit_losses],
                    "rate": round(rate, 4),
                    "progress": round(budget.progress(progress.step, time.time()), 4),
                    "tokens_per_s": round(
                        (progress.tokens_seen - first_tokens) / (time.time() - started_s)
                    ),
                }
            )
        if time.time() - last_save_s > options.save_every_s:
            trainer.save(LATEST)
            last_save_s = time.time()
        if time.time() - last_probe_s > options.probe_every_s:
            report({"step": progress.step, "probe": trainer.probe()})
            last_probe_s = time.time()
    trainer.save(LATEST)
    report({"step": progress.step, "probe": trainer.probe()})


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line to a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.write(json.dumps({"time_s": round(time.time(), 1), **record}) + "\n")
