"""Quadriga: early-exit language models, served on Ray or run in this process (`quadriga.LLM`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.checkpoint.exits import ExitParams
    from quadriga.core.grammar import Grammar
    from quadriga.core.request import SamplingParams
    from quadriga.core.request_output import RequestOutput
    from quadriga.llm import LLM

    __version__: str

_HOMES = {
    "LLM": "quadriga.llm",
    "Grammar": "quadriga.core.grammar",
    "RequestOutput": "quadriga.core.request_output",
    "SamplingParams": "quadriga.core.request",
    "ExitParams": "quadriga.checkpoint.exits",
}

__all__ = ["LLM", "ExitParams", "Grammar", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: the client needs neither torch nor pydantic."""
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("quadriga")
        except metadata.PackageNotFoundError:  # run from a checkout
            return "unknown"
    if name not in _HOMES:
        raise AttributeError(f"module 'quadriga' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
