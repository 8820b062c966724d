"""Choose how sure an exit has to be, on prompts that it did not learn from.

For every token of the held-back answers it is known what each exit says, how sure it is, and what
the full depth makes of it. Tokens leave at the first exit that is sure enough. The thresholds are
the lowest at which what the user gives up stays within a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from quadriga.checkpoint.exits import NEVER, Criterion
from quadriga.engine.kv_cache import Ints
from quadriga.engine.model_runner import NativeRunner
from quadriga.tune.states import StateStore

Measure = Literal["changed", "loss"]
Floats = npt.NDArray[np.float64]
_TOKENS_AT_ONCE = 512
_STEPS = 40
_SUREST = 1 - 1e-6
"""The greatest threshold that can be passed."""
_FEWEST = 20
"""Tokens that must leave at an exit before what is seen there is believed."""


@dataclass(frozen=True, slots=True)
class QualityBudget:
    """What may be given up.

    Attributes:
        measure: `changed`: the share of all tokens that are not those of full depth; `loss`: the
            log-likelihood under full depth that is lost, in nats a token.
        amount: Of it, at most.
    """

    measure: Measure
    amount: float


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What each exit says of n tokens.

    Attributes:
        depths: Layers run at each exit.
        confidence: [exits, n].
        changed: bool [exits, n], its token is not the one of full depth.
        lost: [exits, n], log-likelihood under full depth of its best token less that of the exit's.
    """

    depths: tuple[int, ...]
    confidence: Floats
    changed: npt.NDArray[np.bool_]
    lost: Floats

    def part(self, which: Ints | npt.NDArray[np.bool_]) -> Verdicts:
        """Those of some tokens."""
        return Verdicts(
            self.depths, self.confidence[:, which], self.changed[:, which], self.lost[:, which]
        )

    def only(self, depths: Sequence[int]) -> Verdicts:
        """Those of some exits."""
        rows = [self.depths.index(k) for k in depths]
        return Verdicts(tuple(depths), self.confidence[rows], self.changed[rows], self.lost[rows])


@torch.inference_mode()
def judge(
    store: StateStore,
    which: Ints,
    runner: NativeRunner,
    criterion: Criterion = "top",
    advance: Callable[[int], object] = lambda _: None,
) -> Verdicts:
    """Ask a model's exits about some tokens of the store.

    Args:
        store: Of states at the runner's exits.
        advance: Called with the number of tokens done.
    """
    depths = store.depths[:-1]
    full, count = store.depths[-1], len(which)
    confidence = np.zeros((len(depths), count))
    changed = np.zeros((len(depths), count), dtype=bool)
    lost = np.zeros((len(depths), count))
    decoder, weights = runner.model.fastest(), runner.weights

    def log_probs(depth: int, some: slice) -> torch.Tensor:
        states = store.states(depth, which[some]).to(weights.device, weights.dtype)
        return decoder.logits(states, depth).float().cpu().log_softmax(-1)

    for start in range(0, count, _TOKENS_AT_ONCE):
        some = slice(start, min(count, start + _TOKENS_AT_ONCE))
        wanted = log_probs(full, some)
        best = wanted.max(-1)
        for row, depth in enumerate(depths):
            top = log_probs(depth, some).topk(2, dim=-1)
            probs, said = top.values.exp(), top.indices[:, 0]
            sure = probs[:, 0] - (probs[:, 1] if criterion == "margin" else 0.0)
            confidence[row, some] = sure.double().numpy()
            changed[row, some] = (said != best.indices).numpy()
            lost[row, some] = (best.values - wanted.gather(1, said[:, None])[:, 0]).numpy()
        advance(some.stop - some.start)
    return Verdicts(depths, confidence, changed, lost)


def choose(verdicts: Verdicts, budget: QualityBudget) -> dict[int, float]:
    """The lowest thresholds that keep the budget, per exit; `NEVER` where none does.

    All exits get the same share of tokens that go wrong among those that leave there: it is raised
    until the budget is spent.
    """
    low, high = 0.0, 1.0 if budget.measure == "changed" else 20.0
    chosen = dict.fromkeys(verdicts.depths, NEVER)
    for _ in range(_STEPS):
        rate = (low + high) / 2
        thresholds = _at_rate(verdicts, budget.measure, rate)
        if outcome(verdicts, thresholds)[budget.measure] <= budget.amount:
            low, chosen = rate, thresholds
        else:
            high = rate
    return chosen


def _at_rate(verdicts: Verdicts, measure: Measure, rate: float) -> dict[int, float]:
    """Per exit the lowest threshold at which those who leave there have at most `rate` of harm."""
    stays = np.ones(verdicts.confidence.shape[1], dtype=bool)
    thresholds: dict[int, float] = {}
    for row, depth in enumerate(verdicts.depths):
        here = np.flatnonzero(stays)
        sure = verdicts.confidence[row, here]
        harm = (verdicts.changed if measure == "changed" else verdicts.lost)[row, here]
        order = np.argsort(-sure, kind="stable")
        means = np.cumsum(harm[order], dtype=np.float64) / np.arange(1, len(order) + 1)
        fitting = np.flatnonzero(means <= rate)
        fitting = fitting[fitting >= _FEWEST - 1]
        threshold = NEVER
        if fitting.size:
            threshold = min(float(sure[order[fitting[-1]]]), _SUREST)
        thresholds[depth] = threshold
        if threshold < NEVER:
            stays[here[sure >= threshold]] = False
    return thresholds


def outcome(verdicts: Verdicts, thresholds: Mapping[int, float]) -> dict[str, Any]:
    """What becomes of tokens at some thresholds.

    Returns:
        `tokens`; `early`: share that leaves before the end; `at`: share by exit; `agreement`: share
        of the early ones that are those of full depth; `changed`: share of all that are not;
        `loss`: log-likelihood lost, in nats a token.
    """
    count = verdicts.confidence.shape[1]
    stays = np.ones(count, dtype=bool)
    at: dict[int, float] = {}
    changed = lost = 0.0
    for row, depth in enumerate(verdicts.depths):
        threshold = thresholds.get(depth, NEVER)
        leaves = stays & (verdicts.confidence[row] >= threshold) & (threshold < NEVER)
        at[depth] = float(leaves.mean()) if count else 0.0
        changed += float(verdicts.changed[row, leaves].sum())
        lost += float(verdicts.lost[row, leaves].sum())
        stays &= ~leaves
    early = float(1 - stays.mean()) if count else 0.0
    return {
        "tokens": count,
        "early": early,
        "at": at,
        "agreement": 1 - changed / (early * count) if early else 1.0,
        "changed": changed / max(1, count),
        "loss": lost / max(1, count),
    }
