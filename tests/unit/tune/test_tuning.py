"""`quadriga.tune` from prompts to a folder that is served, on small models of every family."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from quadriga.checkpoint.exits import EXITS_WEIGHTS, SKIPPED_KV_WEIGHTS, ExitParams, ExitSpec
from quadriga.checkpoint.folder import on_this_node, read_checkpoint
from quadriga.checkpoint.length_heads import read_length_heads
from quadriga.checkpoint.tuned import TUNE_FILE, bundled_for, weights_hash
from quadriga.config.loader import load_config
from quadriga.core.request import SamplingParams
from quadriga.errors import ConfigError
from quadriga.files import file_lock
from quadriga.llm import LLM
from quadriga.training.tokenizer import build_tokenizer
from quadriga.tune import outcome, tuning
from quadriga.tune.answers import OwnAnswer
from quadriga.tune.cli import main
from quadriga.tune.distillation import DistillOptions
from quadriga.tune.exit_heads import TunedKind
from quadriga.tune.prompts import read_prompts
from quadriga.tune.thresholds import QualityBudget
from quadriga.tune.tuning import TuneOptions, Tuning, tune
from serve_app.cli.launch import find_models
from tests.unit.conftest import Refused
from tests.unit.tune.models import LAYERS, save_model

PROMPTS = "tasks:4"
KINDS: dict[str, TunedKind] = {
    "llama": "mlp",
    "mistral": "norm",
    "qwen2": "mlp",
    "qwen3": "head",
    "opt": "linear",
}


def options(model: Path, out: Path, kind: TunedKind = "mlp") -> TuneOptions:
    return TuneOptions(
        model=str(model),
        out=out,
        prompts=PROMPTS,
        layers=(1, 3),
        distill=DistillOptions(kind, width=16, epochs=8, batch_tokens=32, rate=1e-2),
        budget=QualityBudget("changed", 0.6),
        held_back=("story",),
        max_tokens=10,
        slots=8,
        speed_prompts=1,
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the folder that tuning made for it."""
    model = save_model("llama", tmp_path_factory.mktemp("llama"))
    out = tmp_path_factory.mktemp("tuned")
    tune(options(model, out), Console(quiet=True))
    return model, out


@pytest.mark.parametrize("family", [name for name in KINDS if name != "llama"])
def test_every_family_is_tuned_and_served_with_what_was_made(family: str, tmp_path: Path) -> None:
    model, out = save_model(family, tmp_path / "model"), tmp_path / "out"
    asked = options(model, out, KINDS[family])
    if family == "qwen3":
        half = replace(asked.distill, dtype=torch.bfloat16)
        asked = replace(asked, distill=half, engine={"dtype": "bfloat16"})
    figures = tune(asked, Console(quiet=True))
    assert figures["domains"][-1]["domain"] == "all"
    check_served(model, out)


def test_a_tuned_folder_is_served_with_its_model(llama: tuple[Path, Path]) -> None:
    check_served(*llama)


def check_served(model: Path, out: Path) -> None:
    """All parts are there, and tokens leave at the exits with them."""
    checkpoint = read_checkpoint(str(model), heads=str(out))
    assert checkpoint.exits.layers and set(checkpoint.exits.layers) <= {1, 3}
    heads = read_length_heads(out)
    assert heads is not None and heads.depths == (1, 3, LAYERS)
    assert (out / "report.md").is_file() and (out / "report.png").is_file()
    assert not list(out.glob("*model*.safetensors"))
    llm = LLM(
        str(model),
        exits={"folder": str(out)},
        engine={"compile": "wait"},
        decode={"rebatching": "lazy"},  # whatever pays
    )
    has_maps = 1 in checkpoint.exits.layers  # behind layer 3 is the last one alone
    assert llm.runner.spec.skipped_kv == ("linear" if has_maps else "project")
    sampling = SamplingParams(8, temperature=0.0)
    output = llm.generate("Sort: 3 1 2\n", sampling, exits=ExitParams(0.0, "bounded"))[0]
    llm.close()
    assert set(output.exit_layers[1:]) == {checkpoint.exits.layers[0]}


def test_no_more_best_tokens_are_kept_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of proteins has fewer tokens than are kept of others."""
    monkeypatch.setattr(tuning, "TOP", 10_000)
    model = save_model("llama", tmp_path / "model")
    tune(replace(options(model, tmp_path / "out"), parts=("exits",)), Console(quiet=True))


def test_a_second_run_finds_everything_and_makes_the_same(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, out = llama
    before = tmp_path / "before"
    shutil.copytree(out, before)
    monkeypatch.setattr(LLM, "stream", lambda *_, **__: pytest.fail("it generated again"))
    some = replace(options(model, out), parts=("exits", "thresholds"))
    figures = tune(some, Console(quiet=True))
    assert "lengths" in figures, "they do not depend on exits"
    assert not {"maps", "domains", "speed", "answers"} & figures.keys(), "of exits before these"
    check_exits(model, out, before)


def test_an_exit_that_was_dropped_comes_back_with_another_budget(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a large one all leave at the first, with none at the last; no run names layers."""
    model, out = llama[0], tmp_path / "out"
    shutil.copytree(llama[1], out)
    made = read_checkpoint(str(model), heads=str(out)).exits
    assert made.layers == (1,)
    some = replace(options(model, out), parts=("thresholds",), layers=())
    tune(replace(some, budget=QualityBudget("changed", 0.0)), Console(quiet=True))
    assert read_checkpoint(str(model), heads=str(out)).exits.layers == (3,)
    assert all(name.startswith("exits.3.") for name in load_file(out / EXITS_WEIGHTS))
    tune(replace(some, parts=("maps", "lengths", "report")), Console(quiet=True))
    tune(some, Console(quiet=True))
    check_exits(model, out, llama[1])
    for module in (outcome, tuning):
        monkeypatch.setattr(module, "SPEED_TOKENS", 159)
    figures = tune(replace(some, parts=("report",)), Console(quiet=True))
    assert figures["speed_prompts"] == 0, "no prompt leaves room for a timed answer"
    assert not {"speed", "answers"} & figures.keys(), "those of an earlier run"
    assert [line for line in figures["given_up"] if "maps" in line] == [
        "maps for exits after 1: not fitted, so the layers' own projections stand in; do the part "
        "maps"
    ]
    shutil.rmtree(out / "work")
    tune(some, Console(quiet=True))
    check_exits(model, out, llama[1])


def check_exits(model: Path, out: Path, wanted: Path) -> None:
    """Both folders have the same, to the bit."""
    there, same = (read_checkpoint(str(model), heads=str(path)).exits for path in (out, wanted))
    assert there == same
    after, before = load_file(out / EXITS_WEIGHTS), load_file(wanted / EXITS_WEIGHTS)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)


def test_layers_of_other_exits_than_were_made_are_refused(llama: tuple[Path, Path]) -> None:
    model, out = llama
    again = replace(options(model, out), parts=("exits", "thresholds"), layers=())
    assert Tuning(again, Console(quiet=True)).layers == (1, 3), "those that were made"
    asked = replace(options(model, out), parts=("thresholds",), layers=(2,))
    with pytest.raises(ConfigError, match=r"--layers: \[2\] are asked for.*exits after \[1, 3\]"):
        tune(asked, Console(quiet=True))


def test_training_brings_an_exit_nearer_to_the_full_depth(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    """Against the first step, whose exits are the model's own norm and head."""
    model, out = llama
    begun = replace(options(model, tmp_path), parts=("exits",))
    begun = replace(begun, distill=replace(begun.distill, epochs=0.01))
    before = tune(begun, Console(quiet=True))["training_loss"]
    after = json.loads((out / "report.json").read_text())["training_loss"]
    assert before.keys() == after.keys() == {"1", "3"}
    assert all(after[depth] < 0.8 * before[depth] for depth in after)


def test_the_models_own_head_is_calibrated_where_it_was_trained_for_exits(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    """As LayerSkip's models: nothing is trained, thresholds and maps are found."""
    some = replace(
        options(llama[0], tmp_path),
        parts=("exits", "thresholds", "maps"),
        imported=(ExitSpec((1, 3), "shared"), {}),
    )
    tune(some, Console(quiet=True))
    exits = read_checkpoint(str(llama[0]), heads=str(tmp_path)).exits
    assert exits.kind == "shared" and dict(exits.sure_from).keys() == set(exits.layers)
    assert not (tmp_path / EXITS_WEIGHTS).exists()


def test_a_folder_of_other_weights_is_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model, out = llama
    other = save_model("llama", tmp_path / "other", seed=1)
    assert weights_hash(other) != weights_hash(model)
    with pytest.raises(ConfigError, match="was made for the weights"):
        LLM(str(other), exits={"folder": str(out)})
    with pytest.raises(ConfigError, match=r"--out: .* was made for the weights .*; name "):
        tune(options(other, out), Console(quiet=True))
    config = load_config({"model": str(other), "exits.folder": str(out)})
    with pytest.raises(ConfigError, match="was made for the weights"):
        find_models(config)  # by the command that serves it, before Ray is started
    with pytest.raises(ConfigError, match=f"no {TUNE_FILE}"):
        read_checkpoint(str(model), heads=str(tmp_path))


def test_what_the_package_has_for_a_models_weights_is_found(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    model, out = llama
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "anything").symlink_to(out)
    other = save_model("llama", tmp_path / "other", seed=1)
    assert bundled_for(model, LAYERS, 32, assets) == assets / "anything"
    assert bundled_for(other, LAYERS, 32, assets) is None
    assert bundled_for(model, LAYERS + 1, 32, assets) is None


def test_another_node_reads_the_same_heads(llama: tuple[Path, Path]) -> None:
    model, out = llama
    there = read_checkpoint(str(model), heads=str(out))
    moved = replace(there, path=Path("/nowhere/model"))
    here = on_this_node(moved, Path("unused"))
    assert (here.path, here.heads_path) == (there.path, there.heads_path)


def test_thresholds_need_exits(llama: tuple[Path, Path], tmp_path: Path) -> None:
    some = replace(options(llama[0], tmp_path), parts=("thresholds",))
    with pytest.raises(ConfigError, match="has none yet"):
        tune(some, Console(quiet=True))


def test_answers_to_other_prompts_are_not_mixed_in(llama: tuple[Path, Path]) -> None:
    model, out = llama
    other = replace(options(model, out), prompts="tasks:5", max_tokens=11)
    with pytest.raises(ConfigError, match="of another --prompts and --max-tokens; give the same"):
        tune(other, Console(quiet=True))


def test_prompts_that_leave_no_room_for_an_answer_are_counted(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    room, tokenizer = 20, build_tokenizer()
    asked = replace(options(llama[0], tmp_path), parts=(), max_tokens=160 - room)
    lengths = [len(tokenizer.encode(str(p.content))) for p in read_prompts(PROMPTS)]
    assert 0 < (longer := sum(n > room for n in lengths)) < len(lengths)
    assert tune(asked, Console(quiet=True))["unanswered"] == longer
    none = replace(asked, out=tmp_path / "none", parts=("lengths",), max_tokens=160)
    with pytest.raises(ConfigError, match="none of 0 prompts that leave room for --max-tokens 160"):
        tune(none, Console(quiet=True))


def test_what_was_found_is_known_though_the_work_was_deleted(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    model, out = llama[0], tmp_path / "out"
    tune(options(model, out), Console(quiet=True))
    shutil.rmtree(out / "work")
    some = replace(options(model, out), parts=("report",), layers=())
    with pytest.raises(ConfigError, match="was made with story held back; hold back the same"):
        tune(replace(some, held_back=()), Console(quiet=True))
    shutil.rmtree(out / "work")
    figures = tune(some, Console(quiet=True))
    assert {"maps", "lengths", "calibration", "cut"} <= figures.keys()
    assert not [line for line in figures["given_up"] if "maps" in line]


def test_maps_of_other_exits_go_where_the_report_says_that_there_are_none(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    model, out = llama[0], tmp_path / "out"
    some = replace(options(model, out), parts=("exits", "thresholds", "maps"))
    tune(some, Console(quiet=True))
    assert (out / SKIPPED_KV_WEIGHTS).is_file()
    figures = tune(replace(some, parts=("exits", "report")), Console(quiet=True))
    assert not (out / SKIPPED_KV_WEIGHTS).exists()
    assert any("not fitted" in line for line in figures["given_up"])


def test_nothing_is_said_of_exits_that_nobody_made(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    some = replace(options(llama[0], tmp_path), parts=("lengths", "report"))
    figures = tune(some, Console(quiet=True))
    assert not [line for line in figures["given_up"] if line.startswith("exits")]
    assert "leaves by default" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    "writer", ["states.write_atomically", "folder.write_atomically", "distillation.replaced"]
)
def test_a_full_disk_is_named(
    writer: str,
    llama: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    no_room = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(f"quadriga.tune.{writer}", no_room)
    words = ["--out", str(tmp_path), "--prompts", "tasks:4", "--max-tokens", "4", "--layers", "1"]
    words = [str(llama[0]), *words, "--width", "8", "--epochs", "1", "--parts", "exits"]
    refused(main, words, "No space left on device; make room, and start it again: it goes on")
    no_room.side_effect = KeyboardInterrupt
    assert main(words) == 130


def test_parts_are_not_mixed_whose_run_held_back_other_domains_and_was_killed(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = llama[0], tmp_path / "out"
    shutil.copytree(llama[1], out)
    before = options(model, out)
    other = replace(before, held_back=())
    monkeypatch.setattr(Tuning, "_lengths", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tune(other, Console(quiet=True))
    monkeypatch.undo()
    for some in (before, other):
        with pytest.raises(ConfigError, match="in part with other domains held back"):
            tune(replace(some, parts=("thresholds",)), Console(quiet=True))
    tune(other, Console(quiet=True))
    tune(replace(other, parts=("thresholds",)), Console(quiet=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "0"], "no whole number from 1 on"),
        (["--threads", "1025"], "no whole number from 1 to 1024"),
        (["--speed-prompts", "-1"], "no whole number from 0 on"),
        (["--seed", "-1"], "no whole number from 0 to 1099511627775"),
        (["--seed", f"{2**40}"], "no whole number from 0 to 1099511627775"),
        (["--temperature", "nan"], "no number from 0"),
        (["--epochs", "nan"], "no number above 0"),
        (["--rate", "0"], "no number above 0"),
        (["--budget", "changed=x"], "must be changed=X"),
        (["--parts", "magic"], "none of exits"),
        (["--parts", ","], "',' is none of exits"),
        (["--import", "dssd"], "must be layerskip"),
        (["--width", "65537"], "no whole number from 1 to 65536"),
        (["--out", ""], "is empty; give a folder, '.' for this one"),
    ],
)
def test_wrong_arguments_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["quadriga-s", "--out", "unused", "--prompts", "tasks:1", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("part", "held"), [("exits", "prompts"), ("lengths", "")])
def test_too_few_prompts_are_refused_before_any_is_answered(
    part: str, held: str, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "p.txt").write_text("Sort: 3 1 2\n")
    words = ["--out", f"{tmp_path}/out", "--prompts", f"{tmp_path}/p.txt", "--parts", part]
    refused(
        main,
        ["quadriga-s", *words, f"--hold-back={held}"],
        f"there for {part}, as none of 1 prompts falls",
    )


def test_a_model_without_inner_layers_is_refused(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="too small for an exit"):
        Tuning(replace(options(model, tmp_path / "out"), layers=()), Console(quiet=True))


def test_a_folder_is_tuned_into_by_one_run_at_a_time(tmp_path: Path, refused: Refused) -> None:
    words = ["quadriga-s", "--out", str(tmp_path), "--prompts", "tasks:1"]
    (tmp_path / "work").mkdir()
    with file_lock(tmp_path / "work" / ".lock", 0.0):
        work = tmp_path / "work"
        refused(main, words, f"--out: another run is at work in {work}")
        with pytest.raises(ConfigError, match="another run is at work"):
            tune(options(tmp_path, tmp_path), Console(quiet=True))
    (tmp_path / "file").touch()
    refused(main, [*words, "--out", str(tmp_path / "file")], r"--out: .* cannot be written to")


def test_some_answers_are_of_all_domains_though_the_file_is_sorted(tmp_path: Path) -> None:
    prompts = sorted(read_prompts("tasks:40"), key=lambda prompt: prompt.domain)
    lines = [json.dumps({"id": p.id, "domain": p.domain, "prompt": p.content}) for p in prompts]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    asked = options(save_model("llama", tmp_path / "model"), tmp_path / "out")
    made = Tuning(replace(asked, prompts=str(tmp_path / "p.jsonl")), Console(quiet=True))
    answers = [OwnAnswer(prompt.id, [1], [2], True) for prompt in made.prompts]
    some = made._mixed(answers, "train")[:40]
    assert len({answer.id.split("-")[0] for answer in some}) > 4


def test_a_layer_outside_the_model_is_refused_and_a_folder_below_home_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    refused(
        main,
        ["quadriga-s", "--out=~/tuned", "--prompts", "tasks:1", "--layers", "9"],
        r"outside 1\.\.7",
    )
    assert (tmp_path / "tuned" / "tune.json").is_file()
