"""Engines to compare with: one small adapter each, run in a process of its own.

An adapter module imports its engine and the standard library only, so that it also runs in another
interpreter, where that engine is installed (`--peer-python`).
"""

from __future__ import annotations

PEERS: dict[str, tuple[str, str]] = {
    "quadriga": ("loadgen.bench.offline", "QuadrigaPeer"),
    "quadriga-plain": ("loadgen.bench.offline", "QuadrigaPeer"),
    "transformers": ("loadgen.bench.peers.hf_transformers", "TransformersPeer"),
    "openvino": ("loadgen.bench.peers.openvino", "OpenVinoPeer"),
    "ctranslate2": ("loadgen.bench.peers.ctranslate2", "CTranslate2Peer"),
    "vllm": ("loadgen.bench.peers.vllm_cpu", "VllmPeer"),
}
"""Name → (module, class). `quadriga-plain` is our engine on what the other engines read: quantised
weights written out in float32."""

PROBES = {
    "quadriga": "torch",
    "quadriga-plain": "torch",
    "transformers": "transformers",
    "openvino": "openvino_genai",
    "ctranslate2": "ctranslate2",
    "vllm": "vllm",
}
"""Name → the module whose presence means that the peer is installed."""
