"""Read a catalogue from YAML, from a folder of checkpoints, or the bundled one; write one.

version: 1
models:
  - model: quadriga-s            # bundled id, folder or GGUF file (from here on), or hub id
    tokenizer: 3f0c…             # optional: the fingerprint it must have
    depths:
      - {depth: 2, step_s: {1: 0.0006, 8: 0.0019}, accuracy: 0.91, perplexity: 1.08}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quadriga.catalogue.inspection import inspect
from quadriga.catalogue.records import (
    Catalogue,
    CatalogueModel,
    DepthRecord,
    Measurement,
    depth_records,
)
from quadriga.checkpoint.folder import bundled_models, placed
from quadriga.errors import ConfigError
from quadriga.files import write_atomically

BUNDLED = Path(__file__).parent / "bundled.yaml"
CATALOGUE_FILE = "catalogue.yaml"
VERSION = 1
PARAM = "helios.catalogue"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Model(_Strict):
    model: str = Field(min_length=1)
    tokenizer: str | None = None
    depths: tuple[DepthRecord, ...] = ()


class _Measured(_Strict):
    at: str = ""
    machine: str = ""
    commit: str = ""


class _File(_Strict):
    version: int
    measured: _Measured = _Measured()
    models: tuple[_Model, ...] = Field(min_length=1)


def read_catalogue(
    source: str | None = None, *, only: Sequence[str] = (), cache_dir: str | None = None
) -> Catalogue:
    """Read a catalogue and check every model in it.

    Args:
        source: YAML file; folder with a `catalogue.yaml`, or whose subfolders are checkpoints;
            None is the bundled family.
        only: Ids to keep, in this order, which then must share one tokenizer; empty keeps all.
        cache_dir: See `quadriga.checkpoint.folder.locate`.

    Raises:
        ConfigError: Naming file, model and field: see `inspect`; also a depth that is none of
            the model's exits, a tokenizer that is not the one promised, one id twice, or a
            model in `only` that is not there.
    """
    path = BUNDLED if source is None else Path(source).expanduser()
    if path.is_dir() and (path / CATALOGUE_FILE).is_file():
        path = path / CATALOGUE_FILE
    catalogue = _scan(path) if path.is_dir() else _read_yaml(path, cache_dir)
    twice = {i for i in catalogue.ids if catalogue.ids.count(i) > 1}
    if twice:
        raise _error(f"{path}: two models are called {sorted(twice)[0]!r}; rename one folder")
    if only:
        unknown = [model_id for model_id in only if model_id not in catalogue.ids]
        if unknown:
            raise ConfigError(
                f"helios.models: {unknown[0]!r} is not in the catalogue {path}; it has "
                f"{', '.join(catalogue.ids)}",
                param="helios.models",
            )
        models = tuple(catalogue.find(model_id) for model_id in only)
        require_one_tokenizer(models, named_in="helios.models")
        return replace(catalogue, models=models)
    return catalogue


def require_one_tokenizer(models: Iterable[CatalogueModel], *, named_in: str) -> None:
    """Models named to stand in for each other must read the same ids.

    Raises:
        ConfigError: Two of them have different tokenizers or vocabularies.
    """
    first: CatalogueModel | None = None
    for model in models:
        first = first or model
        if (model.tokenizer, model.vocab_size) != (first.tokenizer, first.vocab_size):
            raise ConfigError(
                f"{named_in}: {first.id} and {model.id} have different tokenizers "
                f"({first.tokenizer}, {model.tokenizer}; {first.vocab_size} and "
                f"{model.vocab_size} entries); a request cannot change between them. Name models "
                "of one family, or leave the list empty",
                param=named_in,
            )


def _scan(folder: Path) -> Catalogue:
    found = sorted(p.parent for p in placed(str(folder)).glob("*/config.json"))
    if not found:
        raise _error(
            f"{folder} holds no {CATALOGUE_FILE} and no subfolder with a config.json; give a YAML "
            "file or a folder of Hugging Face checkpoints"
        )
    return Catalogue(tuple(inspect(str(path)) for path in found), str(folder))


def _read_yaml(path: Path, cache_dir: str | None) -> Catalogue:
    try:
        text = path.read_text(encoding="utf-8")
        # A few lines of aliases of aliases would grow beyond any memory.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise _error(f"{path}: YAML aliases (*name) are not read; write the values out")
        data = yaml.safe_load(text)
    except OSError as exc:
        raise _error(f"{path} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise _error(f"{path} is no YAML: {exc}") from exc
    try:
        file = _File.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "(top level)"
        raise _error(f"{path}: {where}: {first['msg']} (got {repr(first['input'])[:80]})") from exc
    if file.version != VERSION:
        raise _error(f"{path}: version {file.version} is not known; this release reads {VERSION}")
    models = tuple(_model(entry, path, cache_dir) for entry in file.models)
    return Catalogue(models, str(path))


def _model(entry: _Model, file: Path, cache_dir: str | None) -> CatalogueModel:
    model = inspect(_resolve(entry.model, file.parent), cache_dir=cache_dir)
    if entry.tokenizer is not None and entry.tokenizer != model.tokenizer:
        raise _error(
            f"{file}: {entry.model}: its tokenizer is {model.tokenizer}, the catalogue promises "
            f"{entry.tokenizer}; the files were exchanged, profile the model again"
        )
    records = entry.depths
    for record in records:
        _check_depth(record.depth, model, file)
    if len({r.depth for r in records}) < len(records):
        raise _error(f"{file}: {entry.model}: a depth is on record twice")
    _check_coverage(records, model, file)
    return replace(model, depths=depth_records(records))


def _resolve(model: str, folder: Path) -> str:
    """A folder or file is meant from the catalogue's own place; other names stay as they are."""
    beside = placed(str(folder / model))
    is_bundled = model in bundled_models()
    return str(beside) if not is_bundled and beside.exists() else model


def _check_depth(depth: int, model: CatalogueModel, file: Path) -> None:
    if depth > model.num_layers:
        raise _error(f"{file}: {model.id}: depth {depth} is beyond its {model.num_layers} layers")
    if depth not in model.exit_depths:
        shown = ", ".join(str(d) for d in model.exit_depths)
        raise _error(f"{file}: {model.id}: depth {depth} is none of its exits ({shown})")


def _check_coverage(records: Sequence[DepthRecord], model: CatalogueModel, file: Path) -> None:
    """Whoever leaves at an exit has left by the next one, and at the last layer all have."""
    before = (0, 0.0)
    for record in depth_records(records):
        if record.coverage is None:
            continue
        if record.coverage < before[1]:
            raise _error(
                f"{file}: {model.id}: coverage falls from {before[1]:g} at depth {before[0]} to "
                f"{record.coverage:g} at {record.depth}; it is the share that left by then"
            )
        if record.depth == model.num_layers and record.coverage < 1.0:
            raise _error(
                f"{file}: {model.id}: coverage {record.coverage:g} at depth {record.depth}, all of "
                "its layers, where it is 1; leave it away there"
            )
        before = (record.depth, record.coverage)


def write_catalogue(
    path: Path, models: Sequence[tuple[str, CatalogueModel]], measured: Measurement
) -> None:
    """Write a catalogue whole or not at all.

    Args:
        models: (name as the file shall say it, model with its records).
    """
    text = yaml.safe_dump(
        {
            "version": VERSION,
            "measured": {"at": measured.at, "machine": measured.machine, "commit": measured.commit},
            "models": [
                {
                    "model": name,
                    "tokenizer": model.tokenizer,
                    "depths": [_written(record) for record in model.depths],
                }
                for name, model in models
            ],
        },
        sort_keys=False,
    )
    write_atomically(path, text.encode())


def _written(record: DepthRecord) -> dict[str, Any]:
    values: dict[str, Any] = {"depth": record.depth}
    if record.step_s:
        values["step_s"] = {batch: float(f"{s:.4g}") for batch, s in record.step_s}
    for name in [f.name for f in fields(record)][2:]:
        value = getattr(record, name)
        if value is not None:
            values[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    return values


def _error(text: str) -> ConfigError:
    return ConfigError(f"catalogue: {text}", param=PARAM)
