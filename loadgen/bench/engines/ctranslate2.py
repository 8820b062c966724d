"""CTranslate2: static batches, on the model as its own converter makes it, in float32."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import ctranslate2  # type: ignore[import-not-found, unused-ignore]
from ctranslate2.converters import (  # type: ignore[import-not-found, unused-ignore]
    TransformersConverter,
)

from loadgen.bench.engines.base import Generation
from loadgen.bench.engines.workloads import Request, Workload
from quadriga.files import cache_folder


class CTranslate2Peer:
    """Batches of `concurrency` requests in order; each runs until its longest is done."""

    name = "ctranslate2"

    def __init__(self, checkpoint: Path, threads: int) -> None:
        folder = _convert(checkpoint)
        self._generator = ctranslate2.Generator(
            str(folder),
            device="cpu",
            compute_type="float32",
            inter_threads=1,
            intra_threads=threads,
        )
        # The generator takes tokens by their text; any text does, as long as it is the one it has.
        self._tokens: list[str] = json.loads((folder / "vocabulary.json").read_text("utf-8"))

    def prepare(self, workloads: list[Workload]) -> None:
        """Nothing to do: there is nothing to compile."""

    def generate(self, workload: Workload) -> Generation:
        """See `Peer.generate`; end tokens are held back by a minimal length."""
        tokens: list[list[int]] = []
        ttft_s: list[float] = []
        started_s = time.perf_counter()
        for begin in range(0, len(workload.requests), workload.concurrency):
            batch = workload.requests[begin : begin + workload.concurrency]
            first_s: list[float] = []

            def note(step: Any, first_s: list[float] = first_s) -> bool:
                if not first_s:
                    first_s.append(time.perf_counter() - started_s)
                return False

            tokens += self._generate_batch(batch, note)
            ttft_s += [first_s[0]] * len(batch)
        return Generation(time.perf_counter() - started_s, ttft_s, tokens)

    def _generate_batch(self, batch: list[Request], note: Any) -> list[list[int]]:
        steps = max(r.max_tokens for r in batch)
        results = self._generator.generate_batch(
            [[self._tokens[i] for i in r.prompt] for r in batch],
            beam_size=1,
            sampling_topk=1,
            min_length=steps,
            max_length=steps,
            include_prompt_in_result=False,
            callback=note,
        )
        return [
            list(result.sequences_ids[0][: request.max_tokens])
            for result, request in zip(results, batch, strict=True)
        ]


def _convert(checkpoint: Path) -> Path:
    """Convert the checkpoint into the user's cache, once per content of its configuration."""
    digest = hashlib.sha256(str(checkpoint.resolve()).encode())
    digest.update((checkpoint / "config.json").read_bytes())
    digest.update(str((checkpoint / "model.safetensors").stat().st_mtime_ns).encode())
    folder = cache_folder() / "ctranslate2" / digest.hexdigest()[:16]
    if (folder / "model.bin").is_file():
        return folder
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    TransformersConverter(str(checkpoint)).convert(str(folder), quantization="float32", force=True)
    # The loader takes no null, and our prompts are whole: any token stands for those that lack.
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    settings |= {k: settings["eos_token"] for k in ("bos_token", "unk_token") if not settings[k]}
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    return folder
