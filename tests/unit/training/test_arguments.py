"""`python -m quadriga.training` refuses what cannot be, and replaces no training unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from quadriga.training.cli import main
from quadriga.training.recipe.state import LATEST

TRAIN = ("train", "--model", "quadriga-s")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TRAIN, "--steps", "0"), "'0' is no whole number from 1 on"),
        ((*TRAIN, "--minutes", "nan"), "'nan' must be a number of minutes above 0"),
        ((*TRAIN, "--finish-by", "25:99"), "'25:99' is no time of day"),
        (("evaluate", "--examples", "0"), "--examples"),
        (("length", "--requests", "-1"), "--requests"),
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
def test_a_model_that_is_not_there_is_named(command: str) -> None:
    with pytest.raises(SystemExit, match="--models: /nowhere is no checkpoint folder"):
        main([command, "--models", "/nowhere"])


@pytest.mark.parametrize("command", ["evaluate", "length"])
def test_models_of_one_name_are_refused(command: str, tmp_path: Path) -> None:
    for folder in (found := [tmp_path / "a" / "model", tmp_path / "b" / "model"]):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="--models: of 2 folders some have one name"):
        main([command, "--models", *map(str, found)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TRAIN, "--steps", "1", "--resume", "--folder", "."), "--resume: . is of another"),
        ((*TRAIN, "--steps", "1", "--folder", "new", "--init-from", "nowhere"), "No such file"),
        ((*TRAIN, "--steps", "1", "--folder", "new", "--init-from", LATEST), "--init-from: latest"),
        (("export", "--model", "quadriga-s", "--to", "new", "--state", LATEST), "--state: latest"),
        (("export", "--model", "quadriga-s", "--to", "new", "--state", "nowhere"), "No such file"),
        ((*TRAIN, "--steps", "1", "--device", "tpu9"), "--device: 'tpu9' cannot be used"),
    ],
)
def test_what_cannot_be_begun_with_is_named(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LATEST).write_bytes(b"junk")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        main(list(words))


def test_an_export_deletes_nothing_but_a_checkpoint(tmp_path: Path) -> None:
    mine = tmp_path / "thesis.tex"
    for to in (tmp_path, mine):
        mine.write_bytes(b"years of work")
        with pytest.raises(SystemExit, match=r"--to: .* holds other files"):
            main(["export", "--model", "quadriga-s", "--state", str(mine), "--to", str(to)])
        assert list(tmp_path.iterdir()) == [mine]


def test_a_training_is_never_replaced_unasked(tmp_path: Path) -> None:
    state = tmp_path / LATEST
    state.write_bytes(b"hours of work")
    with pytest.raises(SystemExit, match="--resume"):
        main([*TRAIN, "--steps", "1", "--folder", str(tmp_path)])
    assert state.read_bytes() == b"hours of work"
    assert list(tmp_path.iterdir()) == [state]
