"""How much KV memory a replica on CPUs has, and how long a sequence may be with it.

On a GPU the replica finds its memory itself, once the weights are in it; from there on the rules
for the length of a sequence are these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quadriga.catalogue.headers import TensorPlace, read_checkpoint_headers
from quadriga.catalogue.sizes import sizes_of
from quadriga.checkpoint.folder import Checkpoint
from quadriga.checkpoint.json_files import read_object
from quadriga.checkpoint.quantisation import read_quantisation
from quadriga.checkpoint.stored_forms import BLOCK_FORMS
from quadriga.config.engine_spec import Runner
from quadriga.errors import ConfigError

UNKNOWN_KV_BYTES = 1 << 30
"""For a replica whose node is not known yet."""
SERVICE_BYTES = 1 << 30
"""Ray, Serve and the ingress on a node, at most."""
REPLICA_BYTES = 512 << 20
"""A replica's process beside weights and KV."""
KV_SHARE = 0.5
"""Of what is left on a node. KV of paused sequences lies in the other half."""
FLOOR_TOKENS = 1024
"""Whatever the estimate says, a replica has KV for one sequence of so many tokens."""
USEFUL_TOKENS = 2048
"""A sequence may be so long, where the KV memory holds it at all, rather than have company."""
LEAST_TOKENS = 256
"""A service whose sequences would be shorter is refused."""
SEQUENCES = {"native": 2, "baton": 8}
"""So many sequences of the greatest length the KV memory holds. In the relay batch short rows take
as much as the longest beside them, so this is how many rows there are."""
PARTS = {2: "half", 8: "an eighth"}
ROUND_TOKENS = 256
_KEPT_FORMS = {"F32", "BF16", "F16", *BLOCK_FORMS}


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """A node that may run replicas.

    Attributes:
        num_cpus: Ray CPUs.
        memory_bytes: What processes may take; a limit of its container counts.
    """

    num_cpus: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """One model's weights on a node.

    Attributes:
        num_bytes: Of one copy.
        num_copies: 1 where the processes of a node share one.
    """

    num_bytes: int
    num_copies: int


def weight_bytes(
    checkpoint: Checkpoint, value_bytes: int, *, matrices: int | Literal["stored"]
) -> int:
    """Return the bytes that an engine holds of a checkpoint's weights, all layers; reads headers.

    Where the headers cannot be read, or hold more than float weights, it is the files' size, as
    of 16-bit floats.

    Args:
        value_bytes: Of a number that the engine computes with.
        matrices: Bytes of each of their weights; `stored`: as the file has them, 16-bit floats and
            blocks included.
    """
    try:
        if read_quantisation(checkpoint.path) is not None:  # multiplied out while it is loaded
            sizes = sizes_of(read_object(checkpoint.path / "config.json"), checkpoint.exits)
            values = sum(sizes.layer_params) + sizes.embed_params + sizes.head_params
            return values * (value_bytes if matrices == "stored" else matrices)
        places = read_checkpoint_headers(checkpoint.path)
    except ConfigError:  # the engine says what is wrong with them, if it cannot load them either
        stored = sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))
        return stored * max(1, value_bytes // 2)

    def num_bytes(place: TensorPlace) -> int:
        if len(place.shape) != 2:
            return place.num_values * value_bytes
        if matrices != "stored":
            return place.num_values * matrices
        is_kept = place.dtype in _KEPT_FORMS
        return place.num_bytes if is_kept else place.num_values * value_bytes

    return sum(map(num_bytes, places.values()))


@dataclass(frozen=True, slots=True)
class KVShare:
    """How much KV memory a replica has, by the nodes that its ranks may be on.

    Attributes:
        weights: Of all models served.
        num_processes: Ranks of all replicas.
        cpus_each: Ray CPUs that one reserves.
        ranks: Of the replica.
        least_bytes: It has, whatever is left.
    """

    weights: tuple[WeightBytes, ...]
    num_processes: int
    cpus_each: float
    ranks: int = 1
    least_bytes: int = 0

    def bytes_on(self, nodes: Iterable[NodeMemory]) -> int:
        """Bytes on whatever of these nodes; without any it is `UNKNOWN_KV_BYTES` a rank."""
        each = min(map(self._of_rank, nodes), default=UNKNOWN_KV_BYTES)
        return max(each * self.ranks, self.least_bytes)

    def _of_rank(self, node: NodeMemory) -> int:
        most = math.inf if self.cpus_each <= 0 else node.num_cpus / self.cpus_each + 1e-6
        here = max(1, int(min(self.num_processes, most)))
        loaded = sum(w.num_bytes * min(here, w.num_copies) for w in self.weights)
        left = node.memory_bytes - SERVICE_BYTES - here * REPLICA_BYTES - loaded
        return int(KV_SHARE * left / here)


def fitting_length(positions: int, kv_tokens: int, runner: Runner) -> int:
    """Most tokens of one sequence, for a memory that holds `kv_tokens` tokens of KV.

    Args:
        positions: Most that the model was made for.
    """
    part = kv_tokens // SEQUENCES[runner]
    if part >= ROUND_TOKENS:
        part -= part % ROUND_TOKENS
    return max(1, min(positions, max(part, min(kv_tokens, USEFUL_TOKENS))))


def least_length(positions: int) -> int:
    """Tokens that one sequence must be allowed, or nothing is served."""
    return min(positions, LEAST_TOKENS)


def describe_length(
    length: int, positions: int, *, kv_tokens: int, token_bytes: int, is_auto: bool, runner: Runner
) -> str:
    """One sentence: how long a sequence may be, and why.

    Args:
        length: Tokens it may have.
        kv_tokens: That the KV memory of a replica holds.
        token_bytes: KV of one token.
        is_auto: `engine.max_model_len` says nothing else.
    """
    if length >= positions:
        return f"{length} tokens: all positions of the model"
    if not is_auto:
        return f"{length} of {positions} positions: engine.max_model_len"
    held = kv_tokens * token_bytes
    size = f"{held / (1 << 30):.1f} GiB" if held >= 1 << 30 else f"{held >> 20} MiB"
    parts = SEQUENCES[runner]
    why = f"{PARTS[parts]} of" if length <= kv_tokens // parts else "what fits into"
    return (
        f"{length} of {positions} positions: {why} {size} of KV memory; more with "
        "engine.kv_memory_bytes or engine.max_model_len"
    )
