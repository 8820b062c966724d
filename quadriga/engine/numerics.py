"""Names of arithmetic: two engines of one name compute the same numbers, to the bit.

Products of floats depend on the order of their sums, and that on the code that was compiled, on the
processor it was compiled for, and on the form of the weights. In a deterministic deployment KV goes
only where it would have been computed the same; see `ReplicaInfo.numerics`.
"""

from __future__ import annotations

import torch

from quadriga.config.engine_spec import EngineSpec


def numerics(spec: EngineSpec, code: str) -> str:
    """The name of an engine's arithmetic: the form of its weights and what computes with them.

    Weights as the checkpoint has them are numbers of `spec.dtype`, exactly.
    """
    return f"{spec.dtype if spec.weights == 'auto' else spec.weights} {code}"


def torch_code(device: torch.device) -> str:
    """What computes in plain torch: its version, and the processor it chooses its code for."""
    processor = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    return f"torch {torch.__version__} {processor}"
