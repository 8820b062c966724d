"""The parts of one tuning, in their order; each takes from disk what the ones before left."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from quadriga.checkpoint.exits import DEFAULT_THRESHOLD, NEVER, ExitSpec, to_json
from quadriga.checkpoint.families import NATIVE_ARCHITECTURES
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.checkpoint.json_files import read_object
from quadriga.checkpoint.tuned import TUNE_FILE
from quadriga.errors import ConfigError
from quadriga.files import only_run, write_atomically
from quadriga.llm import LLM
from quadriga.tune import lengths, report
from quadriga.tune.answers import OwnAnswer, generate_answers, native
from quadriga.tune.distillation import Distiller, DistillOptions
from quadriga.tune.exit_heads import TunedKind
from quadriga.tune.folder import TuneFolder, save_maps
from quadriga.tune.outcome import SPEED_TOKENS, by_domain, compare_answers, measure_speed
from quadriga.tune.prompts import Part, distinct, read_prompts
from quadriga.tune.skipped_kv import fit_maps
from quadriga.tune.states import TOP, StateStore
from quadriga.tune.thresholds import QualityBudget, Verdicts, choose, judge, outcome

PartName = Literal["exits", "thresholds", "maps", "lengths", "report"]
PARTS: tuple[PartName, ...] = ("exits", "thresholds", "maps", "lengths", "report")
NEEDED: dict[PartName, tuple[Part, ...]] = {
    "exits": ("train",),
    "thresholds": ("calibrate",),
    "maps": ("train",),
    "lengths": ("train", "calibrate", "test"),
    "report": ("test",),
}
"""The parts of the prompts that each of these learns from, chooses by or is measured on."""
_MEASURED = ("domains", "speed_prompts", "speed", "answers")
_OF_EXITS = (*_MEASURED, "training_loss", "budget", "calibration", "maps", "exits", "given_up")
"""Figures that say nothing of other exits."""
LEAST_SHARE = 0.01
"""Exits that fewer tokens leave at, within the budget, are left out."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What one tuning is asked for.

    Attributes:
        model: As `quadriga.LLM` takes it.
        out: The folder that is written.
        prompts: See `read_prompts`.
        parts: Those to do; what they need of others has to be in `out`.
        layers: Layers run before each exit; empty: those of the exits that were made, else after
            a half, two thirds and five sixths.
        held_back: Domains that nothing is learned or chosen on.
        max_tokens: Of an answer.
        temperature: Of the answers; None: what the checkpoint recommends.
        map_answers: Answers that the maps are fitted on, at most.
        test_tokens: Tokens that thresholds are chosen and reported on, at most, each.
        speed_prompts: Prompts that the speed is measured with, at most; 0: not at all.
        imported: Exits that a checkpoint of another project holds, with their weights.
    """

    model: str
    out: Path
    prompts: str
    parts: tuple[PartName, ...] = PARTS
    layers: tuple[int, ...] = ()
    distill: DistillOptions = field(default_factory=DistillOptions)
    budget: QualityBudget = field(default_factory=lambda: QualityBudget("changed", 0.02))
    held_back: tuple[str, ...] = ()
    max_tokens: int = 256
    temperature: float | None = None
    seed: int = 0
    threads: int = 1
    slots: int = 32
    map_answers: int = 400
    test_tokens: int = 20_000
    speed_prompts: int = 32
    imported: tuple[ExitSpec, dict[str, torch.Tensor]] | None = None
    engine: dict[str, Any] = field(default_factory=dict)


def tune(options: TuneOptions, console: Console) -> dict[str, Any]:
    """Do the parts that are asked for; returns the figures of the report.

    Raises:
        ConfigError: The model cannot be tuned, the folder is another model's or another run is at
            work in it, or the prompts cannot be used.
    """
    with only_run("--out", options.out / "work"):
        return Tuning(options, console).run()


class Tuning:
    """One tuning under way; its caller holds the folder. See `only_run`.

    Raises:
        ConfigError: See `tune`.
    """

    def __init__(self, options: TuneOptions, console: Console) -> None:
        self._options, self._console = options, console
        if "report" in options.parts:
            report.check_plots()
        cache_dir = options.engine.get("cache_dir")
        self.checkpoint = read_checkpoint(options.model, cache_dir=cache_dir, heads="own")
        _check(self.checkpoint)
        self.prompts = distinct(read_prompts(options.prompts))
        self._domains = {prompt.id: prompt.domain for prompt in self.prompts}
        if unknown := sorted(set(options.held_back) - set(self._domains.values())):
            raise ConfigError(
                f"--hold-back: {', '.join(unknown)} are no domains of {options.prompts}, which has "
                f"{', '.join(sorted(set(self._domains.values())))}",
                param="held_back",
            )
        self._parts: dict[str, Part] = {p.id: p.part(options.held_back) for p in self.prompts}
        self._check_parts(self._parts, "prompts")
        self.folder = TuneFolder(options.out, self.checkpoint)
        self.work = options.out / "work"
        self.made = TuneFolder(self.work / "exits", self.checkpoint)
        if self.folder.exits.layers and not self.made.exits.layers:  # `work` was deleted
            self.made.take_exits(replace(self.folder.exits, sure_from=()), self.folder.path)
        self.layers = self._which_layers()
        self._check_work()
        self._figures_file = self.work / "figures.json"
        self.figures: dict[str, Any] = {}
        # The second where `work` was deleted.
        for file in (self._figures_file, options.out / report.FIGURES_FILE):
            if file.is_file():
                self.figures = json.loads(file.read_text())
                break
        self.figures |= {"model": self.checkpoint.id, "num_layers": self.checkpoint.num_layers}
        self._verdicts: Verdicts | None = None

    def run(self) -> dict[str, Any]:
        """See `tune`."""
        options = self._options
        started_s = time.monotonic()
        torch.manual_seed(options.seed)
        plain = self._load({"folder": "own", "layers": "none"})
        with report.progress("answers generated", len(self.prompts)) as advance:
            answers = generate_answers(
                plain,
                self.prompts,
                self.work,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                seed=options.seed,
                advance=advance,
            )
        fitting = f"prompts that leave room for --max-tokens {options.max_tokens}"
        self._check_parts([answer.id for answer in answers], fitting)
        self.figures["unanswered"] = len(self.prompts) - len(answers)
        depths = (*self.layers, self.checkpoint.num_layers)
        store = StateStore(
            self.work / f"states-{'-'.join(map(str, self.layers))}",
            self.checkpoint.hidden_size,
            depths,
            min(TOP, self.checkpoint.vocab_size),
        )
        with report.progress("answers read", len(answers)) as advance:
            store.fill(native(plain), answers, advance)
        if "exits" in options.parts:
            self._exits(plain, store, answers)
        if "lengths" in options.parts:
            self._lengths(store, answers)
        plain.close()
        del plain
        if "thresholds" in options.parts:
            self._thresholds(store, answers)
        if "maps" in options.parts:
            self._maps(answers)
        self.figures["seconds"] = round(
            self.figures.get("seconds", 0.0) + time.monotonic() - started_s, 1
        )
        self._keep_figures()
        if "report" in options.parts:
            self._report(store, answers)
        if set(options.parts) == set(PARTS):
            self._keep_asked(sorted(options.held_back))
        self.folder.say({"made": self._how()})
        return self.figures

    def _exits(self, llm: LLM, store: StateStore, answers: Sequence[OwnAnswer]) -> None:
        """Part (a): train exits, or take those of another project."""
        if self._options.imported is not None:
            spec, tensors = self._options.imported
            self._save_exits(spec, tensors or None)
            return
        distill = self._options.distill
        runner = native(llm)
        distiller = Distiller(
            store,
            self._tokens(store, answers, "train"),
            runner.model.config,
            runner.weights.heads[self.checkpoint.num_layers],
            distill,
            seed=self._options.seed,
            work=self.work,
        )
        with report.progress("training steps", distiller.num_steps) as advance:
            distiller.run(advance)
        tensors = {
            name: value
            for depth, head in distiller.heads.items()
            for name, value in head.tensors(depth).items()
        }
        self._save_exits(spec_of(distill.kind, self.layers), tensors)
        self.figures["training_loss"] = {str(k): round(v, 4) for k, v in distiller.loss.items()}

    def _save_exits(self, spec: ExitSpec, tensors: dict[str, torch.Tensor] | None) -> None:
        """All of them stay in `work`, whatever thresholds are chosen later."""
        self._forget(_OF_EXITS)
        save_maps(self.folder.path, {})
        self.made.save_exits(spec, tensors)
        self.folder.save_exits(spec, tensors)

    def _thresholds(self, store: StateStore, answers: Sequence[OwnAnswer]) -> None:
        """Part (b): so sure must a token be at each exit; exits that nobody leaves are left out."""
        options, spec = self._options, self._exits_there("thresholds")
        llm = self._load({"folder": str(self.made.path)})
        which = self._tokens(store, answers, "calibrate", options.test_tokens)
        with report.progress("tokens judged", len(which)) as advance:
            verdicts = judge(store, which, native(llm), spec.criterion, advance)
        llm.close()
        kept = spec.layers
        while True:
            asked = verdicts.only(kept)
            thresholds = choose(asked, options.budget)
            found = outcome(asked, thresholds)["at"]
            least = min(kept, key=lambda k: found[k], default=None)
            if least is None or found[least] >= LEAST_SHARE or len(kept) == 1:
                break
            kept = tuple(k for k in kept if k != least)
        spec = replace(
            spec,
            layers=kept,
            threshold=DEFAULT_THRESHOLD,
            calibrated_at=DEFAULT_THRESHOLD,
            sure_from=tuple((k, max(1e-6, min(NEVER, thresholds[k]))) for k in kept),
        )
        self.folder.take_exits(spec, self.made.path)
        self.figures["budget"] = {options.budget.measure: options.budget.amount}
        self.figures["calibration"] = outcome(asked, thresholds)

    def _maps(self, answers: Sequence[OwnAnswer]) -> None:
        """Part (c): what stands in for K and V of skipped layers."""
        self._exits_there("maps")
        spec = self.folder.exits
        some = self._mixed(answers, "train")[: self._options.map_answers]
        llm = self._load({"folder": str(self.folder.path)})
        with report.progress("answers for the maps", len(some)) as advance:
            maps, unexplained = fit_maps(native(llm), spec, some, advance)
        llm.close()
        save_maps(self.folder.path, maps)
        self.figures["maps"] = unexplained

    def _exits_there(self, part: PartName) -> ExitSpec:
        """All that were made. Raises: ConfigError: There are none yet."""
        spec = self.made.exits
        if not spec.layers:
            raise ConfigError(
                f"--parts: {part} are for exits, and {self.folder.path} has none yet; do the part "
                "exits as well",
                param="parts",
            )
        return spec

    def _which_layers(self) -> tuple[int, ...]:
        """Layers run before each exit: those that are asked for, or of the exits that were made.

        Raises:
            ConfigError: There is no such layer, or no such exit and none is to be made.
        """
        options, last = self._options, self.checkpoint.num_layers - 1
        asked = options.layers if options.imported is None else options.imported[0].layers
        if outside := [k for k in asked if not 0 < k <= last]:
            raise ConfigError(
                f"--layers: {outside} are outside 1..{last}, the inner layers of "
                f"{self.checkpoint.id}",
                param="layers",
            )
        there = self.made.exits.layers
        if "exits" in options.parts or not there:
            found = asked or there or _usual_layers(self.checkpoint.num_layers)
            if not found and "exits" in options.parts:
                raise ConfigError(f"model: {self.checkpoint.id} is too small for an exit")
            return found
        if asked and asked != there:
            raise ConfigError(
                f"--layers: {list(asked)} are asked for, and {self.folder.path} has exits after "
                f"{list(there)}; leave --layers out, or do the part exits as well",
                param="layers",
            )
        return there

    def _lengths(self, store: StateStore, answers: Sequence[OwnAnswer]) -> None:
        """Part (d): heads that predict how many tokens are left, behind every exit."""
        learned = lengths.gather(store, answers)
        part_of = [self._parts[answer.id] for answer in answers]
        of_sample = [part_of[request] for request in learned.requests.tolist()]
        train, validation, test = (
            torch.tensor([i for i, p in enumerate(of_sample) if p == name], dtype=torch.long)
            for name in ("train", "calibrate", "test")
        )
        total = lengths.MAX_EPOCHS * len(learned.depths)
        with report.progress("epochs of length heads, at most", total) as advance:
            spec, tensors, figures = lengths.train_heads(
                learned,
                seed=self._options.seed,
                report=self._console.print,
                parts=(train, validation, test),
                advance=advance,
            )
        lengths.save_heads(self.folder.path, spec, tensors)
        self.figures["lengths"] = figures
        self.figures["cut"] = sum(not a.has_ended for a in answers) / len(answers)

    def _report(self, store: StateStore, answers: Sequence[OwnAnswer]) -> None:
        """What all of it brings and costs."""
        options, spec = self._options, self.folder.exits
        self._forget(_MEASURED)
        llm = self._load({"folder": str(self.folder.path)})
        runner = native(llm)
        if spec.layers:
            which = self._tokens(store, answers, "test", options.test_tokens)
            view = store.at((*spec.layers, self.checkpoint.num_layers))
            with report.progress("tokens judged", len(which)) as advance:
                verdicts = judge(view, which, runner, spec.criterion, advance)
            owners = np.array(store.owners)[which]
            domains = [self._domains[answers[owner].id] for owner in owners]
            self.figures["domains"] = by_domain(verdicts, spec, domains, options.held_back)
            self._verdicts = verdicts
            tests = [a.prompt_ids for a in self._mixed(answers, "test")]
            most = runner.row_capacity_tokens - SPEED_TOKENS  # may be less than their answers had
            tests = [ids for ids in tests if len(ids) <= most][: options.speed_prompts]
            self.figures["speed_prompts"] = len(tests)
            if tests:
                with report.progress("timed runs", None) as advance:
                    self.figures["speed"], said = measure_speed(llm, tests, advance=advance)
                self.figures["answers"] = compare_answers(runner, said)
        llm.close()
        self.figures["exits"] = to_json(spec)
        self.figures["given_up"] = report.given_up(self.figures, self.made.exits.layers)
        self._keep_figures()
        page = report.write_report(self.folder.path, self.figures, self._verdicts)
        self._console.print(page, markup=False)

    def _mixed(self, answers: Sequence[OwnAnswer], part: Part) -> list[OwnAnswer]:
        """Those of one part, in random order: the first of a file may all be of one domain."""
        there = [answer for answer in answers if self._parts[answer.id] == part]
        order = np.random.default_rng(self._options.seed).permutation(len(there))
        return [there[i] for i in order]

    def _tokens(
        self, store: StateStore, answers: Sequence[OwnAnswer], part: Part, most: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Tokens of one part, at most so many, drawn at random."""
        in_part = np.array([self._parts[answer.id] == part for answer in answers])
        which = np.flatnonzero(in_part[np.array(store.owners)])
        if most is not None and len(which) > most:
            rng = np.random.default_rng(self._options.seed)
            which = np.sort(rng.choice(which, most, replace=False))
        return which.astype(np.int64)

    def _check_parts(self, ids: Collection[str], what: str) -> None:
        """Raises: ConfigError: Something that is to be done would have no prompts."""
        there = {self._parts[name] for name in ids}
        for wanted in self._options.parts:
            lacking = [part for part in NEEDED[wanted] if part not in there]
            if lacking and (wanted != "exits" or self._options.imported is None):
                raise ConfigError(
                    f"--prompts: nothing is there for {wanted}, as none of {len(ids)} {what} falls "
                    f"into the part {lacking[0]!r}; give more or shorter ones, lower --max-tokens, "
                    "or hold back fewer domains",
                    param="prompts",
                )

    def _load(self, exits: dict[str, Any]) -> LLM:
        options = self._options
        engine = {"threads": options.threads, "compile": "wait", **options.engine}
        exits = exits | {"mode": "bounded"}  # what is measured of them is early leaving
        return LLM(options.model, exits=exits, engine=engine, decode={"max_slots": options.slots})

    def _check_work(self) -> None:
        """What was generated before belongs to the same question. Raises: ConfigError."""
        options = self._options
        self._asked = asked = {
            "prompts": hashlib.sha256(
                json.dumps([(p.id, p.domain, p.content) for p in self.prompts]).encode()
            ).hexdigest()[:16],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed,
        }
        file = self.work / "asked.json"
        wanted = sorted(options.held_back)
        before: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else dict(asked)
        made = read_object(options.out / TUNE_FILE).get("made", {})  # where `work` was deleted
        held_back: list[str] | None = before.pop("held_back", sorted(made.get("held_back", wanted)))
        if changed := [name for name, value in asked.items() if before.get(name) != value]:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in changed)
            raise ConfigError(
                f"--out: {self.work} holds answers of another {names}; give the same again, remove "
                "it, or name another folder",
                param="out",
            )
        if held_back != wanted and set(options.parts) != set(PARTS):
            there = "in part with other domains"
            if held_back is not None:
                there = f"with {', '.join(held_back) or 'nothing'}"
            raise ConfigError(
                f"--hold-back: what is in {options.out} was made {there} held back; hold back the "
                "same, or do all parts again",
                param="held_back",
            )
        self._keep_asked(wanted if held_back == wanted else None)

    def _keep_asked(self, held_back: list[str] | None) -> None:
        """Note what the work is about; None: parts of it may differ in what is held back."""
        asked = self._asked | {"held_back": held_back}
        write_atomically(self.work / "asked.json", json.dumps(asked).encode())

    def _how(self) -> dict[str, Any]:
        options = self._options
        return {
            "prompts": Path(options.prompts).name,
            "held_back": list(options.held_back),
            "seed": options.seed,
            "seconds": self.figures.get("seconds"),
            "torch": torch.__version__,
        }

    def _forget(self, names: Collection[str]) -> None:
        """Figures of an earlier run that are void now."""
        self.figures = {name: found for name, found in self.figures.items() if name not in names}
        self._keep_figures()

    def _keep_figures(self) -> None:
        write_atomically(self._figures_file, (json.dumps(self.figures, indent=1) + "\n").encode())


def spec_of(kind: TunedKind, layers: tuple[int, ...]) -> ExitSpec:
    """Trained exits of a kind, not calibrated yet."""
    if kind == "linear":
        return ExitSpec(layers, "head", has_norm=False)
    return ExitSpec(layers, kind)


def _usual_layers(num_layers: int) -> tuple[int, ...]:
    """After a half, two thirds and five sixths of the layers."""
    found = {round(num_layers * share) for share in (1 / 2, 2 / 3, 5 / 6)}
    return tuple(sorted(k for k in found if 0 < k < num_layers))


def _check(checkpoint: Checkpoint) -> None:
    """Raises: ConfigError: It has no native family."""
    if checkpoint.architecture not in NATIVE_ARCHITECTURES:
        raise ConfigError(
            f"model: {checkpoint.id} is a {checkpoint.architecture}; exits are for "
            f"{', '.join(sorted(NATIVE_ARCHITECTURES))}",
            param="model",
        )
