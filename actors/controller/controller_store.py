"""What outlives the controller's process: a few values in Ray's key-value store."""

from __future__ import annotations

from typing import Literal, get_args

from ray.experimental import internal_kv

from actors.rpc.ray_rpc import NAMESPACE

What = Literal["controller", "desired", "gpus", "metrics", "load_history", "history"]


def save(app: str, what: What, value: bytes) -> None:
    """Store a value in place of the last one; blocks for a round trip."""
    internal_kv._internal_kv_put(
        _key(app, what), value, overwrite=True, namespace=NAMESPACE.encode()
    )


def load(app: str, what: What) -> bytes | None:
    """Return what was stored; None where nothing was."""
    value: bytes | None = internal_kv._internal_kv_get(
        _key(app, what), namespace=NAMESPACE.encode()
    )
    return value


def forget(app: str) -> None:
    """Remove all that was stored for an application that ends."""
    for what in get_args(What):
        internal_kv._internal_kv_del(_key(app, what), namespace=NAMESPACE.encode())


def _key(app: str, what: What) -> bytes:
    return f"{app}:{what}".encode()
