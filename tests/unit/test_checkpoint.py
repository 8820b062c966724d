"""What a checkpoint's generation config recommends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quadriga.checkpoint.folder import Checkpoint, SamplingDefaults, on_this_node, read_checkpoint
from quadriga.config.loader import load_config
from quadriga.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "eos_token_id": 2,
}
GREEDY = SamplingDefaults(temperature=0.0)


def read(folder: Path, generation: Any) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, GREEDY),
        ({}, GREEDY),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, GREEDY),
        ({"temperature": 0.6}, GREEDY),
        ({"repetition_penalty": 1.1}, SamplingDefaults(0.0, repetition_penalty=1.1)),
        ({"do_sample": True}, SamplingDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
            SamplingDefaults(0.6, 0.9, 20, 0.05),
        ),
        ({"do_sample": True, "temperature": 1, "top_p": None, "top_k": -1}, SamplingDefaults()),
    ],
)
def test_what_is_recommended(tmp_path: Path, generation: Any, expected: SamplingDefaults) -> None:
    assert read(tmp_path, generation).sampling == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 2.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_nonsense_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json has {field} "):
        read(tmp_path, {"do_sample": True, field: value})


def test_the_end_token_of_the_generation_config_wins(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert read(tmp_path, {}).eos_token_ids == (2,)


def test_the_tokenizers_end_is_found_behind_thousands_of_added_tokens(tmp_path: Path) -> None:
    """Gemma 3 has 6,415."""
    keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
    flags = dict.fromkeys(keys, False)
    added = [{"id": i, "content": f"<unused{i}>", **flags} for i in range(6415)]
    added[7]["content"] = "<end_of_turn>"
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}, indent=2))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end_of_turn>"}')
    assert read(tmp_path, {}).eos_token_ids == (2, 7)


@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize("end", ["<|im_end|>", {"content": "<|im_end|>"}, "<unknown>", None])
def test_the_tokenizers_end_ends_answers_too(tmp_path: Path, end: object, has_file: bool) -> None:
    """Also where its settings alone tell the ids, beside a `vocab.json`."""
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 2, "content": "</s>"}]
    settings: dict[str, Any] = {"eos_token": end}
    if has_file:
        vocabulary = {"added_tokens": added, "model": {"vocab": {"a" * 50: 0}}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    else:
        settings["added_tokens_decoder"] = {str(token["id"]): token for token in added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read(tmp_path, {}).eos_token_ids == ((2, 7) if "im_end" in str(end) else (2,))


def test_ends_that_the_model_has_no_rows_for_are_none(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [-1, 99, 100]}).eos_token_ids == (99,)


def test_a_downloaded_folder_is_called_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    read(folder, None)
    assert [read_checkpoint(f"{folder}{end}").id for end in ("", "/")] == ["0123abc"] * 2


def test_a_folder_that_is_named_as_such_is_read_and_called_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is called as a bundled model, or is a link."""
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "v7").mkdir()
    read(folder, None)
    for link in ("quadriga-s", "current"):
        (tmp_path / link).symlink_to("v7")
        for model in (f"./{link}", str(tmp_path / link)):
            found = read_checkpoint(model)
            assert (found.id, found.vocab_size) == (link, CONFIG["vocab_size"])
            assert (found.source, found.path) == (str(tmp_path / link), folder)
    assert read_checkpoint("current/../v7").path == folder


def test_a_path_that_cannot_be_looked_at_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model: 'aaa.* cannot be read: .*File name too long"):
        read_checkpoint("a" * 300)


def test_another_training_has_another_fingerprint(tmp_path: Path) -> None:
    """Though shapes, names and the beginning of the file are the same."""
    found = []
    for value in (0, 1):
        (tmp_path / "model.safetensors").write_bytes(bytes(1 << 17) + bytes([value]) * (1 << 17))
        found.append(read(tmp_path, None))
    assert on_this_node(found[1], tmp_path) == found[1] != found[0]
    with pytest.raises(ConfigError, match=r"is another model.* or start the service again"):
        on_this_node(found[0], tmp_path)


@pytest.mark.parametrize("model", ["models/llama/7b", "org/na me"])
def test_a_path_that_is_not_here_and_no_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="is nothing here, and could not be fetched"):
        read_checkpoint(model)


def test_a_path_that_is_not_here_is_shown_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"GGUF file {tmp_path}/tiny.gguf; mend"):
        read_checkpoint("tiny.gguf")


def test_weights_behind_a_link_that_leads_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "annex" / "0123")
    with pytest.raises(ConfigError, match=r"weights cannot be read: .*model\.safetensors"):
        read(tmp_path, None)


def test_a_bundled_model_has_its_name_with_a_slash_behind() -> None:
    assert read_checkpoint("quadriga-s/").id == "quadriga-s"


def test_a_repository_without_a_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of GGUF files alone, of which nothing is fetched."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ConfigError, match=r"'org/name-GGUF' has no config\.json; give"):
        read_checkpoint("org/name-GGUF")


def test_a_download_that_breaks_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object, **__: object) -> None:
        raise RuntimeError("the connection was lost")  # as hf_xet does; proxies raise others

    monkeypatch.setattr("huggingface_hub.snapshot_download", lose)
    with pytest.raises(ConfigError, match="the connection was lost"):
        read_checkpoint("org/name")


def test_a_hub_id_means_one_commit_from_the_start_of_the_service_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads it later, an ingress that is started anew say, has what the replicas have."""
    first, second = "a" * 40, "b" * 40
    hub = tmp_path / "models--org--tiny"
    for commit in (first, second):
        (hub / "snapshots" / commit).mkdir(parents=True)
        read(hub / "snapshots" / commit, {"do_sample": commit == first})
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(first)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = load_config({"model": "org/tiny"})
    (hub / "refs" / "main").write_text(second)
    found = read_checkpoint(load_config(config.model_dump()).pools[0].model)
    assert (found.id, found.path.name, found.source) == ("tiny", first, f"org/tiny@{first}")
    assert read_checkpoint("org/tiny").source == f"org/tiny@{second}"
    assert load_config({"model": "org/tiny@main"}).pools[0].model == f"org/tiny@{second}"
    (hub / "refs" / "main").unlink()  # as on a node that only ever fetched by commit
    with pytest.raises(ConfigError, match="could not be fetched"):
        load_config({"model": "org/tiny"})
    shutil.rmtree(hub / "snapshots" / first)
    assert load_config({"model": "org/tiny"}).pools[0].model == f"org/tiny@{second}"
