"""llama.cpp: one batch of all sequences a step, through `llama-cpp-python`.

It reads a GGUF file, and its own quantiser makes the form that is asked for: Q8_0 for int8. For
`auto` it reads the file as it is.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from loadgen.bench.engines.base import GeneratedTokens
from loadgen.bench.engines.workloads import Workload, WorkloadRequest
from quadriga.files import cache_folder

FILE_TYPES = {"float32": 0, "float16": 1, "int8": 7, "bfloat16": 32}
"""`llama_ftype`, by the form of the weights."""
BATCH_TOKENS = 512


@dataclass(slots=True)
class _Running:
    """A request under way, in the KV cache of sequence `slot`."""

    index: int
    slot: int
    request: WorkloadRequest
    tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0

    def next_tokens(self, room: int) -> list[int]:
        """What the next step computes of it, `room` tokens at most."""
        if self.num_prompt < len(self.request.prompt):
            return self.request.prompt[self.num_prompt : self.num_prompt + room]
        return self.tokens[-1:]

    @property
    def num_kept(self) -> int:
        """Tokens in the KV cache."""
        return self.num_prompt + max(0, len(self.tokens) - 1)


class LlamaCppPeer:
    """Continuous batching by hand: whoever has room computes prompts beside others' tokens."""

    name = "llama.cpp"

    def __init__(self, checkpoint: Path, threads: int, weights: str = "auto") -> None:
        llama_cpp.llama_backend_init()
        file = checkpoint if weights == "auto" else _requantised(checkpoint, weights, threads)
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not read {file}")
        self._threads = threads
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: ctypes.c_void_p | None = None
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def prepare(self, workloads: list[Workload]) -> None:
        """Reserve KV for the widest and longest of the workloads."""
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = max(w.concurrency for w in workloads)
        params.n_ctx = sum(max(w.longest for w in workloads) + 32 for _ in range(params.n_seq_max))
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp has no memory for the KV cache")

    def generate(self, workload: Workload) -> GeneratedTokens:
        """See `Peer.generate`."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        ttft_s = [0.0] * len(workload.requests)
        tokens: list[list[int]] = [[] for _ in workload.requests]
        waiting = deque(enumerate(workload.requests))
        free, running = list(range(workload.concurrency)), list[_Running]()
        started_s = time.perf_counter()
        while waiting or running:
            while waiting and free:
                index, request = waiting.popleft()
                running.append(_Running(index, free.pop(), request))
            said = self._step(running)
            now_s = time.perf_counter() - started_s
            for one, token in said:
                one.tokens.append(token)
                ttft_s[one.index] = ttft_s[one.index] or now_s
                if len(one.tokens) == one.request.max_tokens:
                    tokens[one.index] = one.tokens
                    llama_cpp.llama_memory_seq_rm(memory, one.slot, -1, -1)
                    free.append(one.slot)
                    running.remove(one)
        return GeneratedTokens(time.perf_counter() - started_s, ttft_s, tokens)

    def _step(self, running: list[_Running]) -> list[tuple[_Running, int]]:
        """One pass; the next token of everybody whose prompt is done."""
        batch, count = self._batch, 0
        speaking: list[tuple[_Running, int]] = []
        for one in running:
            first = one.num_kept
            some = one.next_tokens(BATCH_TOKENS - count - len(running))
            is_prompt = one.num_prompt < len(one.request.prompt)
            for offset, token in enumerate(some):
                batch.token[count] = token
                batch.pos[count] = first + offset
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = one.slot
                batch.logits[count] = False
                count += 1
            if is_prompt:
                one.num_prompt += len(some)
            if some and one.num_prompt == len(one.request.prompt):
                batch.logits[count - 1] = True
                speaking.append((one, count - 1))
        batch.n_tokens = count
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp refused a batch")
        return [(one, self._best(at)) for one, at in speaking]

    def _best(self, at: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, at)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


def _requantised(file: Path, weights: str, threads: int) -> Path:
    """The file in another form, in the user's cache."""
    state = file.stat()
    name = f"{file.resolve()}:{state.st_size}:{state.st_mtime_ns}:{weights}"
    target = cache_folder() / "llama.cpp" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.gguf"
    if target.is_file():
        return target
    target.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = FILE_TYPES[weights], threads, True
    partial = target.with_suffix(".partial")
    source, to = str(file).encode(), str(partial).encode()
    if llama_cpp.llama_model_quantize(source, to, ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp does not quantise {file} to {weights}")
    return partial.rename(target)
