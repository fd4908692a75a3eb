"""Activations as FP4 tensor cores would see them: how W4A4 is computed exactly on bf16 tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.quantize import fake_quantize_rows
from .launch import power_of_two


def scale_mode(precision: str, scale: Tensor | None) -> str:
    """Which activation scale a GEMM applies; see kernels.moe.row_scale."""
    if precision != "w4a4_static":
        return "none" if precision == "w4a16" else "token"
    assert scale is not None
    return "shared" if scale.numel() == 1 else "expert"


def fake_quantize(x, rows, ids, expert_map, static, mode, num_ids, experts) -> tuple[Tensor, Tensor]:
    """X as FP4 tensor cores would see it, in x's dtype, one row for a token or one for a routed slot; and its scale."""
    k = x.shape[1]
    values = x.new_empty((rows, k))
    scale = x.new_empty(rows, dtype=torch.float32) if mode == "token" else static
    fake_quantize_rows[(rows,)](
        x, ids, expert_map, static, values, scale if mode == "token" else None,
        k, rows // x.shape[0], num_ids, experts, SCALE=mode, BLOCK=power_of_two(k), enable_fp_fusion=False,
    )  # fmt: skip
    return values, scale
