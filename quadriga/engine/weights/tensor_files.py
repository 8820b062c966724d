"""A checkpoint's tensors, read by name and checked on the way.

They are looked up in `model.safetensors`, or in the shards that `model.safetensors.index.json`
lists; only the tensors asked for are read. Pickled checkpoints are never opened: loading one runs
code from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from quadriga.catalogue.headers import INDEX_FILE, SINGLE_FILE, read_index
from quadriga.checkpoint.folder import Checkpoint
from quadriga.checkpoint.quantisation import read_quantisation
from quadriga.checkpoint.stored_forms import split_name
from quadriga.engine.memory import Arena, DeviceArena
from quadriga.engine.weights.checkpoint_weights import ModelWeights
from quadriga.engine.weights.matrix import FORM_OF_DTYPE, Form, Matrix, MatrixForm
from quadriga.engine.weights.quantised import QuantisedTensors
from quadriga.engine.weights.shared_memory import SharedArena, SharedParts, is_supported
from quadriga.errors import ConfigError
from quadriga.observability.load_progress import LOADING

if TYPE_CHECKING:
    from quadriga.engine.weights.shards import Shard

CPU = torch.device("cpu")
logger = logging.getLogger(__name__)
_KEPT = {"F32": Form.FLOAT32, "BF16": Form.BFLOAT16, "F16": Form.FLOAT16}
"""Types of numbers that are kept, by their names in the files."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A checkpoint's folder, and how its tensors come into memory.

    Attributes:
        dtype: Of what is computed; norms and biases become it, and matrices that keep no form.
        device: Where tensors go, one by one.
        shared_in: Registry of the parts that this machine's processes share; None shares nothing.
        form: Of the matrices. `stored`: as the files have them, where there is a `Form` for it;
            `dtype`: as numbers of that type. What a named form does not take is of that type, too.
        heads_path: Where exits and maps are, if elsewhere.
        shard: The part that is read; None reads all.
    """

    path: Path
    dtype: torch.dtype
    device: torch.device = CPU
    shared_in: Path | None = None
    form: MatrixForm = "dtype"
    heads_path: Path | None = None
    shard: Shard | None = None

    @classmethod
    def beside(
        cls, weights: ModelWeights, checkpoint: Checkpoint, shared_in: Path | None
    ) -> WeightSource:
        """More of a model that is loaded already."""
        return cls(
            checkpoint.path,
            weights.dtype,
            weights.device,
            shared_in,
            weights.form,
            checkpoint.heads_path,
        )

    @property
    def heads(self) -> WeightSource:
        """The same for the files of exits and maps."""
        return self if self.heads_path is None else replace(self, path=self.heads_path)

    def open(self, single_file: str = SINGLE_FILE) -> TensorFiles:
        """Open its tensors. Raises: ConfigError as `TensorFiles`."""
        return TensorFiles(self, single_file)


class TensorFiles:
    """The safetensors files of one checkpoint, opened on demand; a context manager.

    The host holds one tensor at a time of those that go to another device.

    Args:
        single_file: Where they are, unless the checkpoint has an index of shards instead.

    Raises:
        ConfigError: No safetensors, a shard is missing or damaged.
    """

    def __init__(self, source: WeightSource, single_file: str = SINGLE_FILE) -> None:
        path, device = source.path, source.device
        self.source = source
        self._path = path
        self.dtype = source.dtype
        self._arena: Arena | SharedArena | DeviceArena = (
            Arena() if device.type == "cpu" else DeviceArena(device)
        )
        self._open: dict[str, Any] = {}
        stored: dict[str, str] = {}
        if (path / single_file).is_file():
            stored = dict.fromkeys(self._file(single_file).keys(), single_file)
        elif single_file == SINGLE_FILE and (path / INDEX_FILE).is_file():
            stored = read_index(path / INDEX_FILE)
        else:
            raise ConfigError(
                f"model: {path} holds no {single_file} and no {INDEX_FILE}; pickled weights are "
                "not loaded, save the model with safe_serialization=True",
                param="model",
            )
        self._places = {split_name(name)[0]: (name, file) for name, file in stored.items()}
        how = read_quantisation(path) if single_file == SINGLE_FILE else None
        self._quantised: QuantisedTensors | None = None
        if how is not None:
            self._quantised = QuantisedTensors(how, path, self._places, self._tensor)
        self._parts: SharedParts | None = None
        if source.shared_in is not None and device.type == "cpu" and is_supported():
            names = {single_file, "config.json", *stored.values()}
            files = [path / name for name in names if (path / name).is_file()]
            form = f"{source.dtype}, {source.form}"
            if source.shard is not None:
                form += f", {source.shard}"
            self._parts = SharedParts(source.shared_in, files, form)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._places

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
        LOADING.add(num_bytes)

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix of numbers. Raises: ConfigError: It is absent, or none."""
        stored, file = self._place(name)
        try:
            shape = tuple(self._file(file).get_slice(stored).get_shape())
        except SafetensorError as exc:
            raise self._unreadable(name, file, exc) from exc
        if len(shape) != 2 or split_name(stored)[1] is not None:
            raise self._misfit(name, ["rows", "columns"], f"shape {list(shape)}")
        return shape[0], shape[1]

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy of a tensor of numbers in the engine's dtype.

        Raises:
            ConfigError: It is absent, has another shape, is not a float tensor, or holds something
                that is not a finite number of the engine's dtype.
        """
        target = self._arena.take(shape, self.dtype)
        if not self._arena.is_filled:
            self._numbers_into(name, target)
        return target

    def join(self, names: list[str], sizes: list[int]) -> torch.Tensor:
        """Read several vectors into one, one behind the other. Raises: ConfigError as `read`."""
        target = self._arena.take((sum(sizes),), self.dtype)
        if not self._arena.is_filled:
            for name, part in zip(names, torch.split(target, sizes), strict=True):
                self._numbers_into(name, part)
        return target

    def check_tied(self, head: str, embedding: str) -> None:
        """Raises: ConfigError: There is a head, and it is not the embedding."""
        if head in self and not torch.equal(self._stored(head), self._stored(embedding)):
            raise ConfigError(
                f"model: {self._path / 'config.json'} has tie_word_embeddings true, and {head} "
                f"differs from {embedding}; set it to false there to compute with both",
                param="model",
            )

    def matrix(self, name: str, num_rows: int, columns: int, *, parts: int = 0) -> Matrix:
        """Return a copy of a matrix. Raises: ConfigError as `read`.

        Args:
            parts: It is so many of equal size, which are used apart; 0: it is one.
        """
        return self._join_matrices([name], [num_rows], columns, parts)

    def stack(self, names: list[str], sizes: list[int], columns: int) -> Matrix:
        """Read several matrices into one, along the rows, without a second copy.

        Raises:
            ConfigError: As `read`.
        """
        return self._join_matrices(names, sizes, columns, parts=1)

    def _join_matrices(
        self, names: list[str], sizes: list[int], columns: int, parts: int
    ) -> Matrix:
        form = self._form_of(names, sizes, columns, parts)
        width = form.width(columns)
        if width is None:
            raise self._misfit(names[0], [sizes[0], columns], f"blocks of {form.name}")
        rows = self._arena.take((form.stored_rows(sum(sizes)), width), form.dtype)
        whole = Matrix(form, rows, rows.shape[0] - sum(sizes))
        if not self._arena.is_filled:
            first = 0
            for name, size in zip(names, sizes, strict=True):
                self._matrix_into(name, whole[first : first + size])
                first += size
        return whole

    def _form_of(self, names: list[str], sizes: list[int], columns: int, parts: int) -> Form:
        """The form of several matrices that become one."""
        wanted, numbers = self.source.form, FORM_OF_DTYPE[self.dtype]
        if wanted == "dtype":
            return numbers
        if wanted == "stored":
            forms = {self._form(name) for name in names}
            return forms.pop() if len(forms) == 1 else numbers
        if all(wanted.takes(size, columns, parts) for size in sizes):
            return wanted
        logger.info(
            "%s of %s stays %s: its rows %s and columns %d are no whole groups of %s",
            names[0],
            self._path.name,
            numbers.name,
            sizes,
            columns,
            wanted.name,
        )
        return numbers

    def _form(self, name: str) -> Form:
        """The form in which a matrix is stored, or the one that holds its values."""
        if self._quantised is not None and name in self._quantised:
            return FORM_OF_DTYPE[self.dtype]
        stored, file = self._place(name)
        _, block = split_name(stored)
        if block is not None:
            return Form[block.name]
        try:
            dtype = self._file(file).get_slice(stored).get_dtype()
        except SafetensorError as exc:
            raise self._unreadable(name, file, exc) from exc
        return _KEPT.get(dtype, FORM_OF_DTYPE[self.dtype])

    def _matrix_into(self, name: str, target: Matrix) -> None:
        """Read a matrix into rows of the right form. Raises: ConfigError as `read`."""
        is_whole = self._quantised is not None and name in self._quantised
        stored_name = name if is_whole else self._place(name)[0]
        _, block = split_name(stored_name)
        if block is None:
            if target.form.is_interleaved:
                numbers = torch.empty(target.shape, device=target.rows.device)
                self._numbers_into(name, numbers)
                target.fill(numbers)
            else:
                self._numbers_into(name, target.rows)
            return
        rows = self._part_of(name, self._stored(stored_name))
        form = Form[block.name]
        wanted = [target.shape[0], form.width(target.shape[1])]
        if rows.dtype != torch.uint8 or list(rows.shape) != wanted:
            raise self._misfit(name, wanted, f"{rows.dtype} of shape {list(rows.shape)}")
        stored = Matrix(form, rows)
        if not stored.is_finite():
            raise self._not_finite(name, form.name)
        if form is target.form:
            target.rows.copy_(rows)
            return
        numbers = stored.values(torch.float32)
        target.fill(numbers)
        self._check_finite(name, numbers, target.rows.dtype)

    def _numbers_into(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor of numbers into `target`, converting its dtype."""
        stored = self._part_of(name, self._stored(name))
        if not stored.is_floating_point() or stored.itemsize < 2:  # a byte is nothing without scale
            raise ConfigError(
                f"model: tensor {name} is {stored.dtype}, without a scale that its "
                "quantization_config names; only float weights are loaded",
                param="model",
            )
        if stored.shape != target.shape:
            raise self._misfit(name, list(target.shape), f"shape {list(stored.shape)}")
        target.copy_(stored)
        self._check_finite(name, target if target.device.type == "cpu" else stored, target.dtype)

    def _check_finite(self, name: str, seen: torch.Tensor, dtype: torch.dtype) -> None:
        """Raises: ConfigError: NaN, which is both least and greatest, or infinite as `dtype`."""
        if seen.numel() and not torch.isfinite(torch.stack(seen.aminmax()).to(dtype)).all():
            raise self._not_finite(name, str(dtype))

    def _part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this engine holds of a tensor."""
        shard = self.source.shard
        return tensor if shard is None else shard.of(name, tensor)

    def _misfit(self, name: str, wanted: list[Any], found: str) -> ConfigError:
        return ConfigError(
            f"model: tensor {name} has {found}, the configuration says {wanted}", param="model"
        )

    def _not_finite(self, name: str, form: str) -> ConfigError:
        return ConfigError(
            f"model: tensor {name} of {self._path} holds NaN or infinity as {form}; the "
            "checkpoint is damaged, or needs a wider engine.dtype",
            param="model",
        )

    def _place(self, name: str) -> tuple[str, str]:
        """Under which name a tensor is stored, and in which file."""
        place = self._places.get(name)
        if place is None:
            raise ConfigError(
                f"model: {self._path} has no tensor {name}; the checkpoint does not fit its "
                "config.json",
                param="model",
            )
        return place

    def _stored(self, name: str) -> torch.Tensor:
        """A tensor as the file has it; a quantised matrix multiplied out."""
        if self._quantised is not None and name in self._quantised:
            return self._quantised.values(name)
        return self._tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        stored, file = self._place(split_name(name)[0])
        try:
            tensor: torch.Tensor = self._file(file).get_tensor(stored)
        except SafetensorError as exc:
            raise self._unreadable(name, file, exc) from exc
        return tensor

    def _unreadable(self, name: str, file: str, why: SafetensorError) -> ConfigError:
        return ConfigError(f"model: {self._path / file} does not hold {name}: {why}", param="model")

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(str(self._path / name), framework="pt")
            except (SafetensorError, OSError) as exc:
                raise ConfigError(
                    f"model: {self._path / name} cannot be read: {exc}", param="model"
                ) from exc
        return self._open[name]
