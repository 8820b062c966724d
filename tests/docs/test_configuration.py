"""docs/configuration.md is current, complete, and right about what a change does."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from deploy import config_reference
from deploy.config_reference import ENVIRONMENT, Row, rows, section
from loadgen.bench.adapters import write_adapter
from quadriga.checkpoint.folder import ASSETS
from quadriga.checkpoint.tuned import TUNE_FILE, weights_hash
from quadriga.config.engine import PoolConfig
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.control.replica_names import fingerprint
from quadriga.errors import ConfigError
from tests.equivalence.models import build

ROOT = Path(__file__).parents[2]


def tuned_folder() -> str:
    """A folder of heads for the default model of the tests, with none in it."""
    folder = Path(tempfile.mkdtemp(prefix="tuned-"))
    (folder / TUNE_FILE).write_text(json.dumps({"weights": weights_hash(ASSETS / "quadriga-s")}))
    return str(folder)


def adapters_folder() -> str:
    """A folder with an adapter, which nothing is loaded of here."""
    path = Path(tempfile.mkdtemp(prefix="adapters-"))
    return str(write_adapter(path / "mine", build("llama")).parent)


HARDWARE = Hardware(num_cpus=64, num_gpus=64)
ROWS = [*rows(QuadrigaConfig), *rows(PoolConfig)]
KEYS = {row.key: row for row in ROWS}
OTHER_VALUES: dict[str, Any] = {
    "model": "quadriga-l",
    "exits.layers": "none",
    "exits.folder": tuned_folder(),
    "adapters": adapters_folder(),
    "exits.mode": "bounded",
    "prefill_labels": {"zone": "a"},
    "decode_labels": {"zone": "a"},
    "mixed_labels": {"zone": "a"},
    "prefill_replicas": 2,
    "decode_replicas": 3,
    "mixed_replicas": 2,
    "ingress.cors_origins": ["https://app.example"],
    "auth.api_keys": ["alice sha256:" + "0" * 64],
    "helios.models": ["quadriga-s"],
    "helios.enabled": True,
    "engine.max_model_len": 512,
    "prefill.chunk_tokens": 64,
    "decode.max_slots": 16,
    "engine.kv_memory_bytes": 1 << 28,
    "engine.resources_cpus": 2,
    "engine.resources_gpus": 0.5,
    "exits.threshold": 0.5,
    "exits.replay_newest": 1,
    "scheduler.ares.bandwidth_bytes_per_s": 1e9,
    "transport.kind": "gloo",
    "runner": "baton",
    "exits.skipped_kv": "project",
}


def field_of(key: str) -> FieldInfo:
    model: Any = PoolConfig if key.split(".")[0] in PoolConfig.model_fields else QuadrigaConfig
    *parents, name = key.split(".")
    for parent in parents:
        model = section(model.model_fields[parent])
    found: FieldInfo = model.model_fields[name]
    return found


def another(key: str) -> Any:
    """A value that is not the default, and legal."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    field = field_of(key)
    if get_origin(field.annotation) is Literal:
        return next(v for v in get_args(field.annotation) if v not in ("auto", field.default))
    match field.default:
        case bool():
            return not field.default
        case int():
            return field.default + 1 if field.default < 4 else field.default // 2
        case float():
            return field.default / 2 or 0.5
        case str():
            return f"{field.default}1"
        case _:
            return 2 if "number" in KEYS[key].kind else "x"


ON_CPUS = ("engine.weights", "engine.tensor_parallel", "adapters")
ELSEWHERE: dict[str, dict[str, Any]] = {name: {"engine.device": "cpu"} for name in ON_CPUS}
ELSEWHERE["mixed_labels"] = {"mixed_replicas": 1}
ELSEWHERE["helios.scaling.enabled"] = {"helios.enabled": True}
"""Settings that are refused, or change nothing, on the hardware here, and where they are not."""


def fingerprints(settings: dict[str, Any]) -> set[str]:
    config = load_config(settings)
    plain = config.model_dump(mode="json")
    return {fingerprint(spec, plain) for spec in resolve(config, HARDWARE).replicas}


def test_the_page_is_current() -> None:
    text = config_reference.PAGE.read_text(encoding="utf-8")
    assert text == config_reference.markdown(), "run `python deploy/config_reference.py`"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_each_key_is_described(row: Row) -> None:
    assert row.text.endswith("."), f"{row.key} ends without a full stop"
    assert "|" not in row.text
    assert row.default
    assert row.kind


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_a_change_replaces_replicas_where_the_page_says_so(row: Row) -> None:
    where = ELSEWHERE.get(row.key, {})
    before = fingerprints(where)
    after = fingerprints(where | {row.key: another(row.key)})
    assert (after != before) is row.replaces


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_a_command_line_can_say_what_the_page_says_it_can(row: Row) -> None:
    value = another(row.key)
    if row.is_yaml_only:
        with pytest.raises(ConfigError, match=re.escape(row.key.rpartition(".")[2])):
            load_config({row.key: "a"})
        return
    typed = str(value).lower() if isinstance(value, bool) else str(value)
    where = ELSEWHERE.get(row.key, {})
    said, meant = load_config(where | {row.key: typed}), load_config(where | {row.key: value})
    assert said == meant != load_config(where)


def test_every_variable_is_listed() -> None:
    folders = [ROOT / name for name in ("quadriga", "actors", "serve_app", "helm")]
    files = [p for folder in folders for p in folder.rglob("*") if p.suffix in (".py", ".tpl")]
    read = {
        name
        for path in files
        for name in re.findall(r"\bQUADRIGA_[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    assert read == set(ENVIRONMENT)
