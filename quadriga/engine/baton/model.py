"""One forward call of a Hugging Face causal model, whatever its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class CausalModel:
    """Calls an unmodified model with ids, mask, positions and cache.

    Attributes:
        max_padding: Most padding columns that may stand behind a prompt in one pass: one more, and
            a padding query of a windowed layer would see nothing at all.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_keep = "logits_to_keep" in parameters
        self.takes_cache = "past_key_values" in parameters
        self.max_padding = smallest_window(model.config.get_text_config(decoder=True)) - 1

    @property
    def config(self) -> Any:
        """The text part of the model's configuration."""
        return self._model.config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def unwrapped(self) -> PreTrainedModel:
        """The model of `transformers` itself."""
        model: PreTrainedModel = self._model
        return model

    def to(self, device: torch.device) -> None:
        self._model.to(device)

    def __call__(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache | None,
        keep: list[int] | None = None,
        on_states: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run the model.

        Args:
            input_ids: int64 [batch, n].
            mask: int64 [batch, past + n]; 0 hides a column.
            positions: int64 [batch, n]: each row's own, whatever the column.
            keep: Which of the n tokens' logits are wanted, ascending; None is all.
            on_states: Called with the last hidden states of all tokens, [batch, n, hidden].

        Returns:
            float32 [batch, len(keep), vocab]
        """
        kwargs: dict[str, Any] = {}
        if self._takes_positions:
            kwargs["position_ids"] = positions
        if self._takes_keep and keep is not None:
            is_last = keep == [input_ids.shape[1] - 1]
            kwargs["logits_to_keep"] = 1 if is_last else torch.tensor(keep, device=mask.device)
        with self._states_read(on_states):
            logits: torch.Tensor = self._model(
                input_ids=input_ids,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
                return_dict=True,
                **kwargs,
            ).logits
        if keep is not None and not self._takes_keep:
            logits = logits[:, keep]
        return logits.float()

    @contextmanager
    def _states_read(self, on_states: Callable[[torch.Tensor], None] | None) -> Iterator[None]:
        """Hand what the part before the head returns to `on_states`, for one call."""
        if on_states is None:
            yield
            return

        def read(_: Any, __: Any, output: Any) -> None:
            on_states(output.last_hidden_state)

        hook = self._model.base_model.register_forward_hook(read)
        try:
            yield
        finally:
            hook.remove()


def smallest_window(config: Any) -> int:
    """Positions the narrowest attention window sees, itself included; huge where there is none."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "window_size")]
    return min((int(w) for w in windows if isinstance(w, int) and w > 0), default=1 << 30)
