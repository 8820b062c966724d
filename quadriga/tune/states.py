"""The hidden states of answers at exits, streamed through disk.

One pass over prompt and answer gives the state that makes each token, at every exit and at the end.
They are written as they come, so memory does not grow with the text, and a run that ends in the
middle goes on with the next batch.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from quadriga.checkpoint.json_files import GARBLED, read_object
from quadriga.engine.kv_cache import Ints
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.models.layers import TokenSpan
from quadriga.errors import ConfigError
from quadriga.files import write_atomically
from quadriga.tune.answers import OwnAnswer

TOP = 32
"""Candidates of the full depth that are kept for each token."""
TOKENS_PER_PASS = 1024
_ANSWERS_AT_ONCE = 64
_PROGRESS = "states.json"


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Tokens of one pass.

    Attributes:
        owners: Index of each token's sequence, int64 [T].
        positions: In its sequence, int64 [T].
        states: Layers run → [T, hidden], as they left the last of them; 0 is the embedding.
    """

    owners: Ints
    positions: Ints
    states: dict[int, torch.Tensor]


@torch.inference_mode()
def run_passes(
    runner: NativeRunner,
    sequences: Sequence[Sequence[int]],
    depths: Sequence[int],
    *,
    tokens_per_pass: int = TOKENS_PER_PASS,
) -> Iterator[SeenTokens]:
    """Run sequences at full depth, several in a pass, and show their states at some depths.

    Args:
        runner: With no sequence in any of its rows.
        depths: Layers run, ascending.
    """
    batch: list[tuple[int, int]] = []  # (index of the sequence, first position)
    size = 0
    for index, ids in enumerate(sequences):
        if len(ids) > tokens_per_pass:
            for start in range(0, len(ids), tokens_per_pass):
                yield _one_pass(runner, sequences, [(index, start)], depths, tokens_per_pass)
            runner.model.cache.release(0)
            continue
        if batch and (size + len(ids) > tokens_per_pass or len(batch) == runner.num_rows):
            yield _one_pass(runner, sequences, batch, depths, tokens_per_pass)
            for row in range(len(batch)):
                runner.model.cache.release(row)
            batch, size = [], 0
        batch.append((index, 0))
        size += len(ids)
    if batch:
        yield _one_pass(runner, sequences, batch, depths, tokens_per_pass)
    for row in range(len(batch)):
        runner.model.cache.release(row)


def _one_pass(
    runner: NativeRunner,
    sequences: Sequence[Sequence[int]],
    batch: Sequence[tuple[int, int]],
    depths: Sequence[int],
    tokens_per_pass: int,
) -> SeenTokens:
    spans: list[TokenSpan] = []
    token_ids: list[int] = []
    owners: list[Ints] = []
    for row, (index, start) in enumerate(batch):
        ids = sequences[index][start : start + tokens_per_pass]
        spans.append(TokenSpan(row, len(token_ids), len(token_ids) + len(ids), start))
        token_ids.extend(ids)
        owners.append(np.full(len(ids), index, dtype=np.int64))
    decoder = runner.model.fastest()
    plan = decoder.plan(spans)
    x, at = decoder.embed(token_ids, plan), 0
    states: dict[int, torch.Tensor] = {}
    for depth in depths:
        if depth > at:
            x = decoder.run_layers(x, plan, at, depth)
        at = depth
        states[depth] = x.clone()  # the compiled decoder goes on in place
    positions = np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in spans])
    return SeenTokens(np.concatenate(owners), positions, states)


class StateStore:
    """What is kept of each token of the answers, in files of its folder.

    Args:
        depths: Layers run, ascending; the last is the full depth.
        top: Candidates of the full depth to keep for each token; 0 for none.

    Attributes:
        depths: Layers run at each exit, the full depth last.
        num_tokens: Stored so far.
        owners: Index of each token's answer, int32 [num_tokens].
        generated: Tokens of the answer before it, int32 [num_tokens].
        top_ids: Best tokens of the full depth, int32 [num_tokens, TOP].
        top_logprobs: Theirs, float32 [num_tokens, TOP].
    """

    def __init__(
        self, folder: Path, hidden_size: int, depths: Sequence[int], top: int = TOP
    ) -> None:
        self.folder = folder
        self.depths = tuple(depths)
        self._hidden = hidden_size
        self._top = top
        self._next = self.num_tokens = 0
        self._read_answers = ""
        folder.mkdir(parents=True, exist_ok=True)
        progress = folder / _PROGRESS
        if progress.is_file():
            said = json.loads(progress.read_text())
            if said["depths"] != list(self.depths) or said["hidden"] != hidden_size:
                raise ConfigError(
                    f"--out: {folder} holds states of exits {said['depths']}, this run wants "
                    f"{list(self.depths)}; name another folder, or remove it",
                    param="out",
                )
            self.num_tokens, self._next = said["tokens"], said["answers"]
            self._read_answers = said.get("read", "")

    @classmethod
    def open(cls, folder: Path) -> StateStore:
        """What an earlier run stored, to be read.

        Raises:
            ConfigError: There is nothing, or what is there is no store.
        """
        said = read_object(folder / _PROGRESS)
        try:
            return cls(folder, int(said["hidden"]), [int(k) for k in said["depths"]])
        except GARBLED as exc:
            raise ConfigError(f"{folder / _PROGRESS} lacks {exc}", param="work") from exc

    def _parts(self) -> dict[str, tuple[type[np.generic], int]]:
        """File name → what a token has in it."""
        parts: dict[str, tuple[type[np.generic], int]] = {
            "owners": (np.int32, 1),
            "generated": (np.int32, 1),
        }
        if self._top:
            parts["top_ids"] = (np.int32, self._top)
            parts["top_logprobs"] = (np.float32, self._top)
        return parts | {f"depth-{k}": (np.float16, self._hidden) for k in self.depths}

    def _map(self, name: str) -> npt.NDArray[np.generic]:
        kind, width = self._parts()[name]
        if not self.num_tokens:
            return np.zeros((0, width), dtype=kind)
        return np.memmap(self.folder / name, dtype=kind, mode="r", shape=(self.num_tokens, width))

    @property
    def owners(self) -> npt.NDArray[np.generic]:
        return self._map("owners")[:, 0]

    @property
    def generated(self) -> npt.NDArray[np.generic]:
        return self._map("generated")[:, 0]

    @property
    def top_ids(self) -> npt.NDArray[np.generic]:
        return self._map("top_ids")

    @property
    def top_logprobs(self) -> npt.NDArray[np.generic]:
        return self._map("top_logprobs")

    def states(self, depth: int, which: Ints | slice) -> torch.Tensor:
        """Some tokens' states at an exit: float32 [n, hidden]."""
        return torch.from_numpy(np.array(self._map(f"depth-{depth}")[which], dtype=np.float32))

    def at(self, depths: Sequence[int]) -> StateStore:
        """The same tokens at fewer exits, to be read."""
        view = copy.copy(self)
        view.depths = tuple(depths)
        return view

    @torch.inference_mode()
    def fill(
        self,
        runner: NativeRunner,
        answers: Sequence[OwnAnswer],
        advance: Callable[[int], object],
    ) -> None:
        """Run all answers that are not stored yet; all of them where those stored are others.

        Args:
            advance: Called with the number of answers done.
        """
        if _chained("", answers[: self._next]) != self._read_answers:
            self._next, self.num_tokens, self._read_answers = 0, 0, ""
        advance(self._next)
        parts = self._parts()
        for name, (kind, width) in parts.items():  # what a run left that ended in the middle
            with (self.folder / name).open("ab") as file:
                file.truncate(self.num_tokens * width * np.dtype(kind).itemsize)
        while self._next < len(answers):
            some = answers[self._next : self._next + _ANSWERS_AT_ONCE]
            count = 0
            for found in self._read(runner, some):
                count += len(found["owners"])
                for name, values in found.items():
                    kind, _ = parts[name]
                    with (self.folder / name).open("ab") as file:
                        file.write(np.ascontiguousarray(values, dtype=kind).tobytes())
            self.num_tokens += count
            self._next += len(some)
            self._read_answers = _chained(self._read_answers, some)
            said = {"depths": list(self.depths), "hidden": self._hidden}
            said |= {"tokens": self.num_tokens, "answers": self._next, "read": self._read_answers}
            write_atomically(self.folder / _PROGRESS, json.dumps(said).encode())
            advance(len(some))

    def _read(
        self, runner: NativeRunner, answers: Sequence[OwnAnswer]
    ) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
        sequences = [answer.token_ids for answer in answers]
        begins = np.array([len(answer.prompt_ids) - 1 for answer in answers])
        for seen in run_passes(runner, sequences, self.depths):
            generated = seen.positions - begins[seen.owners]
            keep = np.flatnonzero(generated >= 0)
            if not keep.size:
                continue
            at = torch.from_numpy(keep).to(seen.states[self.depths[-1]].device)
            states = {k: x.index_select(0, at) for k, x in seen.states.items()}
            limit = float(np.finfo(np.float16).max)
            found: dict[str, npt.NDArray[np.generic]] = {
                "owners": seen.owners[keep] + self._next,
                "generated": generated[keep],
            }
            if self._top:
                logits = runner.model.decoder.logits(states[self.depths[-1]], self.depths[-1])
                top = logits.log_softmax(-1).topk(self._top)
                found["top_ids"] = top.indices.cpu().numpy()
                found["top_logprobs"] = top.values.float().cpu().numpy()
            for k, x in states.items():
                found[f"depth-{k}"] = x.float().clamp(-limit, limit).half().cpu().numpy()
            yield found


def _chained(before: str, answers: Sequence[OwnAnswer]) -> str:
    """A hash of answers, their order included, behind those of a hash."""
    for answer in answers:
        before = hashlib.sha256(f"{before}{answer.token_ids}".encode()).hexdigest()
    return before
