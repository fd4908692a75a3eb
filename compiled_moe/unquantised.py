"""The same model without our operator: what a checkpoint's codes stand for, in transformers' own modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvfp4 import dequantize

from .experts import NVFP4Experts, experts_of


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
        state |= {f"{name}.{key}": value for key, value in _weights(module).items()}
    missing, unexpected = plain.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return plain.to(parameter.device).eval().requires_grad_(False)


def _weights(module: NVFP4Experts) -> dict[str, Tensor]:
    t = module.weights.tensors
    rows = t["w13"].shape[1] // t["w13_global_scale"].shape[1]
    scale13 = t["w13_global_scale"].repeat_interleave(rows, 1).unsqueeze(-1)
    scale2 = t["w2_global_scale"].repeat_interleave(t["w2"].shape[1]).reshape(*t["w2"].shape[:2], 1)
    return {
        "gate_up_proj": dequantize(t["w13"], t["w13_block_scale"], scale13, torch.float32),
        "down_proj": dequantize(t["w2"], t["w2_block_scale"], scale2, torch.float32),
    }
