"""Dense NVFP4 layers: attention, shared experts."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference, tiles
from ..format import GROUP, PRECISIONS
from ..kernels import moe as kernels
from ..registry import as_bytes, need, need_activation_dtype, need_same_device, refuse_grad, register
from .fake_quantize import fake_quantize, scale_mode
from .launch import on_device_of, require_warm

SCHEMA = (
    "linear(Tensor x, Tensor codes, Tensor block_scale, Tensor global_scale, Tensor? a_scale=None, "
    "Tensor? bias=None, *, str precision='w4a16') -> Tensor"
)


def _fake(x, codes, block_scale, global_scale, a_scale=None, bias=None, *, precision="w4a16"):
    refuse_grad("linear", x, global_scale, bias)
    need_activation_dtype("linear", x)
    need_same_device(
        "linear", x, codes=codes, block_scale=block_scale, global_scale=global_scale, a_scale=a_scale, bias=bias
    )
    need(precision in PRECISIONS, "linear", f"precision is {precision!r}; known are {', '.join(PRECISIONS)}")
    need(x.dim() == 2, "linear", f"x has shape {tuple(x.shape)}; need [tokens, K], flatten the leading sizes")
    n, k = codes.shape[0], x.shape[1]
    need(
        codes.dtype == block_scale.dtype == torch.uint8
        and k % GROUP == 0
        and tuple(codes.shape) == (n, k // 2)
        and tuple(block_scale.shape) == (n, k // GROUP)
        and codes.is_contiguous()
        and block_scale.is_contiguous(),
        "linear",
        f"codes {codes.dtype} {tuple(codes.shape)} with block_scale {block_scale.dtype} {tuple(block_scale.shape)} "
        f"for x of {k} columns; need contiguous uint8 [N, {k}/2] and [N, {k}/16]",
    )
    need(
        global_scale.dtype == torch.float32 and global_scale.numel() in (1, n),
        "linear",
        f"global_scale is {global_scale.dtype} {tuple(global_scale.shape)}; need float32, one or one per output row",
    )
    need(
        precision != "w4a4_static" or (a_scale is not None and a_scale.numel() == 1 and a_scale.dtype == torch.float32),
        "linear",
        "w4a4_static needs a_scale as one float32; use w4a4_per_token where there is none",
    )
    need(bias is None or tuple(bias.shape) == (n,), "linear", f"bias must be [{n}]")
    return x.new_empty((x.shape[0], n))


def _cpu(x, codes, block_scale, global_scale, a_scale=None, bias=None, *, precision="w4a16"):
    _fake(x, codes, block_scale, global_scale, a_scale, bias, precision=precision)
    return reference.linear(x, codes, block_scale, global_scale, a_scale, bias, precision=precision)


def _cuda(x, codes, block_scale, global_scale, a_scale=None, bias=None, *, precision="w4a16"):
    out = _fake(x, codes, block_scale, global_scale, a_scale, bias, precision=precision)
    if out.numel():
        with on_device_of(x):
            _launch(out, x, codes, block_scale, global_scale, a_scale, bias, precision)
    return out


def _launch(out, x, codes, block_scale, global_scale, a_scale, bias, precision) -> None:
    (m, k), n = x.shape, out.shape[1]
    x = x.contiguous()
    tile = tiles.choose(m, 1, k)
    mode = scale_mode(precision, a_scale)
    stride = int(global_scale.numel() > 1)
    require_warm("linear", x, k, n, mode, stride, None if bias is None else bias.dtype, tile.key())
    rows, scale = x, None
    if mode != "none":
        rows, scale = fake_quantize(x, m, None, None, a_scale, mode, 1, 1)
    kernels.linear[(-(-n // tile.n), -(-m // tile.m))](
        rows, scale, codes, block_scale, global_scale, bias, out, m, k, n, stride, SCALE=mode,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, EVEN_K=k % tile.k == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


register(SCHEMA, cpu=_cpu, cuda=_cuda, fake=_fake)


def linear(
    x: Tensor,
    codes: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    a_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    precision: str = "w4a16",
) -> Tensor:
    """X W^T + bias with an NVFP4 weight.

    Args:
        x: [tokens, K] bfloat16, float16 or float32.
        codes: uint8 [N, K/2]. block_scale: uint8 or float8_e4m3fn [N, K/16].
        global_scale: float32, one, or one per output row [N] (fused layers whose parts differ).
        a_scale: one float32, the static activation scale; only for "w4a4_static".
        bias: [N].
        precision: "w4a16", "w4a4_static" or "w4a4_per_token".

    Returns:
        [tokens, N] in x's dtype; products accumulate and are scaled in float32.

    Raises:
        ShapeError, GradError.
    """
    return torch.ops.nvfp4.linear(x, codes, as_bytes(block_scale), global_scale, a_scale, bias, precision=precision)
