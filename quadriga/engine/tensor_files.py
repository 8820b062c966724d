"""A checkpoint's tensors, read by name and checked on the way.

They are looked up in `model.safetensors`, or in the shards that `model.safetensors.index.json`
lists; only the tensors asked for are read. Pickled checkpoints are never opened: loading one runs
code from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quadriga.engine.memory import Arena, DeviceArena
from quadriga.engine.shared_memory import SharedArena, SharedParts, is_supported
from quadriga.errors import ConfigError
from quadriga.json_files import GARBLED, read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CPU = torch.device("cpu")


class TensorFiles:
    """The safetensors files of one checkpoint, opened on demand; a context manager.

    Tensors go to `device` one by one: the host holds one of them at a time.

    Args:
        dtype: Of the tensors in memory.
        single_file: Where they are, unless the checkpoint has an index of shards.
        shared_in: Registry of the parts that this machine's processes share; None shares nothing.

    Raises:
        ConfigError: No safetensors, a shard is missing or damaged.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        single_file: str = SINGLE_FILE,
        device: torch.device = CPU,
        shared_in: Path | None = None,
    ) -> None:
        self._path = path
        self._dtype = dtype
        self._arena: Arena | SharedArena | DeviceArena = (
            Arena() if device.type == "cpu" else DeviceArena(device)
        )
        self._open: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        if single_file == SINGLE_FILE and (path / INDEX_FILE).is_file():
            self._names = _read_index(path / INDEX_FILE)
        elif (path / single_file).is_file():
            self._names = dict.fromkeys(self._file(single_file).keys(), single_file)
        else:
            raise ConfigError(
                f"model: {path} holds no {single_file} and no {INDEX_FILE}; pickled weights are "
                "not loaded, save the model with safe_serialization=True",
                param="model",
            )
        self._parts: SharedParts | None = None
        if shared_in is not None and device.type == "cpu" and is_supported():
            names = {single_file, *self._names.values()}
            files = [path / name for name in names if (path / name).is_file()]
            self._parts = SharedParts(shared_in, files, dtype)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @contextmanager
    def part(self, name: str, num_bytes: int) -> Iterator[None]:
        """Put what is read inside into memory of its own, which goes when those tensors go.

        With a registry, that memory is one copy for all processes of this machine.

        Args:
            name: Of this part of the model, unique within the files.
            num_bytes: About as much as it will take.
        """
        before = self._arena
        with ExitStack() as stack:
            if self._parts is not None:
                self._arena = stack.enter_context(self._parts.part(name, num_bytes))
            elif isinstance(before, Arena):
                self._arena = Arena(num_bytes)
            try:
                yield
            finally:
                self._arena = before

    def into(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor into `target`, converting its dtype.

        Raises:
            ConfigError: It is absent, has another shape, is not a float tensor, or holds something
                that is not a finite number of the engine's dtype.
        """
        stored = self._stored(name)
        if stored.shape != target.shape:
            raise ConfigError(
                f"model: tensor {name} has shape {list(stored.shape)}, the configuration says "
                f"{list(target.shape)}",
                param="model",
            )
        target.copy_(stored)
        # On the host, and without a copy of the tensor: NaN is both its least and its greatest.
        seen = target if target.device.type == "cpu" else stored
        if not torch.isfinite(torch.stack(seen.aminmax())).all():
            raise ConfigError(
                f"model: tensor {name} of {self._path} holds NaN or infinity as {seen.dtype}; the "
                "checkpoint is damaged, or needs a wider engine.dtype",
                param="model",
            )

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy of a tensor in the engine's dtype. Raises: ConfigError as `into`."""
        target = self._arena.take(shape, self._dtype)
        if not self._arena.is_filled:
            self.into(name, target)
        return target

    def stack(self, names: list[str], sizes: list[int], *rest: int) -> torch.Tensor:
        """Read several tensors into one, along the first dimension, without a second copy."""
        target = self._arena.take((sum(sizes), *rest), self._dtype)
        if self._arena.is_filled:
            return target
        start = 0
        for name, size in zip(names, sizes, strict=True):
            self.into(name, target[start : start + size])
            start += size
        return target

    def _stored(self, name: str) -> torch.Tensor:
        file = self._names.get(name)
        if file is None:
            raise ConfigError(
                f"model: {self._path} has no tensor {name}; the checkpoint does not fit its "
                "config.json",
                param="model",
            )
        try:
            tensor: torch.Tensor = self._file(file).get_tensor(name)
        except SafetensorError as exc:
            raise ConfigError(
                f"model: {self._path / file} does not hold {name}: {exc}", param="model"
            ) from exc
        if not tensor.is_floating_point():
            raise ConfigError(
                f"model: tensor {name} is {tensor.dtype}; only float weights are loaded",
                param="model",
            )
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(str(self._path / name), framework="pt")
            except (SafetensorError, OSError) as exc:
                raise ConfigError(
                    f"model: {self._path / name} cannot be read: {exc}", param="model"
                ) from exc
        return self._open[name]


def _read_index(file: Path) -> dict[str, str]:
    index = read_object(file)
    try:
        names = {str(k): str(v) for k, v in index["weight_map"].items()}
    except GARBLED as exc:
        raise ConfigError(f"model: {file} is not a weight index: {exc}", param="model") from exc
    for shard in sorted(set(names.values())):
        if Path(shard).name != shard:
            raise ConfigError(f"model: {file} points outside its folder: {shard!r}", param="model")
    return names
