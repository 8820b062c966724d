"""The kernels' C interface, mirrored with ctypes; calls release the GIL."""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import torch

from quadriga.engine.weights.checkpoint_weights import Linear, LowRank, Norm
from quadriga.engine.weights.matrix import Matrix


class CMatrix(Structure):
    """Mirror of `QuadrigaMatrix`."""

    _fields_ = (("rows", c_void_p), ("form", c_int64))

    @classmethod
    def of(cls, matrix: Matrix | None) -> CMatrix:
        """Point at a matrix's rows, which the caller keeps alive."""
        if matrix is None:
            return cls()
        return cls(pointer(matrix.rows, matrix.form.dtype), matrix.form)


class CLinear(Structure):
    """Mirror of `QuadrigaLinear`."""

    _fields_ = (("weight", CMatrix), ("bias", c_void_p))

    @classmethod
    def of(cls, linear: Linear) -> CLinear:
        """Point at a projection's tensors, which the caller keeps alive."""
        return cls(CMatrix.of(linear.weight), pointer(linear.bias))


class CNorm(Structure):
    """Mirror of `QuadrigaNorm`."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))

    @classmethod
    def of(cls, norm: Norm | None) -> CNorm:
        """Point at a norm's tensors, which the caller keeps alive."""
        return cls() if norm is None else cls(pointer(norm.weight), pointer(norm.bias))


class CLowRank(Structure):
    """Mirror of `QuadrigaLowRank`."""

    _fields_ = (("rank", c_int64), ("down", c_void_p), ("up", c_void_p))

    @classmethod
    def of(cls, lora: LowRank | None) -> CLowRank:
        """Point at an adapter's matrices, which the caller keeps alive."""
        if lora is None:
            return cls()
        return cls(lora.down.shape[0], pointer(lora.down), pointer(lora.up))


class CLayer(Structure):
    """Mirror of `QuadrigaLayer`."""

    _fields_ = (
        ("attn_norm", CNorm),
        ("qkv", CLinear),
        ("out", CLinear),
        ("mlp_norm", CNorm),
        ("up", CLinear),
        ("down", CLinear),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
        ("qkv_loras", POINTER(CLowRank)),
        ("out_loras", POINTER(CLowRank)),
        ("up_loras", POINTER(CLowRank)),
        ("down_loras", POINTER(CLowRank)),
    )


CGather = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_int64, c_int64)
"""See `QuadrigaModel.gather`."""


class CModel(Structure):
    """Mirror of `QuadrigaModel`."""

    _fields_ = (
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("ffn", c_int64),
        ("capacity", c_int64),
        ("layer_norm", c_int64),
        ("activation", c_int64),
        ("gated", c_int64),
        ("pre_norm", c_int64),
        ("norm_eps", c_double),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("layers", POINTER(CLayer)),
        ("depths", c_void_p),
        ("adapter_of", c_void_p),
        ("max_rank", c_int64),
        ("ranks", c_int64),
        ("gather", CGather),
    )


class CKVMap(Structure):
    """Mirror of `QuadrigaKVMap`."""

    _fields_ = (("norm", CNorm), ("kv", CLinear))


class CHead(Structure):
    """Mirror of `QuadrigaHead`."""

    _fields_ = (
        ("has_norm", c_int64),
        ("embed", c_int64),
        ("vocab", c_int64),
        ("mlp_width", c_int64),
        ("mlp_norm", CNorm),
        ("mlp_up", CLinear),
        ("mlp_down", CLinear),
        ("norm", CNorm),
        ("project", CMatrix),
        ("weight", CMatrix),
    )


class CDraft(Structure):
    """Mirror of `QuadrigaDraft`."""

    _fields_ = (
        ("count", c_int64),
        ("most", c_int64),
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("rooms", c_void_p),
        ("survivals", c_void_p),
        ("tokens", c_void_p),
        ("confidences", c_void_p),
        ("num_run", c_void_p),
        ("states", c_void_p),
        ("num_ends", c_int64),
        ("ends", c_void_p),
        ("num_edges", c_int64),
        ("edges", c_void_p),
        ("chances", c_void_p),
        ("least", c_double),
        ("token_s", c_double),
        ("needed_s", c_void_p),
        ("margin", c_int64),
    )


def pointer(tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Address of a tensor's data. Raises: ValueError unless it is contiguous `dtype` on the CPU."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"this kernel takes contiguous {dtype} CPU tensors, not {tensor.dtype}")
    return tensor.data_ptr()


class KernelLibrary:
    """A loaded library with its argument types declared.

    Attributes:
        code: Names its machine code: equal names compute alike, whatever compiled them where.
        loaded: The one that was loaded last in this process; None before, or where there is none.
    """

    loaded: ClassVar[KernelLibrary | None] = None

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.code = f"kernels {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, f"quadriga_{name}")
            found.argtypes, found.restype = arguments, result
            return found

        a_pass = (c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)
        model, head = POINTER(CModel), POINTER(CHead)
        self.pool_new = function("pool_new", c_void_p, c_int64)
        self.pool_free = function("pool_free", None, c_void_p)
        self.rows = function("rows", None, POINTER(CMatrix), c_int64, c_int64, c_void_p, c_void_p)
        self.scratch = function("scratch", c_int64, model, c_int64)
        self.layers = function("layers", None, c_void_p, model, *a_pass)
        outputs = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
        self.head = function("head", None, c_void_p, model, head, c_int64, *outputs)
        self.project_kv = function("project_kv", None, c_void_p, model, POINTER(CKVMap), *a_pass)
        self.draft_scratch = function("draft_scratch", c_int64, model, head, c_int64)
        tokens = (POINTER(CMatrix), c_void_p, c_int64)
        draft = (head, POINTER(CDraft), c_void_p)
        self.draft = function("draft", None, c_void_p, model, *tokens, *draft)
        self.ban = function("ban", None, c_int64, c_int64, c_void_p, c_int64, c_void_p)
        KernelLibrary.loaded = self
