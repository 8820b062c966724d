"""The layers an engine has loaded, what runs them, and how they become more or fewer.

Of rows and sequences nothing is known here: who may change the depth when is the runner's business.
"""

from __future__ import annotations

import threading

from quadriga.config.engine_spec import EngineSpec
from quadriga.engine.compiled import CompiledDecoder, Kernels, KernelSwap
from quadriga.engine.cuda.decoder import PagedDecoder
from quadriga.engine.depth import (
    PreparedLayers,
    check_depth,
    let_go,
    prepare,
    resizable,
    shallower,
    spec_at,
)
from quadriga.engine.kv_cache import KVCache
from quadriga.engine.models.decoder import AnyDecoder, Decoder
from quadriga.engine.weights.checkpoint_weights import ModelWeights
from quadriga.errors import ConfigError


class LoadedModel:
    """Weights, KV memory and decoders of one model, at one depth at a time.

    One thread calls everything except `prepare_depth` and the waits.

    Attributes:
        spec: What is loaded now.
        config: The whole model's.
        ends: Layers run at the end of each segment, ascending; the last is the depth.
        cache: Of the layers that are loaded.
        decoder: What the last pass ran on.
    """

    def __init__(
        self, spec: EngineSpec, decoder: Decoder | PagedDecoder, cache: KVCache, kernels: Kernels
    ) -> None:
        self.spec = spec
        self.config = decoder.config
        self.ends = (*spec.exits.layers, spec.depth)
        self.cache = cache
        self.decoder: AnyDecoder = decoder
        self._started = spec
        self._eager = decoder
        self._swap = KernelSwap(spec, decoder, kernels) if isinstance(decoder, Decoder) else None
        self._freeing: threading.Event | None = None

    @property
    def weights(self) -> ModelWeights:
        return self._eager.weights

    @property
    def full_depth(self) -> int:
        """Layers of the whole model."""
        return self.spec.checkpoint.num_layers

    def fastest(self) -> AnyDecoder:
        """The compiled decoder from the pass after it became ready, until then the eager one."""
        if self._swap is not None and (compiled := self._swap.take()) is not None:
            self.decoder = compiled
            self._eager = compiled.eager
            self._swap = None
        return self.decoder

    @property
    def is_compiled(self) -> bool:
        """Whether the next pass runs on the compiled kernels; on GPUs, as a graph."""
        if isinstance(self.decoder, PagedDecoder):
            return self.decoder.graphs is not None
        return self._swap is None or self._swap.take() is not None

    def wait_compiled(self, timeout_s: float) -> bool:
        """Wait for a compilation under way; return `is_compiled`."""
        if self._swap is not None:
            self._swap.wait(timeout_s)
        return self.is_compiled

    def close(self) -> None:
        """Give the device memory that is not tensors' back."""
        if isinstance(self.decoder, PagedDecoder):
            self.decoder.close()

    # Changing the depth: see `quadriga.engine.depth`.

    def prepare_depth(self, depth: int, timeout_s: float) -> PreparedLayers:
        """Load layers up to `depth`, beside what runs; the caller waits and closes them.

        Any thread but the engine's.

        Raises:
            ConfigError: No such depth, weights that are missing or damaged, no room for KV.
            DeadlineExceeded: It took longer than `timeout_s`.
        """
        spec = self.spec
        eager = resizable(spec, self._eager, depth)
        check_depth(spec, depth, deeper=True)
        compiled = self.decoder if isinstance(self.decoder, CompiledDecoder) else None
        return prepare(self._spec_at(spec, eager, depth), eager, compiled, timeout_s=timeout_s)

    def check_drop(self, depth: int) -> None:
        """Raises: ConfigError: `cut` would."""
        resizable(self.spec, self._eager, depth)
        check_depth(self.spec, depth, deeper=False)

    def cut(self, depth: int) -> tuple[EngineSpec, Decoder]:
        """The first `depth` layers alone, ready to be put in.

        Raises:
            ConfigError: The engine cannot hold so many.
        """
        self.check_drop(depth)
        eager = resizable(self.spec, self._eager, depth)
        return self._spec_at(self.spec, eager, depth), shallower(eager, depth)

    def unpack(self, prepared: PreparedLayers) -> tuple[EngineSpec, Decoder]:
        """Layers that `prepare_depth` loaded, ready to be put in.

        Raises:
            ConfigError: They were made for another depth than is loaded now, or are closed.
        """
        if prepared.before != self.spec.depth or prepared.eager is None:
            state = "closed" if prepared.eager is None else f"made for {prepared.before} layers"
            raise ConfigError(
                f"depth: the layers prepared are {state}; this engine holds {self.spec.depth}: "
                "prepare them again",
                param="depth",
            )
        return prepared.spec, prepared.eager

    def put(
        self, spec: EngineSpec, eager: Decoder, compiled: CompiledDecoder | None
    ) -> list[object]:
        """Run another number of layers from the next pass on.

        Args:
            compiled: Over `eager`, where it is there already.

        Returns:
            What ran until now, for `let_go`.
        """
        fastest = self.fastest()
        old: list[object] = [self._eager, fastest]
        if isinstance(fastest, CompiledDecoder):
            self.decoder = compiled or fastest.over(eager)
        else:
            self.decoder = eager
        if self._swap is not None:
            self._swap.follow(eager)
        self.spec, self._eager, self.cache = spec, eager, eager.cache
        self.ends = (*spec.exits.layers, spec.depth)
        return old

    def let_go(self, old: list[object]) -> None:
        """Give back the memory of layers that are gone, in the background.

        Args:
            old: What `put` returned; nobody else holds it by now.
        """
        self._freeing = let_go(old, self.spec.depth)

    def wait_freed(self, timeout_s: float) -> bool:
        """Wait until layers that were let go have given their memory back; False: not yet."""
        return self._freeing is None or self._freeing.wait(timeout_s)

    def _spec_at(self, spec: EngineSpec, eager: Decoder, depth: int) -> EngineSpec:
        return spec_at(spec, self._started, depth, eager.weights.layers[0].nbytes)
