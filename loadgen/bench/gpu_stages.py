"""What `loadgen.bench.gpu_acceptance` measures and compares: a function for each stage.

Each tells a result as soon as it has it, as a line of JSON: a stage that is stopped has told what
it found before.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadgen.bench.gpu_models import LLAMA_1B, LLAMA_8B, TINY, Shape, begin, load
from loadgen.report import provenance
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.checkpoint.model_config import read_model_config
from quadriga.core.request import SampledToken, SequenceState
from quadriga.engine.cuda.attention import choose_attention
from quadriga.engine.cuda.decoder import PagedDecoder
from quadriga.engine.cuda.graphs import CudaRecorder
from quadriga.engine.cuda.loading import load_paged
from quadriga.engine.cuda.paged_attention import PagedKV
from quadriga.engine.cuda.pages import PAGE_TOKENS
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.models.layers import TokenSpan
from quadriga.errors import ConfigError

Say = Callable[..., None]
BARS = {("llama-1b", 1): 0.5, ("llama-8b", 1): 0.7, ("llama-8b", 256): 0.65}
"""Least shares of the floor that count as fast enough."""
MODES = ("project", "copy", "replay")
_ROUNDS = 20
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a stage runs, and whether with tiny shapes."""

    device: torch.device
    rehearse: bool

    def pick(self, real: Any, tiny: Any) -> Any:
        """Of two values, the one to use."""
        return tiny if self.rehearse else real


def run(name: str, path: Path, *, rehearse: bool) -> None:
    """Run one stage; its results go to `path`, a line each."""
    device = torch.device("cpu") if rehearse else torch.device("cuda", 0)
    if rehearse:
        torch.set_num_threads(1)  # several wait for each other longer than tiny shapes compute
    with path.open("a") as file:

        def say(**result: Any) -> None:
            file.write(json.dumps(result) + "\n")
            file.flush()

        _STAGES[name](Setting(device, rehearse), say)


def environment(setting: Setting, say: Say) -> None:
    """Device, driver, versions, commit."""
    packages = ("torch", "triton", "flash-attn", "transformers", "cupy-cuda13x", "cupy-cuda12x")
    say(
        commit=provenance.commit(),
        machine=provenance.machine(),
        versions=provenance.versions(*packages, "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        cuda=torch.version.cuda,
    )
    if setting.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setting.device)
        free, total = torch.cuda.mem_get_info(setting.device)
        say(
            gpu=properties.name,
            capability=list(torch.cuda.get_device_capability(setting.device)),
            processors=properties.multi_processor_count,
            free_bytes=free,
            total_bytes=total,
        )


def ceilings(setting: Setting, say: Say) -> None:
    """What the device can do: copy, read, multiply, and start the nodes of a graph."""
    size = setting.pick(8 << 30, 1 << 20)
    data = torch.ones(size // 2, dtype=torch.bfloat16, device=setting.device)
    other = torch.empty_like(data)
    gpu_s, _ = timed(setting, partial(other.copy_, data))
    say(what="copy", gb_per_s=round(2 * size / gpu_s / 1e9, 1))
    gpu_s, _ = timed(setting, partial(torch.sum, data))
    say(what="read", gb_per_s=round(size / gpu_s / 1e9, 1))
    del data, other
    for side in setting.pick((1024, 4096, 8192), (64,)):
        a = torch.randn(side, side, dtype=torch.bfloat16, device=setting.device)
        gpu_s, _ = timed(setting, partial(torch.matmul, a, a))
        say(what="gemm", dtype="bfloat16", side=side, tflops=round(2 * side**3 / gpu_s / 1e12, 2))
    if setting.device.type == "cuda":
        few, many = (_graph_of(setting, nodes) for nodes in (100, 1100))
        say(what="graph node", us=round((many - few) / 1000 * 1e6, 3))


def _graph_of(setting: Setting, nodes: int) -> float:
    """Seconds of a graph of kernels on one number each."""
    x = torch.zeros(1, device=setting.device)

    def work() -> None:
        for _ in range(nodes):
            x.add_(1)

    recorder = CudaRecorder(setting.device)
    replay = recorder.record(work)
    gpu_s, _ = timed(setting, replay)
    recorder.close()
    return gpu_s


def read_rate(setting: Setting) -> float:
    """Bytes a second that a sum reads."""
    size = setting.pick(4 << 30, 1 << 20)
    data = torch.ones(size // 4, dtype=torch.float32, device=setting.device)
    gpu_s, _ = timed(setting, data.sum)
    return float(size / gpu_s)


def attention(setting: Setting, say: Say) -> None:
    """Decode attention alone: bytes of KV a second, by head size, batch and context."""
    rate = read_rate(setting)
    for name in setting.pick(("flash", "triton"), ("torch",)):
        for head in setting.pick((64, 128), (16,)):
            shape = TINY if setting.rehearse else Shape("", 1, 4096, 1, 32, 8, head, 1)
            config = shape.config
            try:
                mixer = choose_attention(name, config, torch.bfloat16, setting.device)
            except ConfigError as exc:
                say(attention=name, head=head, left_out=exc.message)
                continue
            for batch, context in setting.pick(
                [(b, c) for b in (1, 32, 256) for c in (1024, 8192)], [(2, 40)]
            ):
                blocks = -(-context // PAGE_TOKENS)
                pages = torch.arange(batch * blocks, dtype=torch.int32, device=setting.device)
                pool = (batch * blocks, PAGE_TOKENS, config.num_kv_heads, config.head_dim)
                zeros = partial(torch.zeros, dtype=torch.bfloat16, device=setting.device)
                kv = PagedKV(zeros(pool), zeros(pool), pages.view(batch, blocks))
                q = zeros((batch, config.num_heads, config.head_dim))
                lengths = torch.full((batch,), context, dtype=torch.int32, device=setting.device)

                step = partial(mixer.each, q, kv, lengths, context, 0)
                with recorded(setting, step) as replay:
                    gpu_s, _ = timed(setting, replay)
                size = 4 * batch * context * config.kv_size
                say(
                    attention=name,
                    head=config.head_dim,
                    batch=batch,
                    context=context,
                    us=round(gpu_s * 1e6, 2),
                    gb_per_s=round(size / gpu_s / 1e9, 1),
                    share_of_read=round(size / gpu_s / rate, 3),
                )
                del kv


def decode_1b(setting: Setting, say: Say) -> None:
    """Decode steps of Llama's 1B."""
    _decode(setting, say, LLAMA_1B)


def decode_8b(setting: Setting, say: Say) -> None:
    """Decode steps of Llama's 8B."""
    _decode(setting, say, LLAMA_8B)


def _decode(setting: Setting, say: Say, shape: Shape) -> None:
    """Steps of the whole model at each batch size: time, share of the floor, kernels, waits."""
    shape = setting.pick(shape, TINY)
    rate = read_rate(setting)
    context = setting.pick(1024, 20)
    room = 2 * (_ROUNDS + 2 * _WARM_UP + 4)
    capacity = context + room
    batches = setting.pick((1, 32, 256), (1, 3))
    started_s = time.perf_counter()
    runner = load(shape, setting.device, rows=max(batches), capacity=capacity)
    say(model=shape.name, loaded_s=round(time.perf_counter() - started_s, 1), **facts(runner))
    for batch in batches:
        states = begin(runner, batch, context, room)
        rows = list(range(batch))

        step = partial(_decode_once, runner, states)
        gpu_s, wall_s = timed(setting, step)
        values = shape.step_values + batch * context * shape.token_values
        share = 2 * values / rate / wall_s
        bar = BARS.get((shape.name, batch))
        say(
            model=shape.name,
            batch=batch,
            context=context,
            gpu_ms=round(gpu_s * 1e3, 3),
            wall_ms=round(wall_s * 1e3, 3),
            tokens_per_s=round(batch / wall_s, 1),
            share_of_floor=round(share, 3),
            bar=bar,
            is_met=None if bar is None else share >= bar,
            **counted(setting, step),
        )
        for row in rows:
            runner.detach(row)
    runner.close()


def _decode_once(runner: NativeRunner, states: Sequence[SequenceState]) -> None:
    """A token of every row."""
    add(states, runner.decode(list(range(len(states)))))


def _leave(runner: NativeRunner, states: Sequence[SequenceState], count: int) -> None:
    """A token of every row; `count` of them leave at the first exit.

    Other rows leave each time, so that all of them have something to make up for.
    """
    turn = len(states[0].output_ids) % len(states)
    order = [*range(turn, len(states)), *range(turn)]
    early, late = sorted(order[:count]), sorted(order[count:])
    runner.advance(list(range(len(states))), 0, 1)
    if early:
        add([states[row] for row in early], runner.emit(early))
    if late:
        runner.advance(late, 1, 2)
        add([states[row] for row in late], runner.emit(late))


def exits(setting: Setting, say: Say) -> None:
    """A token of every row, of which a forced share leaves halfway, in each way to fill KV."""
    shape = setting.pick(LLAMA_1B, TINY)
    batch, context = setting.pick(32, 4), setting.pick(1024, 20)
    room = 4 * (_ROUNDS + 2 * _WARM_UP + 4)
    for mode in MODES:
        runner = load(
            shape,
            setting.device,
            rows=batch,
            capacity=context + room,
            exits=(shape.layers // 2,),
            skipped_kv=mode,
        )
        for share in (0.0, 0.5, 1.0):
            states = begin(runner, batch, context, room)
            step = partial(_leave, runner, states, int(share * batch))
            gpu_s, wall_s = timed(setting, step)
            before = runner.num_filled
            step()
            say(
                model=shape.name,
                mode=mode,
                left_early=share,
                batch=batch,
                gpu_ms=round(gpu_s * 1e3, 3),
                wall_ms=round(wall_s * 1e3, 3),
                filled=runner.num_filled - before,
                **counted(setting, step),
            )
            for row in range(batch):
                runner.detach(row)
        runner.close()
        del runner
        clear(setting)


def logits(setting: Setting, say: Say) -> None:
    """Teacher-forced logits of the bundled models: how far from float64's, device and host.

    What a precision does to a text that no model has seen is the model's: on the host it is the
    same. The device may be off by half as much again.
    """
    from transformers import AutoModelForCausalLM

    host, loader = torch.device("cpu"), AutoModelForCausalLM
    for name in setting.pick(("quadriga-s", "quadriga-l"), ("quadriga-s",)):
        path = read_checkpoint(name).path
        model: Any = loader.from_pretrained(path, dtype=torch.float64)
        size = model.config.vocab_size - 3
        ids = [3 + 7 * i % size for i in range(setting.pick(300, 40))]
        with torch.inference_mode():
            exact = model(torch.tensor([ids])).logits[0]
        for dtype in setting.pick(("float32", "bfloat16"), ("float32",)):
            of_host = _off(bundled(name, host, dtype, "torch"), ids, exact)
            say(model=name, dtype=dtype, attention="torch on the host", **of_host)
            for who in setting.pick(("triton", "flash"), ("torch",)):
                try:
                    runner = bundled(name, setting.device, dtype, who)
                except ConfigError as exc:
                    say(model=name, dtype=dtype, attention=who, left_out=exc.message)
                    continue
                found = _off(runner, ids, exact)
                is_right = found["mean_error"] <= 1.5 * of_host["mean_error"]
                say(model=name, dtype=dtype, attention=who, **found, is_right=is_right)


def _off(runner: NativeRunner, ids: Sequence[int], exact: torch.Tensor) -> dict[str, Any]:
    """How far a runner's logits are from the exact ones; closes it."""
    got = _forced(runner, ids)
    runner.close()
    error, best = (got - exact).abs(), exact.max(-1).values
    chosen = exact.gather(1, got.argmax(-1, keepdim=True))[:, 0]
    return {
        "positions": len(ids),
        "largest_error": float(error.max()),
        "mean_error": float(error.mean()),
        "other_best": int((best > chosen).sum()),
        "largest_gap": float((best - chosen).max()),
    }


def _forced(runner: NativeRunner, ids: Sequence[int]) -> torch.Tensor:
    """Logits behind every position of a prompt, half of it in one run and half token by token."""
    decoder = runner.model.decoder
    assert isinstance(decoder, PagedDecoder)
    half = len(ids) // 2
    found = []
    with torch.inference_mode():
        batch = decoder.plan([TokenSpan(0, 0, half, 0)])
        x = decoder.begin(ids[:half], batch, runner.num_layers)
        found.append(decoder.logits(x, runner.num_layers).cpu())
        for position in range(half, len(ids)):
            batch = decoder.plan_tokens(np.array([0]), np.array([position]))
            x = decoder.begin([ids[position]], batch, runner.num_layers)
            found.append(decoder.logits(x, runner.num_layers).clone().cpu())
    return torch.cat(found)


def graphs(setting: Setting, say: Say) -> None:
    """The same sequences with graphs and without, in float32: every logit is the same number."""
    who = setting.pick("triton", "torch")
    for batch in setting.pick((1, 8), (2,)):
        said = []
        for compile in ("off", "auto"):
            runner = bundled("quadriga-s", setting.device, "float32", who, batch, compile)
            states = begin(runner, batch, 30, 64)
            rows, found = list(range(batch)), []
            for _ in range(setting.pick(24, 3)):
                add(states, runner.decode(rows))
                with torch.inference_mode():
                    exited = runner.exited
                    assert exited is not None
                    found.append(exited.of_states.cpu().clone())
            said.append(([s.output_ids for s in states], torch.stack(found)))
            runner.close()
        say(
            batch=batch,
            is_same=said[0][0] == said[1][0] and torch.equal(said[0][1], said[1][1]),
            largest_difference=float((said[0][1] - said[1][1]).abs().max()),
        )


def rivals(setting: Setting, say: Say) -> None:
    """`transformers` on the same shape: eager, and compiled with a static cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = setting.pick(LLAMA_1B, TINY)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.device(setting.device):
        model: Any = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    context, steps = setting.pick(1024, 20), setting.pick(64, 4)
    # Compiling for a CPU would need a compiler, and is no rehearsal of anything.
    for cache in setting.pick(("dynamic", "static"), ("dynamic",)):
        for batch in setting.pick((1, 32), (2,)):
            ids = torch.full((batch, context), 5, device=setting.device)

            generate = partial(_generate, setting, model, ids, cache)
            first_s = generate(1 + steps)
            # What the prompt takes is subtracted.
            times = [(generate(1 + steps) - generate(1)) / steps for _ in range(3)]
            say(
                rival=f"transformers, {cache} cache",
                model=shape.name,
                batch=batch,
                context=context,
                wall_ms=round(statistics.median(times) * 1e3, 3),
                first_s=round(first_s, 1),
            )


def _generate(setting: Setting, model: Any, ids: torch.Tensor, cache: str, count: int) -> float:
    """Seconds in which a model of `transformers` generates so many tokens."""
    started_s = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=cache,
        )
    settle(setting)
    return time.perf_counter() - started_s


_STAGES: dict[str, Callable[[Setting, Say], None]] = {
    stage.__name__: stage
    for stage in (
        environment,
        ceilings,
        attention,
        decode_1b,
        decode_8b,
        exits,
        logits,
        graphs,
        rivals,
    )
}


def bundled(
    name: str,
    device: torch.device,
    dtype: str,
    attention: str,
    rows: int = 1,
    compile: str = "auto",
) -> NativeRunner:
    """A bundled model with the GPU's pages. Raises: ConfigError: Not with this attention."""
    from loadgen.model_costs.engine import engine_spec

    checkpoint = read_checkpoint(name)
    spec = engine_spec(
        checkpoint,
        num_rows=rows,
        row_capacity_tokens=512,
        dtype=dtype,
        compile=compile,
        attention=attention,
        device=device.type,
    )
    return NativeRunner(load_paged(spec, read_model_config(checkpoint.path), device))


def facts(runner: NativeRunner) -> dict[str, Any]:
    """How the runner computes."""
    decoder = runner.model.decoder
    assert isinstance(decoder, PagedDecoder)
    return {
        "attention": decoder.attention.name,
        "operations": type(decoder.operations).__name__,
        "graphs": 0 if decoder.graphs is None else decoder.graphs.num_recorded,
    }


def add(states: Sequence[SequenceState], tokens: Sequence[SampledToken]) -> None:
    """Let the tokens be the sequences' newest."""
    for state, token in zip(states, tokens, strict=True):
        state.output_ids.append(token.token_id)


def void(_: object) -> None:
    """Let a result go."""


def settle(setting: Setting) -> None:
    """Wait for the device."""
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)


def clear(setting: Setting) -> None:
    """Give back what nobody uses."""
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def recorded(setting: Setting, work: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """The work as a graph; as it is where there are none, or it cannot be one."""
    if setting.device.type != "cuda":
        yield work
        return
    recorder = CudaRecorder(setting.device)
    try:
        replay: Callable[[], object] = recorder.record(lambda: void(work()))
    except RuntimeError:
        replay = work
    yield replay
    recorder.close()


def timed(setting: Setting, work: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of one call: by the device's events, and as the caller waits."""
    rounds = setting.pick(_ROUNDS, 2)
    gpu, wall = [], []
    is_gpu = setting.device.type == "cuda"
    for index in range(_WARM_UP + rounds):
        settle(setting)
        begun: Any = None
        ended: Any = None
        if is_gpu:
            event: Any = torch.cuda.Event
            begun, ended = event(enable_timing=True), event(enable_timing=True)
            begun.record()
        started_s = time.perf_counter()
        work()
        if is_gpu:
            ended.record()
        settle(setting)
        took_s = time.perf_counter() - started_s
        if index >= _WARM_UP:
            wall.append(took_s)
            gpu.append(begun.elapsed_time(ended) / 1e3 if is_gpu else took_s)
    return max(statistics.median(gpu), 1e-9), max(statistics.median(wall), 1e-9)


def counted(setting: Setting, work: Callable[[], object]) -> dict[str, int | None]:
    """Kernels that one call runs, in graphs or not, and how often the host waits in it."""
    if setting.device.type != "cuda":
        work()
        return {"kernels": None, "waits": None}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(w.message) for w in seen)
    try:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            work()
            settle(setting)
        ran = [e for e in profile.events() or () if "CUDA" in str(e.device_type)]
        kernels = sum(not e.name.startswith(("Memcpy", "Memset")) for e in ran)
    except RuntimeError:  # no profiler here
        return {"kernels": None, "waits": waits}
    return {"kernels": kernels, "waits": waits}
