"""The predictors of remaining lengths in `paper ares-predictor`: trained, applied and timed.

What is asked every 20 tokens is shown twice: each answer alone, and averaged with the ones before,
as a decode replica does. The auxiliary encoder is averaged the same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from loadgen.paper.ares.length_encoder import (
    EncoderSize,
    LengthEncoder,
    predict,
    texts,
    train_encoder,
)
from quadriga.scheduling.forecasts import NEW_SHARE
from quadriga.tune.lengths import QUANTILES, SAMPLE_EVERY, LengthData, apply, train_head_at

BATCHES = (1, 10)
MEDIAN = 1 + QUANTILES.index(0.5)


@dataclass(slots=True)
class LengthPredictor:
    """One line of the table.

    Attributes:
        outputs: Tokens still to come on the test samples, [n, 1 + quantiles].
        latency_s: By batch size; None where nothing is computed.
    """

    name: str
    outputs: torch.Tensor
    parameters: int
    latency_s: dict[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Contest:
    """All predictors that were asked about the test part.

    Attributes:
        ours: As a decode replica believes it: averaged.
        alone: The same head, each answer alone.
        auxiliary: The best on validation of the encoders, averaged or not as was better there.
        others: For the table.
        losses: Of the encoders on validation, by size.
    """

    ours: LengthPredictor
    alone: LengthPredictor
    auxiliary: LengthPredictor
    auxiliary_alone: LengthPredictor
    others: list[LengthPredictor]
    losses: dict[str, float]

    @property
    def predictors(self) -> list[LengthPredictor]:
        """Without the auxiliary twice."""
        found = [self.ours, self.alone, self.auxiliary, self.auxiliary_alone, *self.others]
        return list({p.name: p for p in found}.values())


def hold(
    data: LengthData,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[EncoderSize, ...],
    vocab_size: int,
    budget_s: float,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
) -> Contest:
    """Train what is trained, and ask every predictor about the test part.

    Args:
        vocab_size: Of the model.
        budget_s: Of training, for each encoder.
        say: Called with a line for each one that is trained.
    """
    train, validation, test = parts
    inputs = data.inputs(-1)
    head = train_head_at(data, -1, train, validation, seed=seed)
    said = apply(head, inputs)
    parameters = sum(t.numel() for t in head.values())
    latency_s = {n: timed(lambda n=n: apply(head, inputs[:n])) for n in BATCHES}  # type: ignore[misc]
    ours = LengthPredictor(
        "head, averaged", averaged(said[test], data, test), parameters, latency_s
    )
    alone = LengthPredictor("head, each answer alone", said[test], parameters, latency_s)
    size, encoder, losses = _best_encoder(
        data, train, validation, sizes, vocab_size, budget_s, seed, say
    )
    auxiliary, auxiliary_alone = _auxiliary(data, validation, test, size, encoder)
    total = (data.generated + data.remaining)[train].float().mean()
    left = (total - data.generated[test]).clamp(min=0.0)
    others = [
        LengthPredictor("head, once", _once(said, data, test), parameters),
        LengthPredictor("prompt length", _by_prompt(data, train, test), 0),
        LengthPredictor("mean", _same(left), 0),
        LengthPredictor("oracle", _same(data.remaining[test].float()), 0),
    ]
    return Contest(ours, alone, auxiliary, auxiliary_alone, others, losses)


def _best_encoder(
    data: LengthData,
    train: torch.Tensor,
    validation: torch.Tensor,
    sizes: tuple[EncoderSize, ...],
    vocab_size: int,
    budget_s: float,
    seed: int,
    say: Callable[[str], None],
) -> tuple[EncoderSize, LengthEncoder, dict[str, float]]:
    losses: dict[str, float] = {}
    best: tuple[float, LengthEncoder, EncoderSize] | None = None
    for size in sizes:
        encoder, loss = train_encoder(
            size, vocab_size, data, train, validation, seed=seed, budget_s=budget_s
        )
        losses[size.name] = loss
        say(f"encoder {len(losses)} of {len(sizes)}, {size.name}: validation loss {loss:.4f}")
        if best is None or loss < best[0]:
            best = (loss, encoder, size)
    assert best is not None
    return best[2], best[1], losses


def _auxiliary(
    data: LengthData,
    validation: torch.Tensor,
    test: torch.Tensor,
    size: EncoderSize,
    encoder: LengthEncoder,
) -> tuple[LengthPredictor, LengthPredictor]:
    """(As it is better on validation, each answer alone) on the test part."""
    tried = predict(encoder, texts(data, validation))
    truth = data.remaining[validation].float()

    def error(outputs: torch.Tensor) -> float:
        return float((outputs[:, MEDIAN] - truth).abs().mean())

    rows = texts(data, test)
    typical = sorted(rows, key=len)[len(rows) // 2 :]
    name = f"auxiliary encoder {size.name}"
    alone = LengthPredictor(
        f"{name}, each answer alone",
        predict(encoder, rows),
        encoder.num_parameters,
        {n: timed(lambda n=n: predict(encoder, typical[:n])) for n in BATCHES},  # type: ignore[misc]
    )
    if error(averaged(tried, data, validation)) >= error(tried):
        return alone, alone
    best = LengthPredictor(
        f"{name}, averaged",
        averaged(alone.outputs, data, test),
        alone.parameters,
        alone.latency_s,
    )
    return best, alone


def averaged(
    outputs: torch.Tensor, data: LengthData, samples: torch.Tensor, every: int = SAMPLE_EVERY
) -> torch.Tensor:
    """Average answers with those before, counted down, as `quadriga.scheduling.forecasts` does.

    Args:
        outputs: Of each sample, [n, 1 + quantiles].
        samples: Indices into the data, [n].
        every: Tokens between two questions; samples in between are left as they are.
    """
    requests, generated = data.requests[samples].tolist(), data.generated[samples].tolist()
    row = {where: i for i, where in enumerate(zip(requests, generated, strict=True))}
    believed = outputs.clone()
    for i in sorted(range(len(samples)), key=lambda i: generated[i]):
        before = row.get((requests[i], generated[i] - every))
        if before is not None and generated[i] % every == 0:
            left = (believed[before] - every).clamp(min=0.0)
            believed[i] = NEW_SHARE * outputs[i] + (1.0 - NEW_SHARE) * left
    return believed


def _same(tokens: torch.Tensor) -> torch.Tensor:
    """A point estimate as every output."""
    return tokens[:, None].expand(-1, 1 + len(QUANTILES)).clone()


def _once(outputs: torch.Tensor, data: LengthData, test: torch.Tensor) -> torch.Tensor:
    """The prediction after the prompt, less what was generated since."""
    at_start = torch.zeros(len(data.token_ids), outputs.shape[1])
    first = data.generated == 0
    at_start[data.requests[first]] = outputs[first]
    since = data.generated[test, None]
    return (at_start[data.requests[test]] - since).clamp(min=0.0)


def _by_prompt(data: LengthData, train: torch.Tensor, test: torch.Tensor) -> torch.Tensor:
    """Median total length of the training requests with prompts most alike in length."""
    first = train[data.generated[train] == 0]
    lengths, order = data.prompt_lengths[first].sort()
    totals = data.remaining[first][order].float()
    at = torch.searchsorted(lengths, data.prompt_lengths[test])
    reach = max(8, len(first) // 40)
    total = torch.stack(
        [totals[max(0, i - reach) : i + reach].median() for i in at.clamp(max=len(first) - 1)]
    )
    return _same((total - data.generated[test]).clamp(min=0.0))


def timed(work: Callable[[], object], *, rounds: int = 30) -> float:
    """Median seconds of a call."""
    work()
    took = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        work()
        took.append(time.perf_counter() - start_s)
    return statistics.median(took)
