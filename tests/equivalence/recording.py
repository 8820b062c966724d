"""What CUDA graphs do, on a CPU: record tensor operations once, replay them on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Step(NamedTuple):
    """One operation of a tape.

    Attributes:
        args, kwargs: As recorded, in lists.
        takes: (List or dict among them, key there, place of the tensor made by an earlier step).
        gives: Where the tensors that it makes are kept.
    """

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    takes: list[tuple[Any, Any, int]]
    gives: list[int]


def _steps(calls: Sequence[tuple[Any, Any, Any, Any]]) -> tuple[list[_Step], int]:
    """What replays the calls, and how many tensors it makes."""
    place_of: dict[int, int] = {}
    steps, num_made = [], 0

    def taken(into: Any) -> list[tuple[Any, Any, int]]:
        takes = []
        for key, value in into.items() if isinstance(into, dict) else enumerate(into):
            if isinstance(value, torch.Tensor) and id(value) in place_of:
                takes.append((into, key, place_of[id(value)]))
            elif isinstance(value, list):
                takes += taken(value)
        return takes

    for func, args, kwargs, out in calls:
        own: list[Any] = _in_lists(args)
        named = {key: _in_lists(value) for key, value in kwargs.items()}
        takes = taken(own) + taken(named)
        tensors = _tensors(out)
        gives = list(range(num_made, num_made + len(tensors)))
        place_of.update((id(tensor), place) for tensor, place in zip(tensors, gives, strict=True))
        num_made += len(tensors)
        steps.append(_Step(func, own, named, takes, gives))
    return steps, num_made


def _in_lists(value: Any) -> Any:
    return [_in_lists(item) for item in value] if isinstance(value, list | tuple) else value


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
        steps, num_made = _steps(tape.calls)

        def replay() -> None:
            assert not self.is_closed
            self.num_replays += 1
            made: list[Any] = [None] * num_made
            for step in steps:
                for into, key, place in step.takes:
                    into[key] = made[place]
                fresh = _tensors(step.func(*step.args, **step.kwargs))
                for place, tensor in zip(step.gives, fresh, strict=True):
                    made[place] = tensor

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
