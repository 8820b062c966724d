"""Write a Hugging Face checkpoint folder from a GGUF file, a few megabytes at a time.

Weights stay what they are: float32, float16 and bfloat16 are copied, and so are the blocks that
the engine computes with (`stored_forms`). Other quantised values are written as float32, which is
what they are defined in; bfloat16 would halve the disk and lose the half of their digits. A plain
folder has float32 in the place of all blocks, so that anybody can read it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError
from quadriga.gguf.header import GgufHeader, read_gguf
from quadriga.gguf.model_config import GgufModel, hugging_face_config, read_model
from quadriga.gguf.tensors import TensorCopy, frequency_factors, plan_tensors, read_pieces
from quadriga.gguf.tokenizer import Vocabulary, read_vocabulary

WEIGHTS = "model.safetensors"
SPARE_BYTES = 64 << 20
"""Left free on the disk."""
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class Conversion:
    """One GGUF file, looked through, and ready to be written.

    Args:
        keeps_blocks: Write matrices in blocks as they are; else as float32.

    Attributes:
        num_bytes: Of the weights to write.

    Raises:
        ConfigError: The file cannot be served; see `header`, `model_config`, `tensors` and
            `tokenizer`.
    """

    def __init__(self, file: Path, *, keeps_blocks: bool = True) -> None:
        self.file = file
        self._header: GgufHeader = read_gguf(file)
        self._model: GgufModel = read_model(self._header)
        self._tensors: list[TensorCopy] = plan_tensors(self._model, keeps_blocks=keeps_blocks)
        self._frequencies = frequency_factors(self._model)
        self._vocabulary: Vocabulary = read_vocabulary(self._header, self._model.vocab_size)
        self._config = hugging_face_config(self._model, self._frequencies, **self._token_ids())
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors)

    @property
    def num_tensors(self) -> int:
        return len(self._tensors)

    def write(
        self,
        folder: Path,
        sha256: str,
        advance: Callable[[int], object],
        option: str = "engine.cache_dir",
    ) -> None:
        """Write all files into an empty folder.

        Args:
            sha256: Of the GGUF file; it becomes part of the checkpoint's fingerprint.
            advance: Called with the number of bytes of weights that were written.
            option: By which the user named the folder, or may name another.

        Raises:
            ConfigError: The disk is too small, or the file's weights are damaged.
            OSError: A file cannot be read or written.
        """
        free = shutil.disk_usage(folder).free
        if free < self.num_bytes + SPARE_BYTES:
            raise ConfigError(
                f"{option}: {self.file.name} takes {self.num_bytes:,} bytes in {folder.parent}, "
                f"{free:,} are free there; make room or name a folder on another disk",
                param=option,
            )
        for name, content in self._vocabulary.files.items():
            _write(folder / name, content)
        _write(folder / "config.json", json.dumps(self._config, indent=2))
        _write(folder / "generation_config.json", json.dumps(self._generation(), indent=2))
        self._write_weights(folder / WEIGHTS, sha256, advance)

    def _write_weights(self, path: Path, sha256: str, advance: Callable[[int], object]) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", "gguf_sha256": sha256}}
        end = 0
        for tensor in self._tensors:
            start, end = end, end + tensor.num_bytes
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        head = json.dumps(entries, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)  # tensors begin at a multiple of eight bytes
        with self.file.open("rb") as source, path.open("wb") as target:
            target.write(len(head).to_bytes(8, "little") + head)
            for tensor in self._tensors:
                for piece in read_pieces(self._header, tensor, source):
                    target.write(piece)
                    advance(len(piece))
            target.flush()
            os.fsync(target.fileno())

    def _token_ids(self) -> dict[str, Any]:
        ends = list(self._vocabulary.end_ids)
        ids = {
            "bos_token_id": self._vocabulary.bos_id,
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "pad_token_id": self._vocabulary.pad_id,
        }
        return {name: value for name, value in ids.items() if value is not None}

    def _generation(self) -> dict[str, Any]:
        """How its maker recommends to sample; without that, greedily."""
        header = self._header
        said = header.metadata
        off = {key for key, value in said.items() if isinstance(value, (int, float)) and value <= 0}
        sampling: dict[str, Any] = {
            name: header.number(key, most=100.0)
            for key, name in _SAMPLING.items()
            if key in said and key not in off
        }
        key = "general.sampling.top_k"
        if key in said and key not in off:
            sampling["top_k"] = header.integer(key, most=1 << 30)
        is_greedy = "general.sampling.temp" in off
        if set(sampling) - {"repetition_penalty"} and not is_greedy:
            sampling["do_sample"] = True
        return self._token_ids() | sampling


def _write(path: Path, content: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
