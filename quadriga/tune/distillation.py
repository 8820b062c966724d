"""Train exits on what the full depth says: each learns its best tokens, the backbone stays.

The loss at an exit is the cross-entropy of the full depth's best tokens, whose probabilities are
scaled to 1, under the exit's softmax. Where the vocabulary is large, that softmax is estimated
over a shortlist: all that are among the best of any token of the batch, and a random sample of the
others, which stands for all of them.

Source: EE-Tuning (arXiv 2402.00518) for training exits alone on a frozen backbone; distilling the
model's own logits on its own answers, and the shortlist, are ours.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.weights.checkpoint_weights import Head
from quadriga.files import replaced
from quadriga.tune.exit_heads import ExitHead, TunedKind
from quadriga.tune.states import StateStore

STATE_FILE = "exits.pt"
SHORTLIST_FROM = 8192
"""Vocabularies above this are estimated over a shortlist."""
RANDOM_SHARE = 2048
BLOCK_TOKENS = 2048
BLOCKS_MIXED = 16
SAVE_EVERY = 200


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """How exits are trained.

    Attributes:
        width: Of an MLP's bottleneck.
        epochs: Times each token is seen.
        batch_tokens: Tokens of one step.
        rate: Greatest learning rate.
    """

    kind: TunedKind = "mlp"
    width: int = 256
    epochs: float = 3.0
    batch_tokens: int = 512
    rate: float = 2e-3
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


class Distiller:
    """The exits of one model in training.

    Args:
        final: The model's own head.
        which: Tokens of the store to learn from.
        work: Where the state of the training is kept.
    """

    def __init__(
        self,
        store: StateStore,
        which: npt.NDArray[np.int64],
        config: ModelConfig,
        final: Head,
        options: DistillOptions,
        *,
        seed: int,
        work: Path,
    ) -> None:
        torch.manual_seed(seed)
        self._store, self._which, self._options = store, which, options
        self._work, self._seed = work, seed
        self._device = torch.device(options.device)
        self.heads = {
            depth: ExitHead(options.kind, config, final, options.width).to(self._device)
            for depth in store.depths[:-1]
        }
        self._table = final.weight.values(torch.float32).to(self._device)
        parameters = [p for head in self.heads.values() for p in head.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=options.rate, weight_decay=0.01)
        self.step = 0
        self.num_steps = max(1, math.ceil(options.epochs * len(which) / options.batch_tokens))
        self.loss: dict[int, float] = {}
        tokens = hashlib.sha256(which.tobytes())
        tokens.update(np.ascontiguousarray(store.top_ids[:, 0]).tobytes())
        self._asked = asdict(options) | {  # what decides how every step comes out
            "dtype": str(options.dtype),
            "device": None,
            "seed": seed,
            "exits": list(self.heads),
            "tokens": tokens.hexdigest(),
        }

    def run(self, advance: Callable[[int], object]) -> None:
        """Train to the end, going on where an earlier run stopped.

        Args:
            advance: Called with the number of steps done.
        """
        self._resume()
        advance(self.step)
        for step, which in enumerate(itertools.islice(self._batches(), self.num_steps)):
            if step < self.step:
                continue
            self._one_step(which)
            self.step += 1
            advance(1)
            if self.step % SAVE_EVERY == 0 or self.step == self.num_steps:
                self._save()
        for head in self.heads.values():
            head.eval()

    def _batches(self) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens of one step after the other, in an order that the seed alone decides.

        A few blocks of neighbours are read together and mixed: the disk is read in runs.
        """
        size, count = self._options.batch_tokens, len(self._which)
        for epoch in itertools.count():
            rng = np.random.default_rng((self._seed, epoch))
            blocks = rng.permutation(math.ceil(count / BLOCK_TOKENS))
            for first in range(0, len(blocks), BLOCKS_MIXED):
                mixed = rng.permutation(
                    np.concatenate(
                        [
                            np.arange(b * BLOCK_TOKENS, min(count, (b + 1) * BLOCK_TOKENS))
                            for b in blocks[first : first + BLOCKS_MIXED]
                        ]
                    )
                )
                for start in range(0, len(mixed), size):
                    yield np.sort(self._which[mixed[start : start + size]])

    def _one_step(self, which: npt.NDArray[np.int64]) -> None:
        rate = self._rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        ids = torch.from_numpy(np.array(self._store.top_ids[which], dtype=np.int64))
        logprobs = torch.from_numpy(np.array(self._store.top_logprobs[which]))
        ids, logprobs = ids.to(self._device), logprobs.to(self._device)
        wanted = logprobs.softmax(-1)  # of the best tokens alone
        listed, places, weight = shortlist(ids, len(self._table), self._seed + self.step)
        self._optimizer.zero_grad(set_to_none=True)
        table = self._table[listed] if listed is not None else self._table
        for depth, head in self.heads.items():
            x = self._store.states(depth, which).to(self._device)
            with self._products():
                read = head(x)
                rows = table
                if head.head is not None:
                    rows = head.head if listed is None else head.head[listed]
                logits = F.linear(read, rows)
            logits = logits.float()
            if weight is not None:
                logits = logits + weight
            found = logits.log_softmax(-1).gather(1, places)
            loss = -(wanted * found).sum(-1).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self.loss[depth] = float(loss.detach())
        for head in self.heads.values():
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        self._optimizer.step()

    def _products(self) -> AbstractContextManager[object]:
        """Matrix products in the training's type."""
        if self._options.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, self._options.dtype)

    def _rate(self) -> float:
        """Warm-up over a fiftieth, then down by a cosine to a twentieth."""
        share = self.step / self.num_steps
        warm = min(1.0, (self.step + 1) / max(1.0, self.num_steps / 50))
        return self._options.rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))

    def _save(self) -> None:
        state = {
            "asked": self._asked,
            "step": self.step,
            "loss": self.loss,
            "heads": {depth: head.state_dict() for depth, head in self.heads.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        with replaced(self._work / STATE_FILE) as stream:
            torch.save(state, stream)

    def _resume(self) -> None:
        file = self._work / STATE_FILE
        if not file.is_file():
            return
        state = torch.load(file, map_location="cpu", weights_only=True)
        if state.get("asked") != self._asked:
            return  # another training is asked for now: begin anew
        self.step, self.loss = state["step"], state["loss"]
        for depth, head in self.heads.items():
            head.load_state_dict(state["heads"][depth])
        self._optimizer.load_state_dict(state["optimizer"])


def shortlist(ids: Tensor, vocab: int, seed: int) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """The part of the vocabulary over which a batch's softmax is taken.

    Args:
        ids: int64 [n, TOP], the best tokens of each.

    Returns:
        Their ids, None for all; the places of `ids` among them, [n, TOP]; and what is added to
        their logits, so that the random ones stand for all that are not listed.
    """
    if vocab <= SHORTLIST_FROM:
        return None, ids, None
    best, places = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(vocab, generator=generator)[:RANDOM_SHARE].to(ids.device)
    others = drawn[~torch.isin(drawn, best)]
    rest = vocab - len(best)
    weight = torch.zeros(len(best) + len(others), device=ids.device)
    weight[len(best) :] = math.log(max(1, rest) / max(1, len(others)))
    return torch.cat([best, others]), places, weight
