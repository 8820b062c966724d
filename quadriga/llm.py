"""Offline generation in one process: a model, loaded and scheduled as a replica does it.

    llm = LLM("quadriga-s", decode={"max_slots": 64})
    for output in llm.generate(["Sort: 42 7 19 3 88\n", "Count from 3 to 20.\n"]):
        print(output.text, output.exit_layers)

No Ray and no service: the loops are `quadriga.scheduling`'s, over the runner that a decode replica
with the same settings would load. torch comes with the first model, not with this module.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quadriga.checkpoint.exits import ExitCounters, ExitParams
from quadriga.clock import SystemClock
from quadriga.config.pacing import find_profile
from quadriga.core.output import EngineOutput
from quadriga.core.replica import Role
from quadriga.core.request import FinishReason, SamplingParams, SequenceState
from quadriga.core.request_output import RequestOutput
from quadriga.engine import load_runner
from quadriga.errors import ConfigError
from quadriga.input_processor import InputProcessor, Prompt
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.scheduling.calibration import calibrate
from quadriga.scheduling.colocated import ColocatedLoop
from quadriga.scheduling.paced_runner import PacedRunner
from quadriga.text import AnswerText, TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from quadriga.engine import AnyRunner

SETTINGS = ("depth", "runner", "exits", "adapters", "engine", "prefill", "decode", "deterministic")


class LLM:
    """A model in this process, and its batch.

    Args:
        model: Bundled id, checkpoint folder, GGUF file or hub id.
        settings: Those of the service's settings that have a meaning here, which `SETTINGS` names:
            sections as mappings, `engine={"threads": 2}`, or dotted, `**{"engine.threads": 2}`.

    Attributes:
        tokenizer: None for one made by `over`.
        loop: The loops under it; `loop.decode.counters` has what happened at the exits.

    Not thread-safe. Several streams of one LLM may be read in turn; they share the batch. From
    then on torch computes with `engine.threads` threads in all of the process.

    Raises:
        ConfigError: A setting is wrong or has no meaning here, or the model cannot be loaded.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        from quadriga.config.loader import load_config, setting_names

        known = {"pools", *(name.split(".")[0] for name in setting_names())}
        for name in known.intersection(name.split(".")[0] for name in settings) - {*SETTINGS}:
            taken = ", ".join(SETTINGS)
            raise ConfigError(f"{name}: an LLM takes {taken} alone; leave it out", param=name)
        import torch

        from quadriga.config.resolve import Hardware, resolve

        config = load_config({"model": str(model), **settings})
        deployment = resolve(config, Hardware(os.cpu_count() or 1, torch.cuda.device_count()))
        replicas = deployment.replicas
        chunk_tokens = next(r.engine.pass_tokens for r in replicas if r.role.does(Role.PREFILL))
        decoding = next(r.engine for r in replicas if r.role.does(Role.DECODE))
        text = load_tokenizer(decoding.checkpoint.path, decoding.checkpoint.id)  # before gigabytes
        runner = load_runner(replace(decoding, pass_tokens=chunk_tokens))
        spec, pace, clock, counters = runner.spec, config.decode.pace, SystemClock(), ExitCounters()
        passes = runner if pace is None else PacedRunner(runner, find_profile(pace))
        loop = ColocatedLoop(
            passes,
            spec,
            clock=clock,
            chunk_tokens=chunk_tokens,
            max_age_s=config.prefill.max_age_s,
            reservation=config.decode.reservation,
            rebatcher=make_rebatcher(
                config.decode.rebatching,
                calibrate(passes, clock, max_rows=runner.num_rows),
                counters,
                deterministic=config.deterministic,
                clock=clock,
            ),
            counters=counters,
            is_partial=spec.depth < spec.checkpoint.num_layers,
            prefix_caching=config.prefill.prefix_caching,
        )
        self._open(runner, loop, text, deterministic=config.deterministic)

    @classmethod
    def over(cls, runner: AnyRunner, *, max_slots: int | None = None) -> LLM:
        """Make one of a runner that is there: every token runs all its layers, and has no text."""
        made = cls.__new__(cls)
        loop = ColocatedLoop(runner, runner.spec, clock=SystemClock(), max_slots=max_slots)
        made._open(runner, loop, None)
        return made

    def _open(
        self,
        runner: AnyRunner,
        loop: ColocatedLoop,
        text: TextTokenizer | None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.runner, self.loop, self.tokenizer = runner, loop, text
        self._inputs = InputProcessor(
            runner.spec, runner.row_capacity_tokens, text, deterministic=deterministic
        )
        self._clock = SystemClock()

    def close(self) -> None:
        """Give back what the engine holds beside Python's memory, as the end of `with` does."""
        self.runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        exits: ExitParams | None = None,
        stop: Sequence[str] = (),
        progress: bool | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Generate for all prompts, as many at once as there are slots; returns them in order.

        Args:
            sampling_params: For all, or one for each; None is what the checkpoint recommends, up
                to the end of the context. Draws depend on seed and position: the same prompt and
                seed have the same tokens.
            exits: None is what `exits.mode` says: by default `lossless`, full depth's tokens.
            stop: Strings that end an answer.
            progress: Show a bar; None: where stderr is a terminal.
            adapter: One of the LoRA adapters in `adapters`; empty: the model alone.

        Raises:
            InvalidRequest, ContextTooLong: A prompt cannot be served; nothing was generated. What
                fails on its way, over its grammar say, is the `error` of its output alone.
        """
        from tqdm import tqdm

        states = self._inputs.sequences(prompts, sampling_params, exits, stop, adapter)
        texts = self._inputs.answer_texts(prompts, states, stop)
        outputs = [RequestOutput(index) for index in range(len(states))]
        is_hidden = None if progress is None else not progress
        started_s = self._clock.now_s()
        with (
            tqdm(total=len(states), unit="prompt", disable=is_hidden) as bar,
            closing(self._run(states, texts)) as said,
        ):
            for index, emission, text in said:
                output = outputs[index]
                if not output.token_ids:
                    output.ttft_s = self._clock.now_s() - started_s
                output.add(emission, text)
                if emission.finish is not None or emission.error is not None:
                    bar.update()
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        exits: ExitParams | None = None,
        stop: Sequence[str] = (),
        adapter: str = "",
    ) -> Generator[RequestOutput]:
        """Generate as `generate` does, and yield what is new of any prompt as it comes.

        Closing the generator frees what it holds in the batch.
        """
        states = self._inputs.sequences(prompts, sampling_params, exits, stop, adapter)
        texts = self._inputs.answer_texts(prompts, states, stop)

        def outputs() -> Generator[RequestOutput]:
            with closing(self._run(states, texts)) as said:
                for index, emission, text in said:
                    output = RequestOutput(index)
                    output.add(emission, text)
                    yield output

        return outputs()

    def _run(
        self, states: list[SequenceState], texts: list[AnswerText]
    ) -> Generator[tuple[int, EngineOutput, str]]:
        """Run the sequences of one call; yields (index, what is new, its text)."""
        places = {state.sequence_id: index for index, state in enumerate(states)}
        with closing(self.loop.run(states)) as passes:
            for emission in itertools.chain.from_iterable(passes):
                index, text = places[emission.sequence_id], ""
                if texts and texts[index].is_stopped:
                    continue  # of passes that other calls ran meanwhile
                if texts:
                    text = texts[index].read(emission)
                    if texts[index].is_stopped:
                        self.loop.release(emission.sequence_id)
                        emission.finish = FinishReason.STOP
                yield index, emission, text
