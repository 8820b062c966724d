"""The predictors of remaining lengths in `paper ares-predictor`: trained, applied and timed.

Each is asked at every seventh token, so at all kinds of tokens in sentences and lists of one form,
as a decode replica asks at any. Its answers are shown twice: each alone, and averaged with those
before at a replica's interval, as the replica does. The auxiliary encoder is averaged the same way;
asked once, after the prompt, and counted down, it is what systems do that predict only then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from loadgen.paper.ares.length_encoder import (
    EncoderSize,
    LengthEncoder,
    predict,
    texts,
    train_encoder,
)
from quadriga.engine.early_exit.length_head import run_layers, to_tokens
from quadriga.scheduling.forecasts import NEW_SHARE
from quadriga.tune.lengths import (
    MEDIAN,
    QUANTILES,
    LengthData,
    apply_at,
    train_head,
)

BATCHES = (1, 10)
TEST_EVERY = 7
"""Tokens between two samples of the test part; a prime, as what repeats does so every 4 or 16."""
ASK_EVERY = 3 * TEST_EVERY
"""Tokens between two questions of a replica: about its default of 20."""


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
    """All predictors that were asked about the test part of one split.

    Attributes:
        ours: As a decode replica believes it: averaged.
        alone: The same head, each answer alone.
        encoders: One of each size: averaged, or each answer alone, as was better on validation.
        encoders_alone: The same, each answer alone.
        errors: Of the encoders on validation, in tokens.
        others: For the table.
    """

    ours: LengthPredictor
    alone: LengthPredictor
    encoders: list[LengthPredictor]
    encoders_alone: list[LengthPredictor]
    errors: list[float]
    others: list[LengthPredictor]

    @property
    def best(self) -> int:
        """Which encoder is best on validation."""
        return self.errors.index(min(self.errors))

    @property
    def predictors(self) -> list[LengthPredictor]:
        """Each once: ours, the best encoder, the others."""
        best = [self.encoders[self.best], self.encoders_alone[self.best]]
        return list({p.name: p for p in [self.ours, self.alone, *best, *self.others]}.values())


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
        parts: Samples of training, validation and test; of the last those that are asked about.
        vocab_size: Of the model.
        budget_s: Of training, for each encoder.
        say: Called with a line for each one that is trained.
    """
    train, validation, test = parts
    read = partial(data.inputs, -1)
    head = train_head(read, data.remaining, train, validation, seed=seed)
    said = apply_at(data, -1, test, head)
    inputs = read(test[: max(BATCHES)])
    parameters = sum(weight.numel() + bias.numel() for weight, bias in head)
    latency_s = {
        n: timed(lambda n=n: to_tokens(run_layers(head, inputs[:n])))  # type: ignore[misc]
        for n in BATCHES
    }
    ours = LengthPredictor("head, averaged", averaged(said, data, test), parameters, latency_s)
    alone = LengthPredictor("head, each answer alone", said, parameters, latency_s)
    encoders, encoders_alone, errors = [], [], []
    for size in sizes:
        encoder, _ = train_encoder(
            size, vocab_size, data, train, validation, seed=seed, budget_s=budget_s
        )
        best, each, error = _asked(data, asked_of(data, validation), test, size, encoder)
        encoders.append(best)
        encoders_alone.append(each)
        errors.append(error)
        say(f"encoder {len(errors)} of {len(sizes)}, {size.name}: {error:.2f} on validation")
    total = (data.generated + data.remaining)[train].float().mean()
    left = (total - data.generated[test]).clamp(min=0.0)
    best = encoders_alone[errors.index(min(errors))]
    others = [
        LengthPredictor("encoder, once", _once(best.outputs, data, test), best.parameters),
        LengthPredictor("head, once", _once(said, data, test), parameters),
        LengthPredictor("prompt length", _by_prompt(data, train, test), 0),
        LengthPredictor("mean", _same(left), 0),
        LengthPredictor("oracle", _same(data.remaining[test].float()), 0),
    ]
    return Contest(ours, alone, encoders, encoders_alone, errors, others)


def _asked(
    data: LengthData,
    validation: torch.Tensor,
    test: torch.Tensor,
    size: EncoderSize,
    encoder: LengthEncoder,
) -> tuple[LengthPredictor, LengthPredictor, float]:
    """(As it is better on validation, each answer alone) on the test part; the former's error."""
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
        sum(p.numel() for p in encoder.parameters()),
        {n: timed(lambda n=n: predict(encoder, typical[:n])) for n in BATCHES},  # type: ignore[misc]
    )
    each, together = error(tried), error(averaged(tried, data, validation))
    if together >= each:
        return alone, alone, each
    best = LengthPredictor(
        f"{name}, averaged", averaged(alone.outputs, data, test), alone.parameters, alone.latency_s
    )
    return best, alone, together


def asked_of(data: LengthData, samples: torch.Tensor) -> torch.Tensor:
    """Those of some samples about which predictors are asked."""
    return samples[data.generated[samples] % TEST_EVERY == 0]


def averaged(
    outputs: torch.Tensor, data: LengthData, samples: torch.Tensor, every: int = ASK_EVERY
) -> torch.Tensor:
    """Average answers with those before, counted down, as `quadriga.scheduling.forecasts` does.

    Args:
        outputs: Of each sample, [n, 1 + quantiles].
        samples: Indices into the data, [n].
        every: Tokens between two questions; the first is after the prompt.
    """
    requests, generated = data.requests[samples].tolist(), data.generated[samples].tolist()
    row = {where: i for i, where in enumerate(zip(requests, generated, strict=True))}
    believed = outputs.clone()
    for i in sorted(range(len(samples)), key=lambda i: generated[i]):
        asked = max(0, generated[i] - every)
        before = row.get((requests[i], asked)) if generated[i] else None
        if before is not None:
            left = (believed[before] - (generated[i] - asked)).clamp(min=0.0)
            believed[i] = NEW_SHARE * outputs[i] + (1.0 - NEW_SHARE) * left
    return believed


def _same(tokens: torch.Tensor) -> torch.Tensor:
    """A point estimate as every output."""
    return tokens[:, None].expand(-1, 1 + len(QUANTILES)).clone()


def _once(outputs: torch.Tensor, data: LengthData, test: torch.Tensor) -> torch.Tensor:
    """The prediction after the prompt, less what was generated since."""
    at_start = torch.zeros(len(data.token_ids), outputs.shape[1])
    requests, generated = data.requests[test], data.generated[test]
    at_start[requests[generated == 0]] = outputs[generated == 0]
    return (at_start[requests] - generated[:, None]).clamp(min=0.0)


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
