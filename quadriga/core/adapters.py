"""A LoRA adapter, as replicas and ingresses know it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quadriga.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a model.

    Attributes:
        path: Its folder, on every node that runs a replica of the model.
        scale: What B · A · x is multiplied with.
        digest: Hash of its files; replicas refuse others.
        num_bytes: Of its matrices in float32, as they are stacked in memory.
    """

    name: str
    path: Path
    rank: int
    scale: float
    digest: str
    num_bytes: int


def find_adapter(adapters: tuple[Adapter, ...], name: str, *, param: str = "model") -> int:
    """The place of an adapter, −1 for none (an empty name).

    Args:
        param: The field that names it, for the error.

    Raises:
        UnknownModel: There is no such adapter.
    """
    if not name:
        return -1
    for index, adapter in enumerate(adapters):
        if adapter.name == name:
            return index
    known = ", ".join(adapter.name for adapter in adapters) or "none"
    raise UnknownModel(
        f"{param}: adapter {name!r:.140} is not loaded here; loaded: {known:.500}", param=param
    )
