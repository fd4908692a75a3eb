"""From a checkpoint folder to a transformers model whose experts run on our operator.

The model is built empty, filled by ``filling.Filler``, and handed out in eval mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nvfp4 import ExpertWeights, ScaleError, ScaleReport

from .checkpoint import Checkpoint
from .device import chosen
from .errors import CheckpointError, MachineError
from .filling import Filler

DEMO = Path(__file__).parent / "data" / "demo"
"""The shipped model."""


@dataclass
class Loaded:
    """What ``load`` found, kept on the model as ``model.nvfp4``."""

    checkpoint: Checkpoint
    precision: str
    report: ScaleReport
    weights: dict[str, ExpertWeights] = field(default_factory=dict)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts, scales included."""
        return sum(w.nbytes for w in self.weights.values())

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts, each counted once."""
        shapes = [(w.spec, p) for w in self.weights.values() for p in w.spec.projections]
        return sum(spec.num_experts * math.prod(spec.shape(projection)) for spec, projection in shapes)


def load(
    path: str | Path = DEMO,
    *,
    precision: str = "w4a16",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    policy: str = "raise",
    repairs: tuple[str, ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Load an NVFP4 mixture-of-experts checkpoint.

    Args:
        path: folder or hub id; the shipped model by default.
        precision, policy, repairs: see ``nvfp4.finalize``.
        device: default cuda where there is one.
        dtype: of everything but the experts; default the checkpoint's on a GPU, float32 on a CPU (bfloat16 is
            emulated on most).
        progress: called with bytes done and bytes in all.

    Returns:
        A transformers model in eval mode; ``model.nvfp4`` is a ``Loaded``.

    Raises:
        CheckpointError, MachineError, nvfp4.ScaleError.
    """
    checkpoint = Checkpoint.open(path)
    device = chosen(device)
    model = _empty_model(checkpoint, dtype or (torch.float32 if device.type == "cpu" else None))
    filler = Filler(model, checkpoint, device, (precision, "report" if policy == "raise" else policy, repairs))
    filler.run(progress)
    if policy == "raise" and not filler.report.ok:
        raise ScaleError(filler.report)
    loaded = Loaded(checkpoint, precision, filler.report, filler.weights)
    model.nvfp4 = loaded
    return model.eval().requires_grad_(False)


def _empty_model(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Any:
    """The model of config.json on the meta device, real buffers where the checkpoint brings none."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MachineError("loading models needs transformers: pip install 'compiled-moe[hf]'") from error
    try:
        config = AutoConfig.from_pretrained(checkpoint.path)
        config.quantization_config = None
        del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **({} if dtype is None else {"dtype": dtype}))
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"transformers cannot build the model of {checkpoint.path}/config.json: {error}"
        ) from error
    for name, module in list(model.named_modules()):
        if any(b.is_meta for b in module._buffers.values() if b is not None) and not list(module.parameters()):
            model.set_submodule(name, type(module)(config))  # rotary embeddings: computed, never stored
    return model
