"""What may import what; checked by the import rules and by looking at a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

PURE = [
    "loadgen.paper.ares.experiment",
    "quadriga.scheduling.decode_loop",
    "quadriga.scheduling.output_dispatcher",
    "quadriga.scheduling.prefill_loop",
    "quadriga.policies.admission",
    "quadriga.policies.ares",
    "quadriga.catalogue.files",
    "quadriga.policies.baselines.placement",
    "quadriga.policies.helios",
    "quadriga.policies.helios.history",
    "quadriga.policies.scaling",
    "quadriga.config.resolve",
    "quadriga.sim.cluster",
    "quadriga.sim.recorder",
    "quadriga.text",
    "quadriga.tasks",
]


def loaded_by(module: str) -> set[str]:
    """Top-level packages in a fresh interpreter after importing a module."""
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("module", PURE)
def test_pure_packages_load_neither_torch_nor_ray(module: str) -> None:
    assert not loaded_by(module) & {"torch", "ray"}


def test_the_ingress_loads_no_torch() -> None:
    assert "torch" not in loaded_by("serve_app.app")


def test_importing_the_package_loads_nothing() -> None:
    assert not loaded_by("quadriga") & {"torch", "ray", "pydantic", "numpy", "transformers"}
    assert not loaded_by("quadriga.llm") & {"torch", "ray"}
