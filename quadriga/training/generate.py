"""Batched greedy generation at full depth with a K/V cache; small, for evaluation only."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.training.model import EarlyExitLlama, mix, project_qkv
from quadriga.training.tokenizer import END_ID, PAD_ID


@torch.no_grad()
def greedy(
    model: EarlyExitLlama, prompts: list[list[int]], *, max_new_tokens: int
) -> list[list[int]]:
    """Return each prompt's continuation without its end token, at most `max_new_tokens` long.

    Rows are left-padded to one length; rows that ended are dropped from the batch.
    """
    device = model.embed.device
    rows, width = len(prompts), max(len(prompt) for prompt in prompts)
    tokens = torch.tensor(
        [[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts], device=device
    )
    pads = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    cache = _Cache(model, rows, width + max_new_tokens, pads)
    alive = torch.arange(rows, device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        fresh = cache.advance(model, tokens).argmax(-1)  # [alive]
        going = fresh != END_ID
        alive, tokens = alive[going], fresh[going, None]
        # One synchronisation a step: the tokens come to the host.
        for row, token in zip(alive.tolist(), tokens[:, 0].tolist(), strict=True):
            answers[row].append(token)
        if not len(alive):
            break
        if not bool(going.all()):
            cache.keep(going)
    return answers


class _Cache:
    """Keys and values of all layers, [layers, rows, kv_heads, capacity, dim], left-padded."""

    def __init__(self, model: EarlyExitLlama, rows: int, capacity: int, pads: Tensor) -> None:
        shape = model.shape
        size = (shape.layers, rows, shape.kv_heads, capacity, shape.head_dim)
        self.keys = torch.zeros(size, device=pads.device)
        self.values = torch.zeros(size, device=pads.device)
        self.pads = pads  # [rows]
        self.length = 0
        self.weights = list(model.layer_weights(torch.float32))

    def keep(self, rows: Tensor) -> None:
        """Drop the rows whose mask entry is false."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.pads = self.pads[rows]

    def advance(self, model: EarlyExitLlama, tokens: Tensor) -> Tensor:
        """Run tokens [rows, width] behind what is cached; return the last position's logits."""
        shape = model.shape
        rows, width = tokens.shape
        columns = torch.arange(self.length, self.length + width, device=tokens.device)
        positions = (columns - self.pads[:, None]).clamp(min=0).flatten()  # [rows · width]
        end = self.length + width
        seen = torch.arange(end, device=tokens.device)
        # A padding column sees itself only, so that no row of the softmax is empty.
        mask = (seen <= columns[:, None]) & (seen >= self.pads[:, None, None])
        mask = mask | (seen == columns[:, None])  # [rows, width, end]
        cos, sin = model.cos[positions], model.sin[positions]  # type: ignore[index]
        x = model.embed[tokens.flatten()]  # [rows · width, hidden]
        for layer, (norm_1, qkv_w, o_w, norm_2, gate_up_w, down_w) in enumerate(self.weights):
            q, k, v = (
                part.view(rows, width, -1, shape.head_dim).transpose(1, 2)
                for part in project_qkv(x, norm_1, qkv_w, cos, sin, shape)
            )
            self.keys[layer, :, :, self.length : end] = k
            self.values[layer, :, :, self.length : end] = v
            attended = F.scaled_dot_product_attention(
                q,
                self.keys[layer, :, :, :end],
                self.values[layer, :, :, :end],
                attn_mask=mask[:, None],
                enable_gqa=True,
            )
            flat = attended.transpose(1, 2).reshape(rows * width, -1)
            x = mix(x, flat, o_w, norm_2, gate_up_w, down_w, shape.norm_eps)
        self.length = end
        last = x.view(rows, width, -1)[:, -1]
        return model.logits(last, len(model.exits) - 1)
