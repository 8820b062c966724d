"""Offline generation in one process: a model, loaded and scheduled as a replica does it.

    llm = LLM("quadriga-s", decode={"max_slots": 64})
    for output in llm.generate(["Sort: 42 7 19 3 88\n", "Count from 3 to 20.\n"]):
        print(output.text, output.exit_layers)

No Ray and no service: the loops are `quadriga.scheduling`'s, over the runner that a decode replica
with the same settings would load. torch comes with the first model, not with this module.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quadriga.checkpoint.exits import ExitCounters, ExitParams, read_exit_params
from quadriga.clock import SystemClock
from quadriga.config.pacing import find_profile
from quadriga.core.output import EngineOutput, RequestOutput
from quadriga.core.replica import Role
from quadriga.core.request import FinishReason, SamplingParams, SequenceState
from quadriga.engine import load_runner
from quadriga.errors import ConfigError, ContextTooLong, InvalidRequest, UnknownModel
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.scheduling.calibration import calibrate
from quadriga.scheduling.colocated import ColocatedLoop
from quadriga.scheduling.paced_runner import PacedRunner
from quadriga.text import AnswerText, TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from quadriga.engine import AnyRunner

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or a conversation: messages with `role` and `content`."""
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

    Not thread-safe. Several streams of one LLM may be read in turn; they share the batch.

    Raises:
        ConfigError: A setting is wrong or has no meaning here, or the model cannot be loaded.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        for name in {name.split(".")[0] for name in settings}.difference(SETTINGS):
            known = ", ".join(SETTINGS)
            raise ConfigError(f"{name}: an LLM takes {known} alone; leave it out", param=name)
        import torch

        from quadriga.config.loader import load_config
        from quadriga.config.resolve import Hardware, resolve

        config = load_config({"model": model, **settings})
        deployment = resolve(config, Hardware(os.cpu_count() or 1, torch.cuda.device_count()))
        decoding = next(r.engine for r in deployment.replicas if r.role.does(Role.DECODE))
        runner = load_runner(decoding)
        spec, pace, clock, counters = runner.spec, config.decode.pace, SystemClock(), ExitCounters()
        passes = runner if pace is None else PacedRunner(runner, find_profile(pace))
        loop = ColocatedLoop(
            passes,
            spec,
            clock=clock,
            chunk_tokens=config.prefill.chunk_tokens,
            max_age_s=config.prefill.max_age_s,
            reservation=config.decode.reservation,
            rebatcher=make_rebatcher(
                config.decode.rebatching,
                calibrate(passes, clock, max_rows=runner.num_rows),
                counters,
                deterministic=config.deterministic,
            ),
            counters=counters,
            is_partial=spec.depth < spec.checkpoint.num_layers,
            prefix_caching=config.prefill.prefix_caching,
        )
        text = load_tokenizer(spec.checkpoint.path, spec.checkpoint.id)
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
        self._is_deterministic = deterministic
        self._clock, self._names = SystemClock(), itertools.count()

    def close(self) -> None:
        """Give back what the engine holds beside Python's memory; it generates no more."""
        self.runner.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        exits: ExitParams | None = None,
        stop: Sequence[str] = (),
        progress: bool | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Generate for all prompts, as many at once as there are slots; returns them in order.

        Args:
            sampling: For all, or one for each; None is what the checkpoint recommends, up to the
                end of the context. Draws depend on seed and position: the same prompt and seed
                have the same tokens.
            exits: None is what `exits.mode` says: by default `lossless`, full depth's tokens.
            stop: Strings that end an answer.
            progress: Show a bar; None: where stderr is a terminal.
            adapter: One of the LoRA adapters in `adapters`; empty: the model alone.

        Raises:
            InvalidRequest, ContextTooLong: A prompt cannot be served; nothing was generated.
        """
        from tqdm import tqdm

        states = self._states(prompts, sampling, exits, stop, adapter)
        outputs = [RequestOutput(index) for index in range(len(states))]
        is_hidden = None if progress is None else not progress
        started_s = self._clock.now_s()
        with (
            tqdm(total=len(states), unit="prompt", disable=is_hidden) as bar,
            closing(self._run(states, stop)) as said,
        ):
            for index, emission, text in said:
                output = outputs[index]
                if not output.token_ids:
                    output.ttft_s = self._clock.now_s() - started_s
                output.add(emission, text)
                if emission.finish is not None:
                    bar.update()
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        exits: ExitParams | None = None,
        stop: Sequence[str] = (),
        adapter: str = "",
    ) -> Generator[RequestOutput]:
        """Generate as `generate` does, and yield what is new of any prompt as it comes.

        Closing the generator frees what it holds in the batch.
        """
        states = self._states(prompts, sampling, exits, stop, adapter)

        def outputs() -> Generator[RequestOutput]:
            with closing(self._run(states, stop)) as said:
                for index, emission, text in said:
                    output = RequestOutput(index)
                    output.add(emission, text)
                    yield output

        return outputs()

    def _run(
        self, states: list[SequenceState], stop: Sequence[str]
    ) -> Generator[tuple[int, EngineOutput, str]]:
        """Run the sequences of one call; yields (index, what is new, its text)."""
        places = {state.sequence_id: index for index, state in enumerate(states)}
        tokenizer, stops = self.tokenizer, tuple(stop)
        texts = [AnswerText(tokenizer.detokenizer(), stops) for _ in states] if tokenizer else []
        with closing(self.loop.run(states)) as passes:
            for emission in itertools.chain.from_iterable(passes):
                if emission.error is not None:
                    raise emission.error
                index, text = places[emission.sequence_id], ""
                if texts:
                    text = texts[index].read(emission)
                    if texts[index].is_stopped:
                        self.loop.release(emission.sequence_id)
                        emission.finish = FinishReason.STOP
                yield index, emission, text

    def _states(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        exits: ExitParams | None,
        stop: Sequence[str],
        adapter: str,
    ) -> list[SequenceState]:
        """Read and check a call. Raises: InvalidRequest, ContextTooLong, UnknownModel."""
        self._check_adapter(adapter)
        one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int | Mapping))
        asked: Sequence[Any] = [prompts] if one else prompts
        given = sampling if isinstance(sampling, Sequence) else [sampling] * len(asked)
        if len(given) != len(asked):
            raise InvalidRequest(
                f"sampling: {len(given)} for {len(asked)} prompts; give one, or one for each",
                param="sampling",
            )
        if isinstance(stop, str) or not all(stop) or (stop and self.tokenizer is None):
            raise InvalidRequest(
                f"stop: must be strings that are not empty, of an LLM with text; got {stop!r:.80}",
                param="stop",
            )
        spec = self.runner.spec
        wanted = read_exit_params(
            exits,
            spec.exits,
            spec.checkpoint.id,
            depth=spec.depth,
            full=spec.checkpoint.num_layers,
            deterministic=self._is_deterministic,
        )
        states = [
            self._state(prompt, params, wanted, f"prompts.{index}")
            for index, (prompt, params) in enumerate(zip(asked, given, strict=True))
        ]
        for state in states:
            state.adapter = adapter
        return states

    def _check_adapter(self, name: str) -> None:
        """Raises: UnknownModel: There is no such adapter."""
        known = [adapter.name for adapter in self.runner.spec.adapters]
        if name and name not in known:
            raise UnknownModel(
                f"adapter: {name!r:.80} is not loaded; loaded: {', '.join(known) or 'none'}",
                param="adapter",
            )

    def _state(
        self, prompt: Prompt, sampling: SamplingParams | None, exits: ExitParams, field: str
    ) -> SequenceState:
        checkpoint, most = self.runner.spec.checkpoint, self.runner.row_capacity_tokens
        ids = self.tokenizer.prompt_ids(prompt) if self.tokenizer else list[Any](prompt)
        wrong = [t for t in ids if not isinstance(t, int) or not 0 <= t < checkpoint.vocab_size]
        if wrong or not ids:
            what = f"{wrong[0]!r:.40} is no token id" if wrong else "has no tokens"
            raise InvalidRequest(
                f"{field}: {what}; ids are whole numbers below {checkpoint.vocab_size}", param=field
            )
        if sampling is None:
            sampling = SamplingParams(max(1, most - len(ids)), **asdict(checkpoint.sampling))
        sampling.check()
        if sampling.grammar is not None:
            from quadriga.text.grammar import grammars_of  # as torch, not with this module

            grammars_of(checkpoint).prepare(sampling.grammar)
        if sampling.pooling is not None and self.runner.num_layers < checkpoint.num_layers:
            raise InvalidRequest(
                f"pooling: embeddings need all {checkpoint.num_layers} layers of {checkpoint.id}, "
                f"and {self.runner.num_layers} are loaded; leave depth out",
                param="pooling",
            )
        if len(ids) + sampling.max_tokens > most:
            raise ContextTooLong(
                f"{field}: {len(ids)} tokens and max_tokens ({sampling.max_tokens}) are more than "
                f"the {most} that {checkpoint.id} takes here; shorten it or lower max_tokens",
                param=field,
            )
        name, model = str(next(self._names)), checkpoint.id
        return SequenceState(name, name, model, ids, sampling, "", 0.0, math.inf, exits)
