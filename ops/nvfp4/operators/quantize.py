"""Activation quantisers: with a given global scale, or with one global scale per token."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..format import GROUP
from ..kernels.quantize import quantize_rows
from ..registry import need, need_activation_dtype, need_same_device, refuse_grad, register
from .launch import on_device_of, power_of_two, require_warm

SCHEMA = "quantize(Tensor x, Tensor global_scale) -> (Tensor codes, Tensor block_scale)"
SCHEMA_PER_TOKEN = "quantize_per_token(Tensor x) -> (Tensor codes, Tensor block_scale, Tensor token_scale)"


def _check(name: str, x: Tensor, global_scale: Tensor | None = None) -> None:
    refuse_grad(name, x, global_scale)
    need_activation_dtype(name, x)
    need(
        x.dim() >= 1 and x.shape[-1] % GROUP == 0,
        name,
        f"the last size of x is {tuple(x.shape)}; need a multiple of 16",
    )
    if global_scale is not None:
        need_same_device(name, x, global_scale=global_scale)
        need(
            global_scale.dtype == torch.float32 and global_scale.numel() == 1,
            name,
            f"global_scale is {global_scale.dtype} {tuple(global_scale.shape)}; need one float32 (decode convention)",
        )


def _outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    lead, k = x.shape[:-1], x.shape[-1]
    return x.new_empty((*lead, k // 2), dtype=torch.uint8), x.new_empty((*lead, k // GROUP), dtype=torch.uint8)


def _launch(name: str, x: Tensor, global_scale: Tensor | None, codes: Tensor, scales: Tensor, token: Tensor | None):
    k = x.shape[-1]
    rows = codes.numel() // (k // 2) if k else 0
    if rows == 0:
        return
    flat = x.contiguous()
    require_warm(name, flat, k)
    with on_device_of(x):
        quantize_rows[(rows,)](
            flat,
            global_scale,
            codes,
            scales,
            token,
            k,
            PER_TOKEN=token is not None,
            BLOCK=power_of_two(k),
            enable_fp_fusion=False,
        )


def _cuda(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    _check("quantize", x, global_scale)
    codes, scales = _outputs(x)
    _launch("quantize", x, global_scale, codes, scales, None)
    return codes, scales


def _cpu(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    _check("quantize", x, global_scale)
    return reference.quantize(x, global_scale)


def _fake(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    _check("quantize", x, global_scale)
    return _outputs(x)


def _cuda_per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check("quantize_per_token", x)
    codes, scales = _outputs(x)
    token = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    _launch("quantize_per_token", x, None, codes, scales, token)
    return codes, scales, token


def _cpu_per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check("quantize_per_token", x)
    return reference.quantize_per_token(x)


def _fake_per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check("quantize_per_token", x)
    return (*_outputs(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))


register(SCHEMA, cpu=_cpu, cuda=_cuda, fake=_fake)
register(SCHEMA_PER_TOKEN, cpu=_cpu_per_token, cuda=_cuda_per_token, fake=_fake_per_token)


def quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x to NVFP4 with one global scale.

    Args:
        x: [..., K] bfloat16, float16 or float32; K a multiple of 16.
        global_scale: one float32 that multiplies on decode: amax / 2688, never its reciprocal.

    Returns:
        codes uint8 [..., K/2] (element 2k in the low nibble) and block_scale uint8 [..., K/16] holding e4m3. A block
        with a NaN or an infinity gets scale byte 0x7F and so decodes to NaN.

    Raises:
        ShapeError, GradError.
    """
    return torch.ops.nvfp4.quantize(x, global_scale)


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x with one global scale per row, amax of its finite elements / 2688, made on the device.

    Args:
        x: [..., K] bfloat16, float16 or float32; K a multiple of 16.

    Returns:
        codes uint8 [..., K/2], block_scale uint8 [..., K/16], token_scale float32 [..., 1]; a row too small for a
        normal float32 scale becomes zero.

    Raises:
        ShapeError, GradError.
    """
    return torch.ops.nvfp4.quantize_per_token(x)
