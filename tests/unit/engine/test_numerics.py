"""Names of arithmetic: equal where results are equal to the bit, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quadriga.config.loader import load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.engine import load_runner
from tests.equivalence.models import build, make_spec, save


def test_weights_and_code_name_it(tmp_path: Path) -> None:
    save(build("llama"), tmp_path)

    def name(**settings: str) -> str:
        return load_runner(make_spec(tmp_path, **settings)).numerics

    eager, compiled = name(), name(compile="wait")
    assert eager.startswith(f"float32 torch {torch.__version__} ")
    assert compiled.startswith("float32 kernels ")
    assert name(compile="wait", weights="float32") == compiled, "auto rounds nothing"
    code = compiled.removeprefix("float32 ")
    for form in ("float16", "bfloat16", "int8"):
        assert name(compile="wait", weights=form) == f"{form} {code}"
    # The test before has compiled it: what starts eager takes the kernels before its first pass.
    assert name(compile="auto") == compiled


def test_the_relay_batch_has_a_name(tmp_path: Path) -> None:
    save(build("llama"), tmp_path)
    assert load_runner(make_spec(tmp_path, runner="baton")).numerics.startswith("float32 torch ")


@pytest.mark.parametrize(
    ("settings", "compiles"),
    [
        ({}, "auto"),
        ({"deterministic": True}, "wait"),
        ({"deterministic": True, "engine": {"compile": "off"}}, "off"),
    ],
)
def test_kernels_do_not_step_in_where_answers_are_to_be_the_same(
    settings: dict[str, object], compiles: str
) -> None:
    deployment = resolve(load_config({"model": "quadriga-s", **settings}), Hardware(num_cpus=2))
    assert {replica.engine.compile for replica in deployment.replicas} == {compiles}
