"""`--import` of the command, from each project's files to tokens that leave at their exits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from quadriga.checkpoint.exits import EXITS_WEIGHTS, ExitParams
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.core.request import SamplingParams
from quadriga.llm import LLM
from quadriga.tune import tuning
from quadriga.tune.cli import main
from quadriga.tune.tuning import TuneOptions
from tests.unit.tune.models import HIDDEN, VOCAB, save_model
from tests.unit.tune.test_importers import add_branches, megatron

FEW = ["--prompts", "tasks:3", "--max-tokens", "8", "--slots", "8", "--speed-prompts", "0"]
PARTS = ["--parts", "exits,thresholds,maps,lengths"]
ANY = ["--budget", "changed=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model"))


def save_dssd(root: Path, heads: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Heads and norms by the layers run before them, as DSSD names them."""
    named = enumerate(heads.values())
    tensors = {f"{i}.linear.weight": head for i, (head, _) in named}
    tensors |= {f"{i}.norm.weight": norm for i, (_, norm) in enumerate(heads.values())}
    torch.save(tensors, root / "aux_heads.pt")
    indices = [depth - 1 for depth in heads]
    (root / "config.json").write_text(json.dumps({"head_layer_indices": indices}))


def dssd(root: Path, _: Checkpoint) -> str:
    heads = {k: (torch.randn(VOCAB, HIDDEN), torch.ones(HIDDEN)) for k in (1, 3)}
    save_dssd(root, heads)
    return f"dssd:{root}"


def linear(root: Path, _: Checkpoint) -> str:
    torch.save([torch.randn(VOCAB, HIDDEN) for _ in range(3)], root / "heads.pt")
    return f"linear:{root / 'heads.pt'}"


def ee_llm(root: Path, _: Checkpoint) -> str:
    megatron(root, ranks=2, stages=1)
    return f"ee-llm:{root}"


def ee_llm_mlp(root: Path, checkpoint: Checkpoint) -> str:
    megatron(root, ranks=1, stages=1, use_exit_mlp=True)
    add_branches(root, checkpoint, 1)
    return f"ee-llm:{root}"


@pytest.mark.parametrize(
    ("write", "depths"),
    [
        (lambda *_: "layerskip", {1, 2, 3}),
        (dssd, {1, 3}),
        (linear, {1, 2, 3}),
        (ee_llm, {1, 3}),
        (ee_llm_mlp, {1, 4}),
    ],
    ids=["layerskip", "dssd", "linear", "ee-llm", "ee-llm-mlp"],
)
def test_what_is_imported_is_calibrated_and_left_at(
    write: Callable[[Path, Checkpoint], str], depths: set[int], model: Path, tmp_path: Path
) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    theirs.mkdir()
    torch.manual_seed(5)
    asked = write(theirs, read_checkpoint(str(model)))
    words = ["--out", str(out), *FEW, *PARTS, *ANY]
    assert main([str(model), "--import", asked, *words]) == 0
    backbone = out / "backbone" if (out / "backbone").exists() else model
    assert backbone.is_relative_to(out) is (write is ee_llm_mlp)
    exits = read_checkpoint(str(backbone), heads=str(out)).exits
    assert exits.layers and set(exits.layers) <= depths
    assert dict(exits.sure_from).keys() == set(exits.layers)
    llm = LLM(
        str(backbone),
        exits={"folder": str(out)},
        engine={"compile": "off"},
        decode={"rebatching": "lazy"},
    )
    sampling, leave = SamplingParams(6, temperature=0.0), ExitParams(0.0, "bounded")
    (output,) = llm.generate("Sort: 3 1 2\n", sampling, exits=leave, progress=False)
    llm.close()
    assert set(output.exit_layers[1:]) == {exits.layers[0]}


def test_heads_are_of_the_layers_in_the_order_that_is_given(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock()
    monkeypatch.setattr(tuning, "Tuning", made)
    heads = [torch.full((VOCAB, HIDDEN), float(i)) for i in range(2)]
    torch.save(heads, tmp_path / "heads.pt")
    words = ["--out", str(tmp_path / "out"), *FEW, "--layers", "3,1"]
    main([str(model), "--import", f"linear:{tmp_path / 'heads.pt'}", *words])
    asked: TuneOptions = made.call_args.args[0]
    assert asked.layers == (1, 3) and asked.imported is not None
    spec, tensors = asked.imported
    assert spec.layers == (1, 3) and torch.equal(tensors["exits.3.head.weight"], heads[0])


def test_a_trained_head_is_calibrated_as_where_it_was_trained(model: Path, tmp_path: Path) -> None:
    """Exits of the kind `head`, written down as DSSD's, get the same thresholds and weights."""
    theirs, mine, out = (tmp_path / name for name in ("theirs", "mine", "out"))
    theirs.mkdir()
    few = [*FEW, "--parts", "exits,thresholds", "--budget", "changed=0.05"]
    training = ["--kind", "head", "--layers", "1,3", "--epochs", "30", "--rate", "0.01"]
    main([str(model), "--out", str(mine), *few, *training, "--batch-tokens", "32"])
    made = load_file(mine / "work" / "exits" / EXITS_WEIGHTS)
    names = ("head.weight", "norm.weight")
    save_dssd(theirs, {k: tuple(made[f"exits.{k}.{name}"] for name in names) for k in (1, 3)})  # type: ignore[misc]
    main([str(model), "--import", f"dssd:{theirs}", "--out", str(out), *few])
    wanted, found = (read_checkpoint(str(model), heads=str(path)).exits for path in (mine, out))
    assert wanted.layers and found == wanted
    before, after = load_file(mine / EXITS_WEIGHTS), load_file(out / EXITS_WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
