"""What a form of the weights costs: perplexity, and how often the best token is float32's.

Every position of some texts is judged by the model in float32 and in the form: the probability it
gives to the token that follows, and the token it would have said. For the bundled models the texts
are tasks with their answers, for others this checkout's own documents; both without sampling, so a
run is the same everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.model_costs.engine import engine_spec
from quadriga.checkpoint.folder import Checkpoint, bundled_models
from quadriga.config.engine_spec import WeightForm
from quadriga.core.request import SamplingParams
from quadriga.errors import ConfigError
from quadriga.llm import LLM
from quadriga.tasks.registry import sample_examples
from quadriga.text import load_tokenizer

WINDOW_TOKENS = 512
NUM_WINDOWS = 16
_NUM_EXAMPLES = 600
_SEED = 5
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class FormQuality:
    """Of one form, over `num_tokens` positions.

    Attributes:
        perplexity: e to the mean of minus the log-probability of the token that follows.
        agreement: Share of the positions whose most probable token is that of float32.
    """

    perplexity: float
    agreement: float
    num_tokens: int


def measure_quality(
    checkpoint: Checkpoint, forms: Sequence[WeightForm], threads: int
) -> dict[WeightForm, FormQuality]:
    """Judge forms of one model's weights, float32 first. Raises: ConfigError: There is no text."""
    windows = _windows(checkpoint)
    reference: list[int] = []
    found: dict[WeightForm, FormQuality] = {}
    for form in dict.fromkeys(("float32", *forms)):
        total, best = _judge(checkpoint, form, threads, windows)
        reference = reference or best
        same = sum(a == b for a, b in zip(best, reference, strict=True))
        found[form] = FormQuality(math.exp(-total / len(best)), same / len(best), len(best))
    return found


def _judge(
    checkpoint: Checkpoint, form: WeightForm, threads: int, windows: list[list[int]]
) -> tuple[float, list[int]]:
    """Sum of the log-probabilities of all tokens, and the most probable one at each position."""
    from quadriga.engine import load_runner

    width = max(map(len, windows))
    spec = engine_spec(
        checkpoint, num_rows=1, row_capacity_tokens=width + 1, threads=threads, weights=form
    )
    llm = LLM.over(load_runner(spec))
    try:
        params = SamplingParams(0, temperature=0.0, num_prompt_logprobs=1)
        outputs = llm.generate(windows, params, progress=False)
    finally:
        llm.close()
    tokens = [t for output in outputs for t in (output.checked().prompt_logprobs or ())]
    judged = [t for t in tokens if t.logprob is not None]
    return math.fsum(t.logprob or 0.0 for t in judged), [t.top[0][0] for t in judged]


def _windows(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.id)
    if checkpoint.id in bundled_models():
        examples = itertools.islice(sample_examples(seed=_SEED), _NUM_EXAMPLES)
        return [tokenizer.encode(e.text + e.continuation) for e in examples]
    files = sorted((_ROOT / "docs").glob("*.md"))
    ids = tokenizer.encode("\n".join(file.read_text(encoding="utf-8") for file in files))
    width = min(WINDOW_TOKENS, checkpoint.max_model_len - 1)
    windows = [ids[i : i + width] for i in range(0, len(ids) - width, width)]
    if not windows:
        raise ConfigError(f"--weights: no text of {width} tokens to judge {checkpoint.id} by")
    step = max(1, len(windows) // NUM_WINDOWS)
    return windows[::step][:NUM_WINDOWS]
