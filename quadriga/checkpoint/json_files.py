"""Read JSON files of a checkpoint: whatever they hold, it is an object or a `ConfigError`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError

MAX_BYTES = 256 << 20
"""Tokenizers are the largest by far, with some tens of megabytes."""
GARBLED = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading fields out of a well-formed object of the wrong content raises."""


def read_limited(file: Path) -> bytes:
    """Return what is in a file. Raises: ConfigError: It cannot be read, or is too large."""
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                f"model: {file} has {size} bytes, above the limit of {MAX_BYTES}", param="model"
            )
        return file.read_bytes()
    except OSError as exc:
        raise ConfigError(f"model: {file} cannot be read: {exc}", param="model") from exc


def find_array(text: str, field: str) -> tuple[list[Any], int, int]:
    """A field's array in a text of JSON that may be cut off behind it, and where the array is.

    Raises: ValueError, RecursionError.
    """
    begin = text.index("[", text.index(f'"{field}"'))
    found, end = json.JSONDecoder().raw_decode(text, begin)
    return found, begin, end


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        ConfigError: It cannot be read, is too large, is no JSON, or no object.
    """
    try:
        value = json.loads(read_limited(file).decode())
    except ValueError as exc:
        raise ConfigError(f"model: {file} cannot be read: {exc}", param="model") from exc
    except RecursionError as exc:
        raise ConfigError(f"model: {file} is nested too deeply", param="model") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"model: {file} must hold a JSON object", param="model")
    return value
