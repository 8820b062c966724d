"""Who runs a model's passes: the schedulers and the engine, and nobody who only wants tokens."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = ("loadgen", "serve_app", "deploy", "examples")
MEASURED = ("loadgen/bench/gpu_stages.py",)
"""What wants the time of a pass, and no tokens."""
TEXT = ("raw", "decoder", "tokenizer", "engine_client")
"""What decodes text, by the last word of its name."""


def passes(source: str) -> Iterator[str]:
    """Calls of `prefill` and `decode` that are no decoding of text, as `line: call`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        receiver = ast.unparse(node.func.value).split(".")[-1].lstrip("_")
        is_text = receiver in TEXT or not node.args or isinstance(node.args[0], ast.Constant)
        if node.func.attr == "prefill" or (node.func.attr == "decode" and not is_text):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_nothing_outside_the_library_and_the_replicas_runs_passes() -> None:
    """What generates goes through `quadriga.LLM` or `ColocatedLoop`, as replicas schedule."""
    found = {
        f"{file.relative_to(ROOT)}:{call}"
        for folder in OUTSIDE
        for file in (ROOT / folder).rglob("*.py")
        if str(file.relative_to(ROOT)) not in MEASURED
        for call in passes(file.read_text(encoding="utf-8"))
    }
    assert not found


def test_a_private_loop_would_be_found() -> None:
    source = (
        'runner.prefill([chunk])\nself._runner.decode(rows)\ntokenizer.decode(ids)\nb"".decode()'
    )
    assert [line.split(":")[0] for line in passes(source)] == ["1", "2"]
