"""What may import what; checked by the import rules and by looking at a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

PURE = [
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
    "loadgen.paper.ares.experiment",
]


def loaded_by(*modules: str) -> list[set[str]]:
    """Top-level packages in a fresh interpreter after importing each module in turn."""
    look = "print(*{m.split('.')[0] for m in sys.modules})"
    code = "\n".join(["import sys", *(f"import {module}\n{look}" for module in modules)])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in run.stdout.splitlines()]


def test_pure_packages_load_neither_torch_nor_ray() -> None:
    loaded = dict(zip(PURE, loaded_by(*PURE), strict=True))
    assert not [module for module in PURE if loaded[module] & {"torch", "ray"}]


def test_importing_the_package_loads_nothing() -> None:
    package, llm = loaded_by("quadriga", "quadriga.llm")
    assert not package & {"torch", "ray", "pydantic", "numpy", "transformers"}
    assert not llm & {"torch", "ray"}


def test_actors_load_nothing_of_the_ingress() -> None:
    """`ray.serve` with what it needs, and `transformers`, take a second or more of each process."""
    modules = ["actors.controller.controller", "actors.scheduler.scheduler"]
    modules += ["actors.replica.mixed", "actors.replica.prefill"]
    loaded = loaded_by(*modules)[-1]
    assert "ray" in loaded
    assert not loaded & {"torch", "transformers", "fastapi", "starlette", "grpc", "scipy"}
    engine = loaded_by("quadriga.engine.model_runner")[0]
    assert "torch" in engine and not engine & {"transformers", "scipy", "fastapi"}
