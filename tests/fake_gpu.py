"""A GPU that is none: tensors that say they are on a device of their own, computed on a CPU.

What it keeps of a GPU, because the engine must live with it:

- a tensor of the device and one of the host cannot be computed with together;
- the host waits for the device wherever torch's CUDA backend or the driver would: where a value is
  read (`.item()`, `.tolist()`), where a shape depends on values (`nonzero`), and at copies between
  them that are not asked to be asynchronous, or whose memory on the host is not pinned.

`FakeGpu` counts both the waits and the kernels, which are the operations that are no view of a
tensor and no allocation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "fakegpu"
_READS = ("_local_scalar_dense", "equal", "is_nonzero", "allclose")
_DEPEND = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
_COPIES = ("_to_copy", "copy_")
_ONE_KERNEL = (*_COPIES, "rms_norm")  # compositions for which CUDA has a kernel of its own
_NO_KERNELS = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("empty_permuted", "detach", "alias", "resolve_conj", "resolve_neg", "lift_fresh"),
    )
)


@cache
def device() -> torch.device:
    """The device; torch knows it from the first call on."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)  # type: ignore[no-untyped-call]
    return torch.device(NAME, 0)


class FakeTensor(torch.Tensor):
    """Says it is on the device; `raw` has the values, on the CPU."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> FakeTensor:
        with torch.inference_mode(False):  # a view of a plain tensor has to be plain
            made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                raw.size(),
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                device=device(),
            )
        made.raw = raw
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        """As of a tensor on a GPU: copied, then read."""
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as its values: torch, given a `data_ptr`, would read a storage that is absent."""
        values = self.detach().cpu()
        again = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return again, (values, self.dtype, str(self.device), self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FakeTensor({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{func} on a fake GPU's tensor, outside `FakeGpu`")


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, the device computes.

    Attributes:
        waits: The operations at which the host waited, in order.
        copied: Bytes of each copy from the host, in order.
        kernels: What the device computed, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device()
        self.waits: list[str] = []
        self.copied: list[int] = []
        self.kernels: list[str] = []
        self._as_one: str | None = None
        self._lifted: list[bool] = []

    def __enter__(self) -> FakeGpu:
        # `torch.tensor(…, device=…)` and indices that are lists reach the mode as copies.
        self._lifted.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifted.pop())
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def as_one_kernel(self, name: str) -> Iterator[None]:
        """What runs inside counts as one kernel, and waits for nothing: a library's."""
        self.kernels.append(name)
        self._as_one, before = name, self._as_one
        try:
            yield
        finally:
            self._as_one = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        tensors = _tensors((*args, *named.values()))
        here = [t for t in tensors if isinstance(t, FakeTensor)]
        wanted = named.get("device") or next((a for a in args if isinstance(a, torch.device)), None)
        name = func.overloadpacket.__name__
        if name in ("pin_memory", "_pin_memory"):
            return _pinned(args[0].clone())
        if named.pop("pin_memory", None):
            return _pinned(func(*args, **named))
        goes_here = wanted is not None and torch.device(wanted).type == NAME
        if not here and not goes_here:
            return func(*args, **named)
        if name not in _ONE_KERNEL and func._can_decompose():
            # As a backend without a kernel of its own for it.
            with self:
                made = func.decompose(*args, **named)
            if made is not NotImplemented:
                return made
        if name in _COPIES:
            return self._copy(name, func, args, named)
        host = [t for t in tensors if not isinstance(t, FakeTensor) and t.dim() > 0]
        assert not host or self._as_one, f"{func} takes tensors of the GPU and of the host"
        self._count(name, func, here)
        if goes_here:
            named["device"] = torch.device("cpu")
        raw_named = {key: _raw(value) for key, value in named.items()}
        return _wrapped(func(*_raw(args), **raw_named), here)

    def _copy(self, name: str, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Between host and device, or within one of them."""
        if name == "copy_":
            target, source = args[0], args[1]
            to_here = isinstance(target, FakeTensor)
        else:
            target, source = None, args[0]
            wanted = named.pop("device", None)
            to_here = (
                isinstance(source, FakeTensor) if wanted is None else _is_here(torch.device(wanted))
            )
        from_here = isinstance(source, FakeTensor)
        host = target if from_here else source
        is_asynchronous = named.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        may_run_on = is_asynchronous and getattr(host, "is_pinned_for_fake_gpu", False)
        if to_here != from_here and not may_run_on and not self._as_one:
            self.waits.append(f"{name} {'to' if to_here else 'from'} the device")
        if to_here and not from_here:
            self.copied.append(source.nbytes)
        if to_here and from_here and not self._as_one:
            self.kernels.append(name)
        raw = _raw(args)
        if target is not None:
            func(*raw, **named)
            return target
        # A copy is one even where the dtype stays.
        made = func(*raw, **named, device=torch.device("cpu"))
        return FakeTensor(made) if to_here else made

    def _count(self, name: str, func: Any, here: Sequence[FakeTensor]) -> None:
        if self._as_one:
            return
        if name in _READS or name in _DEPEND:
            self.waits.append(name)
        elif name in ("index", "index_put_", "index_put"):
            if any(t.dtype in (torch.bool, torch.uint8) for t in here[1:]):
                self.waits.append(f"{name} by a mask")
        is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if not is_view and name not in _NO_KERNELS:
            self.kernels.append(name)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark memory that the device may copy from while the host goes on."""
    tensor.is_pinned_for_fake_gpu = True  # type: ignore[attr-defined]
    return tensor


def _is_here(wanted: torch.device) -> bool:
    return wanted.type == NAME


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _raw(value: Any) -> Any:
    """With the tensors of the CPU in the places of the device's."""
    if isinstance(value, FakeTensor):
        return value.raw
    return type(value)(map(_raw, value)) if isinstance(value, list | tuple) else value


def _wrapped(made: Any, here: Sequence[FakeTensor]) -> Any:
    """Results as the device's; what an operation changed in place stays the same object."""
    if isinstance(made, list | tuple):
        return type(made)(_wrapped(item, here) for item in made)
    if not isinstance(made, torch.Tensor):
        return made
    for tensor in here:
        if tensor.raw is made:
            return tensor
    return FakeTensor(made)
