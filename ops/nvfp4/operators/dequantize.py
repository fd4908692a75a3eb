"""Codes and scales back to numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..format import GROUP
from ..kernels.quantize import dequantize_rows
from ..registry import as_bytes, need, need_same_device, refuse_grad, register
from .launch import on_device_of, power_of_two, require_warm

SCHEMA = "dequantize(Tensor codes, Tensor block_scale, Tensor global_scale, ScalarType dtype) -> Tensor"


def _check(codes: Tensor, block_scale: Tensor, global_scale: Tensor) -> None:
    refuse_grad("dequantize", codes, block_scale, global_scale)
    need_same_device("dequantize", codes, block_scale=block_scale, global_scale=global_scale)
    need(
        codes.dtype == torch.uint8 and block_scale.dtype == torch.uint8,
        "dequantize",
        f"codes are {codes.dtype} and block_scale {block_scale.dtype}; need uint8 storage (view e4m3 as uint8)",
    )
    expected = (*codes.shape[:-1], codes.shape[-1] * 2 // GROUP)
    need(
        codes.dim() >= 1 and codes.shape[-1] % (GROUP // 2) == 0 and tuple(block_scale.shape) == expected,
        "dequantize",
        f"codes {tuple(codes.shape)} with block_scale {tuple(block_scale.shape)}; need [..., K/2] and [..., K/16]",
    )
    need(
        global_scale.dtype == torch.float32
        and (global_scale.numel() == 1 or tuple(global_scale.shape) == (*codes.shape[:-1], 1)),
        "dequantize",
        f"global_scale is {global_scale.dtype} {tuple(global_scale.shape)}; need one float32, or one per row [..., 1]",
    )


def _fake(codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    _check(codes, block_scale, global_scale)
    return codes.new_empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=dtype)


def _cpu(codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    _check(codes, block_scale, global_scale)
    return reference.dequantize(codes, block_scale, global_scale, dtype)


def _cuda(codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = _fake(codes, block_scale, global_scale, dtype)
    k = out.shape[-1]
    rows = out.numel() // k if k else 0
    if rows:
        codes = codes.contiguous()
        require_warm("dequantize", codes, k, dtype, global_scale.numel() == 1)
        with on_device_of(codes):
            dequantize_rows[(rows,)](
                codes, block_scale.contiguous(), global_scale.contiguous(), out, k,
                SCALE_PER_ROW=int(global_scale.numel() > 1), BLOCK=power_of_two(k), enable_fp_fusion=False,
            )  # fmt: skip
    return out


register(SCHEMA, cpu=_cpu, cuda=_cuda, fake=_fake)


def dequantize(codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(e2m1 * e4m3) * global_scale, in float32, then rounded to dtype.

    Args:
        codes: uint8 [..., K/2].
        block_scale: uint8 or float8_e4m3fn [..., K/16].
        global_scale: one float32, or one a row [..., 1].
        dtype: of the result.

    Returns:
        [..., K] in dtype; NaN where the scale byte is 0x7F or 0xFF.

    Raises:
        ShapeError, GradError.
    """
    return torch.ops.nvfp4.dequantize(codes, as_bytes(block_scale), global_scale, dtype)
