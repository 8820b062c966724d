"""Read the header of a GGUF file, and trust none of it.

A file is `magic | version | counts | metadata | tensor table | padding | tensors`, little-endian.
Nothing is mapped or allocated by a number that the file names before that number is checked
against the file's size and the limits below, so reading takes bounded memory and time whatever the
file holds.

Source: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from quadriga.errors import ConfigError

VERSIONS = (2, 3)
MAX_FIELDS = 4096
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 4
MAX_KEY_BYTES = 1024
MAX_TEXT_BYTES = 1 << 24
"""Of one string. Chat templates are the longest by far, with some tens of kilobytes."""
MAX_STRINGS = 1 << 23
"""In all arrays together. The largest vocabularies have a quarter of a million tokens, and twice as
many merges."""
MAX_STRING_BYTES = 1 << 28
"""Of all arrays of strings together."""
MAX_NUMBERS = 1 << 22
"""In one array. Longer ones are refused."""
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""Type number to the format of `struct`; 7 is a truth value, one byte."""


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """An array of numbers in the metadata; unlike numpy's, it compares to a number as unequal."""

    values: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: how it is stored, and where.

    Attributes:
        shape: The slowest dimension first, as in numpy and torch.
        offset: From the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself; every number is within the file and the limits.

    Attributes:
        metadata: Scalars and strings as such, arrays of strings as lists, others as `Numbers`.
        tensors: By name, in the file's order.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Raises: ConfigError, naming the file."""
        refuse(self.file, what, remedy)

    def integer(self, key: str, default: int | None = None, *, most: int) -> int:
        """Return a positive whole number.

        An array of equal numbers, one for each layer, is that number.

        Args:
            default: What an absent field means; None: it must be there.

        Raises: ConfigError: It is absent, no whole number, below 1, or above `most`.
        """
        value = self.metadata.get(key)
        if isinstance(value, Numbers) and len(set(value.values.tolist())) == 1:
            value = value.values[0].item()
        if value is None:
            if default is None:
                self.refuse(f"the field {key} is missing", "convert the model again")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(f"{key} is {_shown(value)}, not one whole number", SUPPORTED)
        if not 1 <= value <= most:
            self.refuse(f"{key} is {value}, outside of 1 to {most}", DAMAGED)
        return value

    def number(self, key: str, default: float | None = None, *, most: float) -> float:
        """Return a positive number. Raises: ConfigError: As for `integer`."""
        value = self.metadata.get(key, default)
        if value is None:
            self.refuse(f"the field {key} is missing", "convert the model again")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(f"{key} is {_shown(value)}, not a number", DAMAGED)
        if not 0 < value <= most:  # NaN as well
            self.refuse(f"{key} is {value}, not above 0 and up to {most:g}", DAMAGED)
        return float(value)

    def text(self, key: str) -> str | None:
        """Return a string; None where the field is absent. Raises: ConfigError: It is none."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(f"{key} is {_shown(value)}, not a string", DAMAGED)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value. Raises: ConfigError: It is something else."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            self.refuse(f"{key} is {_shown(value)}, not true or false", DAMAGED)
        return value


DAMAGED = "the file is damaged, fetch it again"
SUPPORTED = "use another model, or a folder in Hugging Face format"


def read_gguf(file: Path) -> GgufHeader:
    """Read metadata and tensor table, and check that every tensor lies inside of the file.

    Raises:
        ConfigError: The file cannot be read, is no GGUF, was cut short, is of a version or has a
            tensor type that is not known, or breaks a limit; with the field at fault.
    """
    try:
        with file.open("rb") as stream:
            return _HeaderReader(file, stream).read()
    except OSError as exc:
        raise ConfigError(f"model: {file} cannot be read: {exc}", param="model") from exc


def refuse(file: Path, what: str, remedy: str) -> NoReturn:
    """Raises: ConfigError: Naming the file, what is wrong with it, and what to do."""
    raise ConfigError(f"model: {file} cannot be served: {what}; {remedy}", param="model")


class _HeaderReader:
    """One pass over the header; `position` is where the next byte comes from."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self._size = stream.seek(0, 2)
        self._position = 0
        self._num_strings = 0
        self._string_bytes = 0
        stream.seek(0)

    def read(self) -> GgufHeader:
        if self._take(4, "the magic number") != b"GGUF":
            refuse(self._file, "it does not begin with GGUF", "give a GGUF file")
        (version,) = self._unpack("I", "the version")
        if version & 0xFFFF == 0:
            refuse(self._file, "it is in big-endian byte order", "convert it to little-endian")
        if version not in VERSIONS:
            refuse(self._file, f"GGUF version {version} is not 2 or 3", "convert it again")
        num_tensors, num_fields = self._unpack("QQ", "the counts")
        if num_fields > MAX_FIELDS:
            refuse(self._file, f"it has {num_fields} fields, more than {MAX_FIELDS}", DAMAGED)
        if num_tensors > MAX_TENSORS:
            refuse(self._file, f"it has {num_tensors} tensors, more than {MAX_TENSORS}", DAMAGED)
        metadata: dict[str, Any] = {}
        for index in range(num_fields):
            key = self._string(f"the name of field {index}", MAX_KEY_BYTES)
            if key in metadata:
                refuse(self._file, f"the field {_shown(key)} is there twice", DAMAGED)
            (kind,) = self._unpack("I", key)
            metadata[key] = self._value(key, kind)
        header = GgufHeader(self._file, metadata)
        alignment = header.integer("general.alignment", DEFAULT_ALIGNMENT, most=MAX_ALIGNMENT)
        if alignment & (alignment - 1):
            header.refuse(f"general.alignment is {alignment}, no power of two", DAMAGED)
        return GgufHeader(self._file, metadata, self._tensors(num_tensors, alignment))

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key, MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            refuse(self._file, f"{_shown(key)} is of the unknown type {kind}", DAMAGED)
        (value,) = self._unpack(_SCALARS[kind], key)
        if kind == _BOOL:
            if value > 1:
                refuse(self._file, f"{_shown(key)} is {value}, not true or false", DAMAGED)
            return bool(value)
        return value

    def _array(self, key: str) -> Any:
        kind, count = self._unpack("IQ", key)
        if kind == _STRING:
            self._num_strings += count
            if self._num_strings > MAX_STRINGS:
                refuse(
                    self._file,
                    f"{_shown(key)} has {count} strings; all together may be {MAX_STRINGS}",
                    DAMAGED,
                )
            self._check_left(8 * count, key)  # before the list is begun
            strings = []
            for _ in range(count):
                start = self._position
                strings.append(self._string(key, MAX_TEXT_BYTES))
                self._string_bytes += self._position - start - 8
                if self._string_bytes > MAX_STRING_BYTES:
                    refuse(
                        self._file,
                        f"the strings up to {_shown(key)} have more than {MAX_STRING_BYTES} bytes",
                        DAMAGED,
                    )
            return strings
        if kind not in _SCALARS:
            refuse(self._file, f"{_shown(key)} is an array of the type {kind}", DAMAGED)
        if count > MAX_NUMBERS:
            refuse(
                self._file, f"{_shown(key)} has {count} numbers, more than {MAX_NUMBERS}", DAMAGED
            )
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return Numbers(np.frombuffer(self._take(count * dtype.itemsize, key), dtype=dtype))

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorEntry]:
        table = [self._tensor() for _ in range(count)]
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for entry in table:
            if entry.name in tensors:
                refuse(self._file, f"the tensor {_shown(entry.name)} is there twice", DAMAGED)
            tensors[entry.name] = TensorEntry(
                entry.name, entry.shape, entry.kind, start + entry.offset, entry.num_bytes
            )
        end = start
        for entry in sorted(tensors.values(), key=lambda e: e.offset):
            if entry.offset < end:
                refuse(self._file, f"the tensor {_shown(entry.name)} overlaps another", DAMAGED)
            end = entry.offset + entry.num_bytes
            if end > self._size:
                refuse(
                    self._file,
                    f"it was cut short: the tensor {_shown(entry.name)} ends at byte {end}, the "
                    f"file has {self._size}",
                    "fetch it again",
                )
        return tensors

    def _tensor(self) -> TensorEntry:
        name = self._string("a tensor's name", MAX_KEY_BYTES)
        what = f"the entry of tensor {_shown(name)}"
        (num_dimensions,) = self._unpack("I", what)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            refuse(self._file, f"{what} has {num_dimensions} dimensions", DAMAGED)
        shape = tuple(reversed(self._unpack(f"{num_dimensions}Q", what)))
        number, offset = self._unpack("IQ", what)
        try:
            kind = GGMLQuantizationType(number)
            block_values, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            refuse(self._file, f"{what} has the unknown type {number}", "use another quantisation")
        if min(shape) < 1 or shape[-1] % block_values:
            refuse(
                self._file,
                f"{what} has shape {list(shape)}; {kind.name} has rows of a multiple of "
                f"{block_values} values",
                DAMAGED,
            )
        # Python's integers do not overflow; what is too large does not fit into the file.
        num_bytes = math.prod(shape) // block_values * block_bytes
        return TensorEntry(name, shape, kind, offset, num_bytes)

    def _string(self, what: str, most: int) -> str:
        (length,) = self._unpack("Q", what)
        if length > most:
            refuse(
                self._file,
                f"{_shown(what)} is a string of {length} bytes, the limit is {most}",
                DAMAGED,
            )
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as exc:
            refuse(self._file, f"{_shown(what)} is no UTF-8: {exc}", DAMAGED)

    def _unpack(self, form: str, what: str) -> tuple[Any, ...]:
        form = "<" + form
        return struct.unpack(form, self._take(struct.calcsize(form), what))

    def _take(self, count: int, what: str) -> bytes:
        self._check_left(count, what)
        data = self._stream.read(count)
        if len(data) < count:
            raise OSError("it became shorter while it was read")
        self._position += count
        return data

    def _check_left(self, count: int, what: str) -> None:
        if count > self._size - self._position:
            refuse(
                self._file,
                f"it was cut short: {_shown(what)} wants {count} bytes at {self._position}, the "
                f"file has {self._size}",
                "fetch it again",
            )


def _shown(value: Any) -> str:
    """A value from the file as it may stand in a message: short, and without control characters."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else "�" for c in text[:100])
    return text if len(text) < 100 else text[:97] + "…"
