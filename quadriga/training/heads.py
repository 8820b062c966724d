"""Maps for skipped KV and length heads of the bundled models: `quadriga.tune` on task prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.errors import ConfigError
from quadriga.llm import LLM
from quadriga.tune.answers import (
    ANSWERS_FILE,
    OwnAnswer,
    generate_answers,
    native,
    read_answers,
)
from quadriga.tune.folder import save_maps
from quadriga.tune.lengths import MAX_NEW_TOKENS, LengthData, gather, save_heads, train_heads
from quadriga.tune.prompts import TASKS_NAME, TunePrompt, distinct, read_prompts
from quadriga.tune.skipped_kv import fit_maps
from quadriga.tune.states import StateStore

FIT_PROMPTS = 96  # per task
SLOTS = 64


def load(model: str | Path, threads: int) -> LLM:
    """A model with its exits, on the CPU, to be asked at full depth."""
    engine = {"threads": threads, "device": "cpu", "compile": "wait"}
    return LLM(str(model), engine=engine, decode={"max_slots": SLOTS})


def fit_folder(
    folder: Path,
    *,
    prompts_per_task: int = FIT_PROMPTS,
    max_tokens: int = MAX_NEW_TOKENS,
    threads: int = 1,
) -> dict[str, float]:
    """Fit the maps of a checkpoint directory of the family and store them in it.

    Returns:
        Per map the share of the variance of K and V that it leaves unexplained.

    Raises:
        ConfigError: It has no exits.
    """
    folder = folder.resolve()  # as a path: a bundled model may have its name
    exits = read_checkpoint(str(folder), heads="own").exits
    if not exits.layers:
        raise ConfigError(f"--models: {folder} has no exits, whose tokens maps are for")
    llm = load(folder, threads)
    prompts = distinct(read_prompts(f"{TASKS_NAME}{prompts_per_task}"))
    answers = answers_of(llm, prompts, max_tokens=max_tokens)
    maps, unexplained = fit_maps(native(llm), exits, answers)
    llm.close()
    save_maps(folder, maps)
    return unexplained


def collect(
    llm: LLM,
    prompts: list[TunePrompt],
    work: Path,
    advance: Callable[[int], object] = lambda _: None,
) -> LengthData:
    """What length heads learn from: states of the model's own answers, behind every exit.

    Args:
        work: An empty folder for the states, there as long as they are read.
    """
    runner = native(llm)
    checkpoint = runner.spec.checkpoint
    answers = answers_of(llm, prompts, advance)
    depths = (*checkpoint.exits.layers, checkpoint.num_layers)
    store = StateStore(work, checkpoint.hidden_size, depths, top=0)
    store.fill(runner, answers, lambda _: None)
    return gather(store, answers)


def collected(work: Path, prompts: list[TunePrompt]) -> LengthData:
    """The same of a tuning that was done: its answers and states are there already.

    Args:
        work: The tuning's `DIR/work`.
        prompts: Those that it was given.

    Raises:
        ConfigError: There are none, or of other exits as well.
    """
    known = read_answers(work / ANSWERS_FILE)
    stores = sorted(work.glob("states-*"))
    if len(stores) != 1 or not known:
        raise ConfigError(f"--work: {work} must hold answers and the states of one tuning")
    answers = [known[prompt.id] for prompt in prompts if prompt.id in known]
    return gather(StateStore.open(stores[0]), answers)


def train_lengths(
    folder: Path,
    *,
    requests_per_task: int,
    seed: int,
    threads: int,
    advance: Callable[[int], object],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Train the length heads of a checkpoint directory, store them in it, return the figures."""
    folder = folder.resolve()  # as a path: a bundled model may have its name
    prompts = distinct(read_prompts(f"{TASKS_NAME}{requests_per_task}"))
    with tempfile.TemporaryDirectory() as work:
        llm = load(folder, threads)
        data = collect(llm, prompts, Path(work), advance)
        llm.close()
        report(f"{folder.name}: {len(data.remaining)} samples of {len(data.token_ids)} requests")
        spec, tensors, figures = train_heads(data, seed=seed, report=report)
    save_heads(folder, spec, tensors)
    return figures


def answers_of(
    llm: LLM,
    prompts: list[TunePrompt],
    advance: Callable[[int], object] = lambda _: None,
    max_tokens: int = MAX_NEW_TOKENS,
) -> list[OwnAnswer]:
    """Greedy answers at full depth."""
    most = min(max_tokens, llm.runner.row_capacity_tokens // 2)
    with tempfile.TemporaryDirectory() as folder:
        return generate_answers(
            llm, prompts, Path(folder), max_tokens=most, temperature=0.0, seed=0, advance=advance
        )
