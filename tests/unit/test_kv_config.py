"""`transport.kind`, and where KV that is read from a row lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from quadriga.config.loader import load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.errors import ConfigError
from tests.unit.test_config import checkpoint

__all__ = ["checkpoint"]

CPU = Hardware(num_cpus=8)
GPU = Hardware(num_cpus=8, num_gpus=8)


@pytest.mark.parametrize(
    ("kind", "hardware", "expected"),
    [
        ("auto", GPU, False),
        ("nccl", GPU, False),
        ("gloo", GPU, True),
        ("object_store", GPU, True),
        ("auto", CPU, True),
        ("gloo", CPU, True),
    ],
)
def test_kv_stays_on_the_gpu_where_it_may_go_by_nccl(
    checkpoint: Path, kind: str, hardware: Hardware, expected: bool
) -> None:
    config = load_config({"model": str(checkpoint), "transport.kind": kind})
    assert {r.engine.host_copies for r in resolve(config, hardware).replicas} == {expected}


def test_nccl_without_gpus_is_refused(checkpoint: Path) -> None:
    config = load_config({"model": str(checkpoint), "transport.kind": "nccl"})
    with pytest.raises(ConfigError, match="moves KV between GPUs") as refusal:
        resolve(config, CPU)
    assert refusal.value.param == "transport.kind"


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transport\.kind"):
        load_config({"transport.kind": "carrier pigeon"})
