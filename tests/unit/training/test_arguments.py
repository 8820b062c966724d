"""`python -m quadriga.training` refuses what cannot be, and replaces no training unasked."""

from __future__ import annotations

import datetime
import errno
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.errors import ConfigError
from quadriga.files import file_lock
from quadriga.training import cli, heads
from quadriga.training.cli import ASSETS, main
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe import loop
from quadriga.training.recipe.family import FAMILY
from quadriga.training.recipe.loop import TrainingOptions, budget_name
from quadriga.training.recipe.state import LATEST
from quadriga.training.tokenizer import build_tokenizer
from tests.unit.conftest import Refused

TRAIN = ("train", "--model", "quadriga-s", "--dtype", "fp32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TRAIN, "--steps", "0"), "'0' is no whole number from 1 on"),
        ((*TRAIN, "--minutes", "nan"), "'nan' must be a number of minutes above 0"),
        ((*TRAIN, "--finish-by", "25:99"), "'25:99' is no time of day"),
        (("evaluate", "--examples", "0"), "--examples"),
        (("length", "--requests", "-1"), "--requests"),
        (("prompts", "--texts", "a", "--out", "b", "--seed", "-1"), "no whole number from 0 on"),
    ],
)
def test_bad_arguments_are_named(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "fit-kv", "length"])
def test_a_model_that_is_not_there_is_named(command: str, refused: Refused) -> None:
    refused(main, [command, "--models", "/nowhere"], "--models: /nowhere is no checkpoint folder")


@pytest.mark.parametrize("command", ["evaluate", "length"])
def test_models_of_one_name_are_refused(command: str, tmp_path: Path, refused: Refused) -> None:
    for folder in (found := [tmp_path / "a" / "model", tmp_path / "b" / "model"]):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    refused(
        main, [command, "--models", *map(str, found)], "--models: of 2 folders some have one name"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TRAIN, "--steps", "1", "--resume", "--folder", "."), "--resume: . is of another"),
        ((*TRAIN, "--steps", "1", "--folder", "new", "--init-from", "nowhere"), "No such file"),
        ((*TRAIN, "--steps", "1", "--folder", "new", "--init-from", LATEST), "--init-from: latest"),
        (("export", "--model", "quadriga-s", "--to", "new", "--state", LATEST), "--state: latest"),
        (("export", "--model", "quadriga-s", "--to", "new", "--state", "nowhere"), "No such file"),
        ((*TRAIN, "--steps", "1", "--device", "tpu9"), "--device: 'tpu9' cannot be used"),
        (("evaluate", "--models", "."), r"--models: .*exits\.json"),
        (("fit-kv", "--models", "."), "--models: .* has no exits"),
    ],
)
def test_what_cannot_be_begun_with_is_named(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    (tmp_path / LATEST).write_bytes(b"junk")
    shutil.copyfile(ASSETS / "quadriga-s" / "config.json", tmp_path / "config.json")
    monkeypatch.chdir(tmp_path)
    refused(main, list(words), message)


def test_an_export_deletes_nothing_but_a_checkpoint(tmp_path: Path, refused: Refused) -> None:
    mine = tmp_path / "thesis.tex"
    for to in (tmp_path, mine):
        mine.write_bytes(b"years of work")
        refused(
            main,
            ["export", "--model", "quadriga-s", "--state", str(mine), "--to", str(to)],
            r"--to: .* holds other files",
        )
        assert list(tmp_path.iterdir()) == [mine]


def test_an_export_that_cannot_be_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Weights that are no numbers, figures of an older form; the folder one is in will do."""
    monkeypatch.setattr(cli, "_fit", lambda _: None)
    model = EarlyExitLlama(FAMILY["quadriga-s"].shape, build_tokenizer().get_vocab_size())
    state, figures = tmp_path / "state.pt", tmp_path / "figures.json"
    tasks = {"sort": {"exact_match": 1.0, "exact_match_long": 1.0}}
    said = {"examples": 1, "seed": 0, "models": {"quadriga-s": {"tasks": tasks}}}
    figures.write_text(json.dumps(said))
    words = ["export", "--model", "quadriga-s", "--state", str(state), "--to", "."]
    (to := tmp_path / "to").mkdir()
    monkeypatch.chdir(to)
    state_of = {"model": model.state_dict(), "progress": {"step": 1, "tokens_seen": 2}}
    torch.save(state_of, state)
    refused(main, [*words, "--figures", str(figures)], r"--figures: .*exact_match_reworded")
    assert main(words) == 0 and (to / "exits.json").is_file()
    state_of["model"]["head"][0, 0] = torch.nan
    torch.save(state_of, state)
    refused(
        main, [*words[:-1], str(tmp_path / "new")], r"lm_head\.weight does not fit fp16: it has nan"
    )


@pytest.mark.parametrize("command", ["fit-kv", "length"])
def test_a_folder_with_the_name_of_a_bundled_model_is_its_own(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def load(model: Path, _: int) -> None:
        raise ConfigError(f"loads {read_checkpoint(str(model)).path}")

    monkeypatch.setattr(heads, "load", load)
    (tmp_path / "quadriga-s").symlink_to(ASSETS / "quadriga-l")
    monkeypatch.chdir(tmp_path)
    refused(main, [command, "--models", "quadriga-s"], f"loads {ASSETS / 'quadriga-l'}")


@pytest.mark.parametrize(("minutes", "is_first"), [("1", True), ("60", False)])
def test_a_training_ends_at_the_earlier_of_its_limits(
    minutes: str, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    seen: list[TrainingOptions] = []

    def begin(_: object, options: TrainingOptions) -> None:
        seen.append(options)
        raise ConfigError("begun")

    monkeypatch.setattr(loop, "Trainer", begin)
    soon = datetime.datetime.now() + datetime.timedelta(minutes=30)
    words = ["--minutes", minutes, "--finish-by", f"{soon:%H:%M}", "--folder", str(tmp_path)]
    refused(main, [*TRAIN, *words], "begun")
    (options,) = seen
    assert options.deadline_s is not None and options.finish_by_s is not None
    assert (options.deadline_s < options.finish_by_s) is is_first
    assert options.deadline_s <= options.finish_by_s
    assert budget_name(options) == f"steps=None deadline={minutes}.0min {options.finish_by_s}"


def test_a_training_is_never_replaced_unasked(tmp_path: Path, refused: Refused) -> None:
    state = tmp_path / LATEST
    state.write_bytes(b"hours of work")
    refused(main, [*TRAIN, "--steps", "1", "--folder", str(tmp_path)], "--resume")
    assert state.read_bytes() == b"hours of work"
    assert list(tmp_path.iterdir()) == [state]
    state.unlink()
    with file_lock(tmp_path / ".lock", 0.0):
        refused(main, [*TRAIN, "--steps", "1", "--folder", str(tmp_path)], "another run is at")


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_full_disk_and_an_interrupt_are_no_tracebacks(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(cli, "_fit_kv", Mock(side_effect=fault))
    if isinstance(fault, OSError):
        refused(main, ["fit-kv"], r"No space left; make room, and start it again: .*--resume")
    else:
        assert main(["fit-kv"]) == 130
