"""Train a checkpoint's length heads on what the model really generates.

Answers are the model's own; one more pass over prompt and answer gives the states that the service
would see (`StateStore`). Requests, not samples, are split into training, validation and test, so
that no request is on both sides.

Source: ARES: 70/15/15 by request, AdamW, early stopping after 10 epochs without gain. Ours: every
token is a sample, not every 20th, as the service asks at any; log(1 + remaining) as scale, a mean
and quantiles as targets, an MLP scaled to the model's width, one head per exit.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quadriga.checkpoint.length_heads import (
    LENGTH_FILE,
    LENGTH_WEIGHTS,
    LengthHeadSpec,
    counts_of,
    to_json,
)
from quadriga.engine.early_exit.length_head import Layers, run_layers, to_tokens
from quadriga.files import write_atomically
from quadriga.tune.answers import OwnAnswer
from quadriga.tune.folder import save_halves
from quadriga.tune.states import StateStore

QUANTILES = (0.1, 0.5, 0.9)
MEDIAN = 1 + QUANTILES.index(0.5)
"""Among a head's outputs."""
SPLIT = (0.70, 0.15, 0.15)
MAX_NEW_TOKENS = 700
WIDTHS = (1 / 4, 1 / 8)  # of the model's width
DROPOUT = 0.1
PATIENCE = 10
MAX_EPOCHS = 200
BATCH = 512
EPOCH = 100_000
"""Samples that an epoch draws, at most."""
LEAST_SPREAD = 1e-3
"""Deviation over mean of an input that is read: fp16 keeps hardly any finer differences."""
AT_ONCE = 4096
"""Samples whose states are in memory at a time."""


@dataclass(slots=True)
class LengthData:
    """States, which stay on disk until they are read, and what came after them.

    Attributes:
        depths: Layers run at each exit, the full depth last.
        states: Layers run and tokens of the store → [n, hidden], as they left the last layer.
        which: int64 [num_samples], the samples' tokens of the store.
        generated: int64 [num_samples], tokens generated before the one this state makes.
        remaining: int64 [num_samples], tokens generated after it, the end token included.
        prompt_lengths: int64 [num_samples].
        requests: int64 [num_samples], index of the request.
        token_ids: Per request, prompt and answer; what an auxiliary model would read.
        ids: Per request, its prompt's.
        counts: [num_samples, NUM_COUNTS], where the samples stand.
    """

    depths: tuple[int, ...]
    states: Callable[[int, npt.NDArray[np.int64]], Tensor]
    which: npt.NDArray[np.int64]
    generated: Tensor
    remaining: Tensor
    prompt_lengths: Tensor
    requests: Tensor
    token_ids: list[tuple[list[int], list[int]]]
    ids: list[str]
    counts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        stands = zip(self.prompt_lengths.tolist(), self.generated.tolist(), strict=True)
        self.counts = torch.tensor([counts_of(*where) for where in stands])

    def inputs(self, exit_index: int, samples: Tensor) -> Tensor:
        """What the head of an exit reads of some samples: [n, hidden + NUM_COUNTS]."""
        states = self.states(self.depths[exit_index], self.which[samples.numpy()])
        return torch.cat((states, self.counts[samples]), dim=1)

    def split(self, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sample indices of training, validation and test; requests are never divided."""
        num_requests = len(self.token_ids)
        order = torch.randperm(num_requests, generator=torch.Generator().manual_seed(seed))
        part = torch.empty(num_requests, dtype=torch.long)
        first = round(SPLIT[0] * num_requests)
        second = first + round(SPLIT[1] * num_requests)
        part[order[:first]], part[order[first:second]], part[order[second:]] = 0, 1, 2
        of_sample = part[self.requests]
        train, validation, test = (torch.nonzero(of_sample == i).flatten() for i in range(3))
        return train, validation, test


def gather(store: StateStore, answers: Sequence[OwnAnswer]) -> LengthData:
    """Samples of answers whose states are in a store: one for each token of theirs.

    A few tokens of each answer would not do: in lists and sentences of one form every 20th is often
    of the same kind, and a head that has seen no other errs twice as much on all of them.

    Args:
        answers: Those that the store was filled with.
    """
    owner = torch.from_numpy(store.owners.astype(np.int64))
    stands = torch.from_numpy(store.generated.astype(np.int64))
    lengths = torch.tensor([len(answer.answer_ids) for answer in answers])
    return LengthData(
        depths=store.depths,
        states=store.states,
        which=np.arange(store.num_tokens),
        generated=stands,
        remaining=lengths[owner] - 1 - stands,
        prompt_lengths=torch.tensor([len(answer.prompt_ids) for answer in answers])[owner],
        requests=owner,
        token_ids=[(answer.prompt_ids, answer.answer_ids) for answer in answers],
        ids=[answer.id for answer in answers],
    )


def train_heads(
    data: LengthData,
    *,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
    parts: tuple[Tensor, Tensor, Tensor] | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[LengthHeadSpec, dict[str, Tensor], dict[str, Any]]:
    """Train one head per exit.

    Args:
        parts: Samples of training, validation and test; None: as `LengthData.split` draws them.
        advance: Called with the number of epochs done, of `MAX_EPOCHS` a head.

    Returns:
        What to store: the spec, the tensors by name; and the figures on the test part.
    """
    train, validation, test = parts or data.split(seed=seed)
    tensors: dict[str, Tensor] = {}
    figures: dict[str, Any] = {}
    num_layers = len(WIDTHS) + 1
    for index, depth in enumerate(data.depths):
        read = partial(data.inputs, index)
        head = train_head(read, data.remaining, train, validation, seed=seed, advance=advance)
        for i, (weight, bias) in enumerate(head):
            tensors |= {f"length.{depth}.{i}.weight": weight, f"length.{depth}.{i}.bias": bias}
        outputs = apply_at(data, index, test, head)
        figures[str(depth)] = measure(outputs, data.generated[test], data.remaining[test])
        figures[str(depth)]["mae_of_median"] = _mae_of_median(data, train, test)
        report(
            f"behind {depth} layers: MAE {figures[str(depth)]['mae']:.2f} tokens on the test part"
        )
    spec = LengthHeadSpec(data.depths, num_layers, QUANTILES, has_counts=True)
    return spec, tensors, figures


def _mae_of_median(data: LengthData, train: Tensor, test: Tensor) -> float:
    """Of who knows nothing but the median length of the answers, and how far each has come."""
    totals = data.remaining[train[data.generated[train] == 0]].float()
    said = (totals.median() - data.generated[test]).clamp(min=0.0)
    return round(float((said - data.remaining[test]).abs().mean()), 4)


@torch.no_grad()
def apply_at(data: LengthData, index: int, samples: Tensor, head: Layers) -> Tensor:
    """What the head behind one exit says of some samples: tokens, [n, 1 + quantiles]."""
    parts = torch.split(samples, AT_ONCE)
    return to_tokens(torch.cat([run_layers(head, data.inputs(index, some)) for some in parts]))


def train_head(
    read: Callable[[Tensor], Tensor],
    remaining: Tensor,
    train: Tensor,
    validation: Tensor,
    *,
    seed: int,
    advance: Callable[[int], object] = lambda _: None,
) -> Layers:
    """Train one MLP [hidden → 1 + quantiles]; returns its layers, rounded to what is stored.

    The inputs' mean and deviation are folded into the first layer; an input that never varied is
    not read. At most `AT_ONCE` inputs are in memory at a time.

    Args:
        read: Samples → their inputs [n, hidden].
        remaining: Of all samples.
        train, validation: Samples.
        advance: Called with the number of epochs done; where it ends before the last, with those
            that are left as well.
    """
    torch.manual_seed(seed)
    target = torch.log1p(remaining.float())
    mean, scale = _spread(read, train)
    sizes = [len(mean), *(max(16, round(len(mean) * w)) for w in WIDTHS), 1 + len(QUANTILES)]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    modules = [m for layer in layers for m in (layer, nn.ReLU(), nn.Dropout(DROPOUT))][:-2]
    network = nn.Sequential(*modules)
    with torch.no_grad():
        layers[-1].bias.fill_(float(target[train].mean()))
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-2)

    def loss_on(samples: Tensor) -> Tensor:
        return loss_of(network((read(samples) - mean) * scale), target[samples])

    validation = validation[torch.randperm(len(validation))[:EPOCH]]
    best, best_loss, since, epochs = _copy(layers), float("inf"), 0, 0
    while epochs < MAX_EPOCHS and since < PATIENCE:
        network.train()
        for chosen in torch.split(train[torch.randperm(len(train))[:EPOCH]], BATCH):
            loss = loss_on(chosen)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        network.eval()
        with torch.no_grad():
            losses = [len(some) * float(loss_on(some)) for some in torch.split(validation, AT_ONCE)]
        val_loss = sum(losses) / len(validation)
        since += 1
        if val_loss < best_loss:
            best, best_loss, since = _copy(layers), val_loss, 0
        elif since >= PATIENCE // 2:  # twice before giving up: a smaller step may still gain
            for group in optimizer.param_groups:
                group["lr"] = max(1e-4, 0.5 * group["lr"])
        epochs += 1
        advance(1)
    advance(MAX_EPOCHS - epochs)
    (weight, bias), *others = best
    weight = (weight * scale).half().float()
    head = _rounded([(weight, bias - weight @ mean), *others])
    outputs = torch.cat([run_layers(head, read(some)) for some in torch.split(validation, AT_ONCE)])
    return _rounded(calibrated(head, outputs, target[validation]))


def _spread(read: Callable[[Tensor], Tensor], samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the inputs, and one over their deviation; 0 where an input hardly varies."""
    total: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    for some in torch.split(samples, AT_ONCE):
        x = read(some).double()
        total, squares = total + x.sum(0), squares + x.square().sum(0)
    mean = torch.as_tensor(total) / len(samples)
    variance = (torch.as_tensor(squares) - len(samples) * mean.square()) / max(1, len(samples) - 1)
    deviation = variance.clamp(min=0.0).sqrt()
    varies = deviation > LEAST_SPREAD * mean.abs() + 1e-4
    return mean.float(), torch.where(varies, 1.0 / deviation, 0.0).float()


def _rounded(layers: Layers) -> Layers:
    """As they come back from the file."""
    return [(weight.half().float(), bias.half().float()) for weight, bias in layers]


def calibrated(head: Layers, outputs: Tensor, target: Tensor) -> Layers:
    """Shift the quantiles so that each has its share of these truths, log(1 + tokens), below it.

    What was fitted is surer of itself than it should be on requests it has not seen.

    Args:
        outputs: What the head says of them, raw.
    """
    weight, bias = head[-1]
    bias = bias.clone()
    for i, level in enumerate(QUANTILES, 1):
        bias[i] += torch.quantile(target - outputs[:, i], level)
    return [*head[:-1], (weight, bias)]


def _copy(layers: list[nn.Linear]) -> Layers:
    return [(layer.weight.detach().clone(), layer.bias.detach().clone()) for layer in layers]


def loss_of(outputs: Tensor, target: Tensor) -> Tensor:
    """Pinball loss of the quantiles and Gamma deviance of the mean, on log(1 + tokens)."""
    mean = outputs[:, 0].clamp(-1.0, 12.0)
    # y/μ + log μ is least, in expectation, where μ is the mean of y, however skewed y is.
    deviance = torch.exp((target - mean).clamp(max=6.0)) + mean - target - 1.0
    levels = torch.tensor(QUANTILES)
    error = target[:, None] - outputs[:, 1:]
    pinball = torch.maximum(levels * error, (levels - 1.0) * error)
    return pinball.sum(1).mean() + 0.2 * deviance.mean()


def measure(outputs: Tensor, generated: Tensor, remaining: Tensor) -> dict[str, Any]:
    """What a head's outputs [n, 1 + quantiles] are worth.

    Returns:
        `mae` of the median, in tokens; `bias` of the mean; `mae_by_generated`: (from, to, samples,
        MAE) by tokens generated; `mae_by_quarter`: MAE while each quarter of the answer is
        generated, None where there is no sample; `calibration`: (level, share of truths at or below
        it).
    """
    truth = remaining.float()
    median = outputs[:, MEDIAN]
    error = (median - truth).abs()
    edges = [0, 1, 21, 61, 121, 241, 481, 1 + max([MAX_NEW_TOKENS, *generated.tolist()])]
    by_generated = []
    for first, stop in itertools.pairwise(edges):
        inside = (generated >= first) & (generated < stop)
        if bool(inside.any()):
            by_generated.append(
                [first, stop - 1, int(inside.sum()), round(float(error[inside].mean()), 3)]
            )
    quarter = 4 * generated // (generated + remaining + 1)
    return {
        "samples": len(truth),
        "mae": round(float(error.mean()), 4),
        "bias": round(float((outputs[:, 0] - truth).mean()), 4),
        "mean_remaining": round(float(truth.mean()), 3),
        "mae_by_generated": by_generated,
        "mae_by_quarter": [
            round(float(error[quarter == q].mean()), 2) if bool((quarter == q).any()) else None
            for q in range(4)
        ],
        "calibration": [
            [level, round(float((truth <= outputs[:, 1 + i] + 0.5).float().mean()), 4)]
            for i, level in enumerate(QUANTILES)
        ],
    }


def save_heads(folder: Path, spec: LengthHeadSpec, tensors: dict[str, Tensor]) -> None:
    """Store the heads beside a checkpoint's weights, in fp16; each file is replaced as a whole."""
    save_halves(folder / LENGTH_WEIGHTS, tensors)
    write_atomically(folder / LENGTH_FILE, (json.dumps(to_json(spec), indent=2) + "\n").encode())
