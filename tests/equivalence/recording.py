"""What CUDA graphs do, on a CPU: record tensor operations once, replay them on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

FORBIDDEN = ("_local_scalar_dense", "nonzero", "lift_fresh", "unique", "equal.default")
"""On a GPU these wait for the device, or bring data from the host: no graph can hold them."""


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Under inference mode compositions arrive whole: `item` must not hide what it reads with.
        if func._can_decompose():
            with self:
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        assert not any(name in str(func) for name in FORBIDDEN), f"{func} cannot be recorded"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class TapeRecorder:
    """A `Recorder`. Whatever the host computed while recording is frozen, as in a graph.

    Attributes:
        num_replays: Over all tapes.
    """

    def __init__(self) -> None:
        self.num_replays = 0
        self.is_closed = False

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder.record`."""
        work()
        with _Tape() as tape:
            work()

        def replay() -> None:
            assert not self.is_closed
            self.num_replays += 1
            now: dict[int, torch.Tensor] = {}

            def current(tensor: torch.Tensor) -> torch.Tensor:
                return now.get(id(tensor), tensor)

            for func, args, kwargs, recorded in tape.calls:
                args, kwargs = tree_map_only(torch.Tensor, current, (args, kwargs))
                fresh = func(*args, **kwargs)
                for then, again in zip(_tensors(recorded), _tensors(fresh), strict=True):
                    now[id(then)] = again

        return replay

    def close(self) -> None:
        """See `Recorder.close`."""
        self.is_closed = True


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [t for t in value if isinstance(t, torch.Tensor)] if isinstance(value, list | tuple) else []
    )
