"""Refine the stand-ins for skipped K and V by what they do to the answers of tokens that go deep.

Least squares (`skipped_kv.py`) weighs every channel of K and V alike. What counts is what a later
token that runs all layers says after reading them. So the maps go on from there by gradient: a
teacher pass computes every layer for every token; a student pass lets the sure ones leave at their
exits, as service does, and the others attend to what the maps put there. The loss is the divergence
of the student's deep tokens from the teacher's. Nothing but the maps is trained.

Source: ours; the objective is that of distilling a model into itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from quadriga.training.attention import causal_attention
from quadriga.training.data import Batch, encode, pack
from quadriga.training.model import EarlyExitLlama, mix, project_qkv
from quadriga.training.tasks import TASKS, make_example

DISTIL_SEED = 556_000
THRESHOLDS = (0.9, 0.95, 0.98, 0.99, 0.995)  # of the steps, in turn
_EXAMPLES_PER_TASK = 8  # in a step
_RATE = 1e-3
_WARM_UP = 20  # steps
_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Parting:
    """Where each token of a batch leaves.

    Attributes:
        depths: [num_tokens] int64, layers run.
        deep: [num_answers] bool, answer tokens that run all of them.
        teacher: [num_deep, vocab], log-probabilities of these at full depth.
    """

    depths: Tensor
    deep: Tensor
    teacher: Tensor


def distil(
    model: EarlyExitLlama,
    tokenizer: Tokenizer,
    maps: dict[str, Tensor],
    *,
    steps: int,
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, Tensor]:
    """Return refined maps, by the same names.

    Args:
        maps: As `skipped_kv.fit` returns them.
        on_step: Called with the step and its loss, nats per deep token.
    """
    model.requires_grad_(False)
    parameters = {name: nn.Parameter(tensor.clone().float()) for name, tensor in maps.items()}
    optimiser = torch.optim.Adam(parameters.values(), lr=_RATE, betas=(0.9, 0.98))
    mean = {name: torch.zeros_like(p) for name, p in parameters.items()}
    num_averaged = 0
    for step in range(steps):
        rate = (
            _RATE * min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        optimiser.param_groups[0]["lr"] = rate
        batch = _batch(tokenizer, step)
        parting = part(model, batch, THRESHOLDS[step % len(THRESHOLDS)])
        if not bool(parting.deep.any()):
            continue
        loss = divergence(model, batch, parting, parameters)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), _CLIP)
        optimiser.step()
        if on_step is not None:
            on_step(step, float(loss.detach()))
        if step >= steps // 2:  # the mean of the later half is smoother than its end
            num_averaged += 1
            for name, parameter in parameters.items():
                mean[name] += (parameter.detach() - mean[name]) / num_averaged
    return mean if num_averaged else {name: p.detach() for name, p in parameters.items()}


@torch.no_grad()
def part(model: EarlyExitLlama, batch: Batch, threshold: float) -> Parting:
    """Let every sure token of the answers leave at its first sure exit; prompts run all layers."""
    shape = model.shape
    states = model(batch.tokens, batch.positions, batch.groups, batch.answers)
    # A prompt's last token, whose successor is an answer's first, was run with its prompt.
    is_first = torch.ones_like(batch.answers, dtype=torch.bool)
    is_first[1:] = batch.answers[1:] != batch.answers[:-1] + 1
    depths = torch.full_like(batch.answers, shape.layers)
    for index in reversed(range(len(shape.exits))):
        top = model.logits(states[index], index).softmax(-1).amax(-1)
        depths[(top >= threshold) & ~is_first] = shape.exits[index]
    of_all = torch.full_like(batch.tokens, shape.layers)
    of_all[batch.answers] = depths
    deep = (depths == shape.layers) & ~is_first
    teacher = model.logits(states[-1][deep], len(shape.exits)).log_softmax(-1)
    return Parting(of_all, deep, teacher)


def divergence(
    model: EarlyExitLlama, batch: Batch, parting: Parting, maps: dict[str, nn.Parameter]
) -> Tensor:
    """KL divergence of the student's deep tokens from the teacher's, nats per token.

    All tokens run through all layers, because their shapes are simpler then; what a token that has
    left would have made is read by nobody.
    """
    shape = model.shape
    x = model.embed[batch.tokens]
    cos, sin = model.cos[batch.positions], model.sin[batch.positions]  # type: ignore[index]
    left_with: dict[int, Tensor] = {}
    for layer, (norm_1, qkv_w, o_w, norm_2, gate_up_w, down_w) in enumerate(
        model.layer_weights(torch.float32)
    ):
        q, k, v = project_qkv(x, norm_1, qkv_w, cos, sin, shape)
        for depth, state in left_with.items():
            if layer == depth:
                continue  # the layer's own projection of the state they left with is exact
            gone = torch.nonzero(parting.depths == depth)[:, 0]
            keys, values = _stand_in(state[gone], depth, layer, maps, cos[gone], sin[gone], model)
            k, v = k.index_copy(0, gone, keys), v.index_copy(0, gone, values)
        attended = causal_attention(q, k, v, batch.groups)
        after = mix(x, attended, o_w, norm_2, gate_up_w, down_w, shape.norm_eps)
        x = after
        if layer + 1 in shape.exits:
            left_with[layer + 1] = F.rms_norm(x, (shape.hidden,), eps=shape.norm_eps)
    student = model.logits(x[batch.answers][parting.deep], len(shape.exits)).log_softmax(-1)
    return F.kl_div(student, parting.teacher, log_target=True, reduction="batchmean")


def _stand_in(
    unit: Tensor,
    depth: int,
    layer: int,
    maps: dict[str, nn.Parameter],
    cos: Tensor,
    sin: Tensor,
    model: EarlyExitLlama,
) -> tuple[Tensor, Tensor]:
    """K, rotated, and V [n, kv_heads, dim] that a map puts where `unit` states [n, hidden] left."""
    shape = model.shape
    name = f"exits.{depth}.kv.{layer}"
    kv = F.linear(unit, maps[f"{name}.weight"], maps[f"{name}.bias"])
    k, v = kv.view(len(unit), -1, shape.head_dim).chunk(2, dim=1)
    first, second = k.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1), v


def _batch(tokenizer: Tokenizer, step: int) -> Batch:
    """Examples of all tasks, other ones in every step."""
    first = step * _EXAMPLES_PER_TASK
    examples = [
        make_example(task, seed=DISTIL_SEED, index=first + i)
        for task in TASKS
        for i in range(_EXAMPLES_PER_TASK)
    ]
    return pack(encode(tokenizer, examples), end_weight=1.0, num_tokens=0, next_index=0)
