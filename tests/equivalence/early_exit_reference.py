"""Early exits spelled out over unmodified `transformers` modules: one sequence, no KV cache.

Every step runs the whole model over the whole sequence. Hooks freeze the hidden state of a position
behind the layer it left at, so that deeper layers see, for that position, the frozen state: their
own norm and projections of it are then its K and V, which is what `project` means. For `copy` and
`alias` K and V are overwritten with those of the position's deepest layer; for `replay` nothing is
frozen at all. Slow, and hard to get wrong.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, OPTConfig, Qwen3Config
from transformers import PreTrainedModel as Model

from quadriga.checkpoint.exits import (
    EXITS_FILE,
    EXITS_WEIGHTS,
    NEVER,
    SKIPPED_KV_WEIGHTS,
    ExitSpec,
    SkippedKV,
)
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.engine.random import uniforms
from tests.equivalence.models import GATED, SIZES, randomise

TIE = 1e-4
"""Logits, or a confidence and its threshold, that are no further apart may fall either way."""

LAYERS = 6
MLP_WIDTH = 12
DEEP: dict[str, Any] = {"num_hidden_layers": LAYERS}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**(GATED | DEEP)),
    "mistral-window": lambda: MistralConfig(**(GATED | DEEP), sliding_window=7),
    "qwen3": lambda: Qwen3Config(**(GATED | DEEP), head_dim=16),
    "opt-pre-norm": lambda: OPTConfig(**(SIZES | DEEP), ffn_dim=72),
    "opt-post-norm-projected": lambda: OPTConfig(
        **(SIZES | DEEP), ffn_dim=72, do_layer_norm_before=False, word_embed_proj_dim=24
    ),
}


def build_deep(variant: str, *, seed: int = 0) -> Model:
    """A random model of six layers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[variant](), attn_implementation="eager")
    return randomise(model.eval())


def save_with_exits(model: Model, path: Path, exits: ExitSpec, *, all_layers: bool = False) -> Path:
    """Write a checkpoint folder with random exit norms and heads, as its kind wants them.

    It has maps for skipped K and V as well, for all pairs of exit and layer but some.
    """
    model.save_pretrained(path)
    about = {
        "layers": "all" if all_layers else list(exits.layers),
        "kind": exits.kind,
        "criterion": exits.criterion,
        "threshold": exits.threshold,
        "has_norm": exits.has_norm,
        "own_head": exits.own_head,
    }
    (path / EXITS_FILE).write_text(json.dumps(about), encoding="utf-8")
    generator = torch.Generator().manual_seed(12)
    hidden = model.config.hidden_size
    maps = {}
    for layer in exits.layers:
        for at in range(layer + 1, model.config.num_hidden_layers - 1):
            width = 2 * _kv_size(model)
            maps[f"exits.{layer}.kv.{at}.weight"] = 0.2 * torch.randn(
                width, hidden, generator=generator
            )
            maps[f"exits.{layer}.kv.{at}.bias"] = 0.1 * torch.randn(width, generator=generator)
    save_file(maps, path / SKIPPED_KV_WEIGHTS)
    if exits.kind == "shared":
        return path
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for layer in exits.layers:
        at = f"exits.{layer}"
        for norm in (["norm"] if exits.has_norm else []) + ["mlp.norm"] * (exits.kind == "mlp"):
            tensors[f"{at}.{norm}.weight"] = 0.5 + torch.rand(hidden, generator=generator)
            if model.config.model_type == "opt":
                tensors[f"{at}.{norm}.bias"] = 0.1 * torch.randn(hidden, generator=generator)
        if exits.kind == "mlp":
            rows = MLP_WIDTH * (1 if model.config.model_type == "opt" else 2)
            for part, size in (("up", (rows, hidden)), ("down", (hidden, MLP_WIDTH))):
                tensors[f"{at}.mlp.{part}.weight"] = 0.3 * torch.randn(*size, generator=generator)
        if exits.has_own_head:
            size = (model.config.vocab_size, hidden)
            scale = 0.25 if exits.has_norm else 0.08  # states are larger than normed ones
            tensors[f"{at}.head.weight"] = scale * torch.randn(*size, generator=generator)
    save_file(tensors, path / EXITS_WEIGHTS)
    return path


def _kv_size(model: Model) -> int:
    inner = model.model.decoder if model.config.model_type == "opt" else model.model
    return int(inner.layers[0].self_attn.k_proj.out_features)


@dataclass(slots=True)
class Generated:
    """What the reference says.

    Attributes:
        certain: Tokens before the first that a rounding error could turn; all, mostly.
        logprobs: Of each token after the first, under the processed distribution of its exit.
        breaches: Tokens that left the deepest layer allowed below the threshold.
    """

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    certain: int = 0
    breaches: int = 0


class EarlyExitReference:
    """Batch-1 early-exit inference.

    Args:
        path: The folder that `save_with_exits` wrote for `model`.
        depth: Layers that are loaded; the model may have more.
        replay_newest: Positions right before a token that goes deeper go with it.
    """

    def __init__(
        self,
        model: Model,
        path: Path,
        exits: ExitSpec,
        mode: SkippedKV,
        depth: int | None = None,
        replay_newest: int = 0,
    ) -> None:
        self._replay_newest = replay_newest
        self._model = model
        self._exits = exits
        self._mode = mode
        self._inner = model.model.decoder if model.config.model_type == "opt" else model.model
        self._total = len(self._inner.layers)
        self._depth = depth or self._total
        self._own = exits.kind != "shared"
        self._maps = load_file(path / SKIPPED_KV_WEIGHTS) if mode == "linear" else {}
        self._tensors: dict[str, torch.Tensor] = {}
        if self._own:
            self._tensors = load_file(path / EXITS_WEIGHTS)

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int], depths: Sequence[int]) -> list[torch.Tensor]:
        """Hidden states behind every layer, [n, hidden] each.

        Args:
            depths: Layers run for each position.
        """
        with self._frozen(self._replayed(list(depths))) as seen:
            self._model(torch.tensor([list(ids)]), use_cache=False)
        return seen

    def _replayed(self, depths: list[int]) -> list[int]:
        """Layers run for each position in the end, by itself or with a later one."""
        ends = [*(k for k in self._exits.layers if k < self._depth), self._depth]
        replayed = list(depths)
        for first, end in pairwise(ends):
            for position, depth in enumerate(replayed):
                later = [i for i in range(position + 1, len(depths)) if depths[i] > first]
                near = bool(later) and later[0] - position <= self._replay_newest
                replayed[position] = end if depth == first and near else depth
        return replayed

    def logits(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        """The head behind `depth` layers: [hidden] → [vocab]."""
        model, inner = self._model, self._inner
        own = depth in self._exits.layers and self._own
        norm = getattr(inner, "norm", None) or getattr(inner, "final_layer_norm", None)
        if own:
            norm = self._norm(norm, f"exits.{depth}.norm") if self._exits.has_norm else None
        with torch.inference_mode():
            if own and self._exits.kind == "mlp":
                x = x + self._mlp(x, depth)
            x = norm(x) if norm is not None else x
            if own and self._exits.has_own_head:
                return torch.mv(self._tensors[f"exits.{depth}.head.weight"], x)
            project = getattr(inner, "project_out", None)
            return torch.mv(model.lm_head.weight, project(x) if project is not None else x)

    def _norm(self, like: torch.nn.Module, name: str) -> torch.nn.Module:
        """A norm of the model's kind with the weights of an exit."""
        if self._model.config.model_type == "opt":
            norm: torch.nn.Module = torch.nn.LayerNorm(self._model.config.hidden_size)
            norm.bias.data = self._tensors[f"{name}.bias"]
        else:
            norm = copy.deepcopy(like)
        norm.weight.data = self._tensors[f"{name}.weight"]
        return norm

    def _mlp(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        """What an exit's MLP makes of a state: [hidden] → [hidden]."""
        at = f"exits.{depth}.mlp"
        like = self._inner.layers[0]
        norm = self._norm(getattr(like, "input_layernorm", None), f"{at}.norm")
        up = self._tensors[f"{at}.up.weight"] @ norm(x)
        if self._model.config.model_type == "opt":
            return self._tensors[f"{at}.down.weight"] @ like.activation_fn(up)
        gate, up = up.chunk(2)
        return self._tensors[f"{at}.down.weight"] @ (like.mlp.act_fn(gate) * up)

    def generate(self, state: SequenceState) -> Generated:
        """Continue the state's prompt to its `max_tokens`, each token leaving as early as it may.

        The first token comes from the prompt's pass, which runs every layer there is.
        """
        out = Generated()
        is_certain = True
        limit = self._limit(state.exits.max_depth)
        while len(out.tokens) < state.sampling.max_tokens:
            ids = state.prompt_ids + out.tokens
            depths = [self._depth] * len(state.prompt_ids) + out.depths[1:] + [self._depth]
            seen = self.hidden(ids, depths[: len(ids)])
            for depth in [k for k in self._exits.layers if k < self._depth] + [self._depth]:
                if not out.tokens and depth < self._depth:
                    continue
                logits = self._process(self.logits(seen[depth - 1][-1], depth), state, out.tokens)
                confidence = self._confidence(logits)
                passes = self._passes(confidence, state.exits.threshold)
                is_last = depth == self._depth or (bool(out.tokens) and depth == limit)
                if not is_last and abs(confidence - state.exits.threshold) < TIE:
                    is_certain = False
                if is_last or passes:
                    break
            may_breach = bool(out.tokens) and depth < self._total and state.exits.threshold < NEVER
            out.breaches += may_breach and not passes
            token, gap = self._choose(logits, state, len(ids))
            is_certain = is_certain and gap > TIE
            out.certain += is_certain
            out.logprobs.append(torch.log_softmax(logits, -1)[token].item())
            out.tokens.append(token)
            out.depths.append(depth)
        return out

    def check(self, state: SequenceState, *, may_be_below: bool = False) -> int:
        """Check what was generated greedily against its own exit record; return how many ties.

        For every token, whatever decided where it left: it is the best at that exit, and a token
        that left early had the confidence to.
        """
        ids = state.prompt_ids + state.output_ids
        depths = [self._depth] * len(state.prompt_ids) + state.exit_layers[1:] + [self._depth]
        seen = self.hidden(ids, depths)
        limit = self._limit(state.exits.max_depth)
        ties = 0
        for i, (token, depth) in enumerate(zip(state.output_ids, state.exit_layers, strict=True)):
            x = seen[depth - 1][len(state.prompt_ids) + i - 1]
            logits = self._process(self.logits(x, depth), state, state.output_ids[:i])
            gap = (logits.max() - logits[token]).item()
            assert gap <= TIE, f"token {i} of {state.sequence_id} is not the best: {gap:.2g} below"
            ties += gap > 0
            if i and depth < min(limit, self._depth) and not may_be_below:
                confidence = self._confidence(logits)
                assert self._passes(confidence + 1e-6, state.exits.threshold), "left below"
        return ties

    def _mapped(self, x: torch.Tensor, depth: int, layer: int) -> torch.Tensor:
        """K, before norm and rotation, and V of a layer, by the map from an exit."""
        config = self._model.config
        if config.model_type != "opt":
            x = x * torch.rsqrt(x.pow(2).mean() + config.rms_norm_eps)
        elif config.do_layer_norm_before:
            x = torch.nn.functional.layer_norm(x, x.shape)
        name = f"exits.{depth}.kv.{layer}"
        return self._maps[f"{name}.weight"] @ x + self._maps[f"{name}.bias"]

    def _limit(self, max_depth: int) -> int:
        """The deepest exit within a request's limit; the shallowest there is, at least."""
        exits = [*(k for k in self._exits.layers if k < self._depth), self._depth]
        within = [k for k in exits if not max_depth or k <= max_depth]
        return max(within, default=exits[0])

    def _confidence(self, logits: torch.Tensor) -> float:
        first, second = torch.softmax(logits.double(), -1).topk(2).values.tolist()
        return first - second if self._exits.criterion == "margin" else first

    def _passes(self, confidence: float, threshold: float) -> bool:
        if threshold >= NEVER:
            return False
        is_margin = self._exits.criterion == "margin"
        return confidence > threshold if is_margin else confidence >= threshold

    def _process(
        self, logits: torch.Tensor, state: SequenceState, output: list[int]
    ) -> torch.Tensor:
        """Bias and penalties, one token id at a time."""
        p: SamplingParams = state.sampling
        logits = logits.clone()
        for token, bias in p.logit_bias:
            logits[token] += bias
        for token in set(state.prompt_ids) | set(output):
            value = logits[token].item()
            by = p.repetition_penalty
            logits[token] = value / by if value > 0 else value * by
        for token in set(output):
            logits[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
        return logits

    def _choose(
        self, logits: torch.Tensor, state: SequenceState, position: int
    ) -> tuple[int, float]:
        """The token, and how far the decision was from another."""
        if state.sampling.greedy:
            first, second = logits.topk(2).values.tolist()
            return int(logits.argmax()), first - second
        probs = torch.softmax(logits.double() / state.sampling.temperature, -1)
        u = float(uniforms([state.sampling.seed], [state.choice], [position])[0])
        below = probs.cumsum(0)
        token = int((below <= u).sum())
        return token, (below - u).abs().min().item() * 100

    @contextmanager
    def _frozen(self, depths: list[int]) -> Iterator[list[torch.Tensor]]:
        """Hooks that freeze each position behind its depth; yields the states behind each layer."""
        seen: list[torch.Tensor] = []
        kept: dict[tuple[str, int], torch.Tensor] = {}
        at = torch.tensor(depths)
        handles = []

        def after_layer(layer: int) -> Any:
            def hook(_module: Any, _args: Any, output: Any) -> Any:
                x = output[0] if isinstance(output, tuple) else output
                if layer and self._mode != "replay":
                    x = torch.where((at <= layer)[None, :, None], seen[-1][None], x)
                seen.append(x[0])
                return (x, *output[1:]) if isinstance(output, tuple) else x

            return hook

        def after_projection(name: str, layer: int) -> Any:
            def hook(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
                result = output.clone()
                for position, depth in enumerate(depths):
                    if depth <= layer:
                        result[0, position] = kept[name, depth - 1][0, position]
                kept[name, layer] = result
                return result

            return hook

        def after_own(name: str, layer: int) -> Any:
            def hook(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
                result = output.clone()
                for position, depth in enumerate(depths):
                    if depth < layer and f"exits.{depth}.kv.{layer}.weight" in self._maps:
                        made = self._mapped(seen[depth - 1][position], depth, layer)
                        result[0, position] = made.chunk(2)[0 if name == "k" else 1]
                return result

            return hook

        for index, layer in enumerate(self._inner.layers):
            handles.append(layer.register_forward_hook(after_layer(index)))
            if self._mode in ("copy", "alias"):
                attention = layer.self_attn
                key = getattr(attention, "k_norm", None) or attention.k_proj
                handles.append(key.register_forward_hook(after_projection("k", index)))
                value = attention.v_proj
                handles.append(value.register_forward_hook(after_projection("v", index)))
            elif self._mode == "linear":
                for name in ("k", "v"):
                    module = getattr(layer.self_attn, f"{name}_proj")
                    handles.append(module.register_forward_hook(after_own(name, index)))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()
