"""Engines to compare with: one small adapter each, run in a process of its own.

An adapter module imports its engine and the standard library only, so that it also runs in another
interpreter, where that engine is installed (`--peer-python`).
"""

from __future__ import annotations

PEERS: dict[str, tuple[str, str]] = {
    "quadriga": ("loadgen.bench.engines.offline", "QuadrigaPeer"),
    "quadriga-plain": ("loadgen.bench.engines.offline", "QuadrigaPeer"),
    "transformers": ("loadgen.bench.engines.hf_transformers", "TransformersPeer"),
    "openvino": ("loadgen.bench.engines.openvino", "OpenVinoPeer"),
    "llama.cpp": ("loadgen.bench.engines.llama_cpp_peer", "LlamaCppPeer"),
}
"""Name → (module, class). `quadriga-plain` is our engine on what the other engines read: quantised
weights written out in float32."""

PROBES = {
    "quadriga": "torch",
    "quadriga-plain": "torch",
    "transformers": "transformers",
    "openvino": "openvino_genai",
    "llama.cpp": "llama_cpp",
}
"""Name → the module whose presence means that the peer is installed."""
