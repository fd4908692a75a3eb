"""The same model without our operator: what a checkpoint's codes stand for, in transformers' own modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvfp4 import ExpertWeights, dequantize

from .experts import experts_of


def unquantised(model: Any, experts_implementation: str = "eager") -> Any:
    """Build transformers' model with the dequantised experts of a loaded one; the arbiter of every comparison.

    Args:
        model: from ``compiled_moe.load``. experts_implementation: transformers' ("eager", "grouped_mm", ...).

    Returns:
        A model of the same class, dtype and device, in eval mode.
    """
    from transformers import AutoModelForCausalLM

    config = type(model.config).from_dict(model.config.to_dict())
    config._experts_implementation = experts_implementation
    parameter = next(model.parameters())
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=parameter.dtype)
    state = dict(model.state_dict())
    for name, module in experts_of(model).items():
        state |= {f"{name}.{key}": value for key, value in dequantised(module.weights).items()}
    missing, unexpected = plain.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return plain.to(parameter.device).eval().requires_grad_(False)


def dequantised(weights: ExpertWeights) -> dict[str, Tensor]:
    """Float32 weights of all experts by transformers' names, whatever the layout that the kernels read."""
    t, into, out = weights.tensors, [], []
    for e in range(weights.spec.num_experts):
        c = weights.checkpoint(e)
        parts = t["w13_global_scale"].shape[1]
        scale = t["w13_global_scale"][e].repeat_interleave(c["w13"].shape[0] // parts).unsqueeze(1)
        into.append(dequantize(c["w13"], c["w13_block_scale"], scale, torch.float32))
        out.append(dequantize(c["w2"], c["w2_block_scale"], t["w2_global_scale"][e : e + 1], torch.float32))
    return {"gate_up_proj": torch.stack(into), "down_proj": torch.stack(out)}
