"""`exits.json`: what it may say, and an error that names the file and the fault for all else."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from quadriga.checkpoint.exits import (
    DEFAULT_THRESHOLD,
    EXITS_FILE,
    NEVER,
    ExitCounters,
    ExitParams,
    ExitSpec,
    read_exit_params,
    read_exits,
)
from quadriga.errors import ConfigError


def write(path: Path, data: Any) -> Path:
    (path / EXITS_FILE).write_text(json.dumps(data), encoding="utf-8")
    return path


def test_no_file_is_no_exits(tmp_path: Path) -> None:
    assert read_exits(tmp_path, 8) == ExitSpec()
    assert ExitSpec().layers == ()


def test_what_is_not_said_has_its_default(tmp_path: Path) -> None:
    assert read_exits(write(tmp_path, {}), 8) == ExitSpec()
    spec = read_exits(write(tmp_path, {"layers": [2]}), 8)
    assert spec == ExitSpec((2,), "shared", "top", DEFAULT_THRESHOLD)


def test_everything_said(tmp_path: Path) -> None:
    about = {"layers": [5, 2, 5], "kind": "head", "criterion": "margin", "threshold": 0}
    spec = read_exits(write(tmp_path, about), 8)
    assert spec == ExitSpec((2, 5), "head", "margin", 0.0)
    assert type(spec.threshold) is float


def test_all_layers(tmp_path: Path) -> None:
    assert read_exits(write(tmp_path, {"layers": "all"}), 4).layers == (1, 2, 3)
    assert read_exits(write(tmp_path, {"layers": "all"}), 1).layers == ()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ([], "JSON object"),
        ("all", "JSON object"),
        ({"layers": [0]}, "[0]"),
        ({"layers": [8]}, "1..7"),
        ({"layers": [-1]}, "[-1]"),
        ({"layers": [2.0]}, "[2.0]"),
        ({"layers": [True]}, "[True]"),
        ({"layers": ["2"]}, "['2']"),
        ({"layers": "some"}, "'some'"),
        ({"layers": 3}, "3"),
        ({"layers": None}, "None"),
        ({"layers": {"2": 1}}, "{'2': 1}"),
        ({"kind": "own"}, "shared, norm, mlp, head"),
        ({"kind": None}, "kind None"),
        ({"kind": ["head"]}, "kind ['head']"),
        ({"criterion": "entropy"}, "margin, top"),
        ({"criterion": {}}, "criterion {}"),
        ({"threshold": 1.01}, "0..1"),
        ({"threshold": -0.1}, "-0.1"),
        ({"threshold": "0.9"}, "'0.9'"),
        ({"threshold": True}, "True"),
        ({"threshold": None}, "None"),
        ({"threshold": float("nan")}, "nan"),
        ({"has_norm": 1}, "has_norm 1"),
        ({"own_head": "yes"}, "own_head 'yes'"),
        ({"sure_from": {"8": 0.5}}, "1 to 7"),
        ({"sure_from": {"x": 0.5}}, "1 to 7"),
        ({"sure_from": [0.5]}, "sure_from [0.5]"),
        ({"sure_from": {"2": 0}}, "sure_from 0"),
        ({"sure_from": {"2": 1.5}}, "sure_from 1.5"),
        ({"calibrated_at": 1.5}, "calibrated_at 1.5"),
        ({"calibrated_at": 0}, "0..1, and above 0"),
        ({"layers": [2], "treshold": 0.5}, "'treshold'; its fields are layers, kind, criterion, t"),
        ({"mode": "bounded"}, "'mode'"),
    ],
)
def test_faults_are_named(tmp_path: Path, data: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_exits(write(tmp_path, data), 8)
    assert named in str(caught.value) and EXITS_FILE in str(caught.value)
    assert caught.value.param == "model"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{'layers': [1]}"])
def test_files_that_are_not_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / EXITS_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_exits(tmp_path, 8)


def test_cut_keeps_the_exits_above_a_depth() -> None:
    spec = ExitSpec((2, 4, 6), "norm", "margin", 0.5)
    assert spec.cut(8) == spec
    assert spec.cut(6) == ExitSpec((2, 4), "norm", "margin", 0.5), "the last layer is its own exit"
    assert spec.cut(5).layers == (2, 4)
    assert spec.cut(1).layers == ()


def test_a_request_that_says_nothing_gets_the_full_model() -> None:
    assert ExitParams().threshold == NEVER == 1.0
    assert ExitParams().policy == "strict"


def test_a_snapshot_of_counters_stays_as_it_is() -> None:
    counters = ExitCounters(tokens={2: 1})
    snapshot = counters.copy()
    counters.tokens[2] += 1
    counters.splits += 1
    assert (snapshot.tokens, snapshot.splits) == ({2: 1}, 0)


@pytest.mark.parametrize("value", [-1, 65, 1.5, "4", True])
def test_replay_newest_is_a_small_whole_number(tmp_path: Path, value: object) -> None:
    write(tmp_path, {"layers": [2], "replay_newest": value})
    with pytest.raises(ConfigError, match=r"replay_newest .* whole number in 0\.\.64"):
        read_exits(tmp_path, 4)


def test_replay_newest_is_read(tmp_path: Path) -> None:
    write(tmp_path, {"layers": [2], "replay_newest": 5})
    assert read_exits(tmp_path, 4).replay_newest == 5


def test_requests_that_ask_for_the_same_share_one_object_in_every_process() -> None:
    exits = ExitSpec((2,))
    one, other = (read_exit_params(None, exits, "m", depth=4, full=4) for _ in range(2))
    assert one is other and one.policy == "lossless"
    here = pickle.loads(pickle.dumps(one, 5))
    assert here is pickle.loads(pickle.dumps(one, 5)) is one
    strict = ExitParams(0.5, "strict", 3, 0.02)
    assert pickle.loads(pickle.dumps(strict)) == strict
